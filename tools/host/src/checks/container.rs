//! Containers.

use crate::check::{Status, Verdict};
use crate::context::CheckContext;
use crate::tree::{ReadError, Tree, if_exists};

/// Default size of `/dev/shm` in container runtimes, in bytes.
const DEFAULT_SHM: u64 = 64 << 20;

checks! {
    "container", Container: container,
        wanted "no container, or one with explicit devices, limits and network",
        why "kernel-wide settings must be changed on the host; soft:NAME is visible only in its network namespace, soft:/path \
              wherever the path is shared; devices need --device /dev/infiniband and the host's network";
    "shm", Container: shm,
        wanted "more than the runtimes' default of 64 MiB at /dev/shm",
        why "this library uses memfd instead of /dev/shm, but applications may keep their own shared memory there";
}

/// Returns the kind of container in which the process runs, if one is detected.
pub(super) fn kind(tree: &Tree) -> Result<Option<String>, ReadError> {
    if let Some(name) = if_exists(tree.read_line("/run/systemd/container"))? {
        return Ok(Some(name));
    }
    let groups = tree.read_text("/proc/1/cgroup").unwrap_or_default();
    let by_group = ["kubepods", "docker", "libpod", "containerd", "lxc"].into_iter().find(|word| groups.contains(word));
    let by_file = [("/.dockerenv", "docker"), ("/run/.containerenv", "podman")];
    let by_file = by_file.into_iter().find(|(file, _)| tree.exists(file)).map(|(_, name)| name);
    Ok(by_group.or(by_file).map(str::to_owned))
}

fn container(context: &CheckContext) -> Result<Verdict, ReadError> {
    let Some(kind) = kind(context.tree())? else { return Ok(Verdict::ok("no container detected")) };
    let fix = "# docker run --network host --device /dev/infiniband --ulimit memlock=-1 --cpuset-cpus LIST …";
    Ok(Verdict::fault(Status::Note, kind, fix))
}

fn shm(context: &CheckContext) -> Result<Verdict, ReadError> {
    let mounts = context.tree().read_text("/proc/self/mountinfo")?;
    // The last mount hides earlier ones.
    let line = mounts.lines().rfind(|line| line.split(' ').nth(4) == Some("/dev/shm"));
    let line = line.ok_or_else(|| ReadError::new("/dev/shm", "nothing is mounted there"))?;
    // `size=65536k`. Without this option the size is half of all memory.
    let size =
        line.rsplit(' ').next().and_then(|options| options.split(',').find_map(|option| option.strip_prefix("size=")));
    let Some(size) = size else { return Ok(Verdict::ok("half of all memory")) };
    let (digits, unit) = size.split_at(size.trim_end_matches(|c: char| c.is_ascii_alphabetic()).len());
    let shift = match unit {
        "k" => 10,
        "m" => 20,
        "g" => 30,
        _ => 0,
    };
    let bytes: u64 = digits.parse().map_err(|_| ReadError::new("/dev/shm", format!("size={size}")))?;
    let bytes = bytes.saturating_mul(1 << shift);
    if bytes > DEFAULT_SHM {
        return Ok(Verdict::ok(size));
    }
    let fix = format!(
        "{}\n# in a container, at its start: docker run --shm-size 1g",
        context.as_root("mount -o remount,size=1g /dev/shm")
    );
    Ok(Verdict::fault(Status::Note, size, fix))
}
