//! Containers.

use crate::check::{Status, Verdict};
use crate::scene::Scene;
use crate::tree::{Tree, Unseen, if_there};

/// Default of container runtimes, in bytes.
const USUAL_SHM: u64 = 64 << 20;

checks! {
    "container", Container: container,
        wanted "no container, or one that was given devices, limits and a network on purpose",
        why "commands that set what the kernel has once are for the host; soft:NAME is known within one network namespace, \
              soft:/path where the path is shared; devices need --device /dev/infiniband and the host's network";
    "shm", Container: shm,
        wanted "more than a runtime's 64 MiB at /dev/shm",
        why "this library takes none of it, as its memory has no names (memfd); applications that share memory of their own do";
}

/// The kind of container, if the process can detect one.
pub(super) fn kind(tree: &Tree) -> Result<Option<String>, Unseen> {
    if let Some(name) = if_there(tree.line("/run/systemd/container"))? {
        return Ok(Some(name));
    }
    let groups = tree.text("/proc/1/cgroup").unwrap_or_default();
    let by_group = ["kubepods", "docker", "libpod", "containerd", "lxc"].into_iter().find(|word| groups.contains(word));
    let by_file = [("/.dockerenv", "docker"), ("/run/.containerenv", "podman")];
    let by_file = by_file.into_iter().find(|(file, _)| tree.exists(file)).map(|(_, name)| name);
    Ok(by_group.or(by_file).map(str::to_owned))
}

fn container(scene: &Scene) -> Result<Verdict, Unseen> {
    let Some(kind) = kind(scene.tree())? else { return Ok(Verdict::ok("none that says so")) };
    let fix = "# docker run --network host --device /dev/infiniband --ulimit memlock=-1 --cpuset-cpus LIST …";
    Ok(Verdict::fault(Status::Note, kind, fix))
}

fn shm(scene: &Scene) -> Result<Verdict, Unseen> {
    let mounts = scene.tree().text("/proc/self/mountinfo")?;
    // The last mount hides the others.
    let line = mounts.lines().rfind(|line| line.split(' ').nth(4) == Some("/dev/shm"));
    let line = line.ok_or_else(|| Unseen::new("/dev/shm", "nothing is mounted there"))?;
    // `size=65536k`; without it, half of all memory.
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
    let bytes: u64 = digits.parse().map_err(|_| Unseen::new("/dev/shm", format!("size={size}")))?;
    let bytes = bytes.saturating_mul(1 << shift);
    if bytes > USUAL_SHM {
        return Ok(Verdict::ok(size));
    }
    let fix = format!(
        "{}\n# in a container, at its start: docker run --shm-size 1g",
        scene.as_root("mount -o remount,size=1g /dev/shm")
    );
    Ok(Verdict::fault(Status::Note, size, fix))
}
