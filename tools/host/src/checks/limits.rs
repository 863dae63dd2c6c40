//! Limits of locked, mapped and used memory, and of descriptors.

use crate::cgroup::{Groups, Version};
use crate::check::{Status, Verdict};
use crate::process::{Limit, Process};
use crate::scene::{Fabric, Scene};
use crate::tree::{Unseen, if_there};

/// Bytes of one shard, rounded up: its arena with the default configuration, and the device's queues.
pub(super) const SHARD_BYTES: u64 = 64 << 20;
/// Bytes of the rest of a server.
const PROCESS_BYTES: u64 = 64 << 20;
/// A shard of the default configuration serves about 70 connections at full credits, of up to 4 descriptors each.
const SHARD_DESCRIPTORS: u64 = 1024;
/// The kernel's own default; the software fabric maps at most half of it.
const MAPPINGS: u64 = 65530;

checks! {
    "memlock", Memory: memlock,
        wanted "64 MiB that may be locked for each shard (RLIMIT_MEMLOCK), or CAP_IPC_LOCK",
        why "RDMA devices pin all memory that they are shown: without, no memory can be registered. Other fabrics pin none";
    "overcommit", Memory: overcommit,
        wanted "vm.overcommit_memory 0 or 1",
        why "with 2 address space counts as memory: mapping what peers share fails long before memory is out";
    "max-map-count", Memory: max_map_count,
        wanted "vm.max_map_count of 65530 at least",
        why "each piece of memory that a peer of the software fabric shares is a mapping, of half as many at most";
    "memory-limit", Memory: memory_limit,
        wanted "64 MiB for each shard and 64 MiB beside them in the process's control groups",
        why "all buffers are touched at the start: beyond the limit the kernel kills the process";
    "descriptors", Network on Soft Iwarp: descriptors,
        wanted "1024 open files for each shard (RLIMIT_NOFILE)",
        why "a connection takes a socket, on the software fabric also one for each arena that is shared: without, it is refused";
}

/// Raises a limit of the shell: from within if permitted, otherwise with prlimit.
fn raise(scene: &Scene, limit: Limit, wanted: u64, ulimit: &str, prlimit: &str) -> String {
    let value = if wanted == u64::MAX { "unlimited".to_owned() } else { wanted.to_string() };
    if limit.hard >= wanted || scene.process().is_root() {
        return format!("ulimit {ulimit} {value}");
    }
    scene.as_root(&format!("prlimit --pid $$ --{prlimit}={value}:{value}"))
}

fn told(limit: u64) -> String {
    if limit == u64::MAX { "unlimited".to_owned() } else { limit.to_string() }
}

fn memlock(scene: &Scene) -> Result<Verdict, Unseen> {
    let limit = Process::limit(scene.tree(), "Max locked memory")?;
    let wanted = SHARD_BYTES * scene.shards();
    let privileged = scene.process().may_pin_all(scene.tree());
    let observed = format!(
        "{} bytes, at most {}; CAP_IPC_LOCK: {}",
        told(limit.soft),
        told(limit.hard),
        if privileged { "yes" } else { "no" }
    );
    if limit.soft >= wanted || privileged {
        return Ok(Verdict::ok(observed));
    }
    let status = match scene.question().fabric {
        Some(Fabric::Verbs) => Status::Error,
        Some(Fabric::Soft | Fabric::Iwarp) => return Ok(Verdict::ok(observed + "; nothing is pinned there")),
        None => Status::Note,
    };
    let fix = [
        raise(scene, limit, u64::MAX, "-l", "memlock"),
        "# for good: LimitMEMLOCK=infinity in a unit, memlock in /etc/security/limits.d; docker run --ulimit memlock=-1".into(),
    ];
    Ok(Verdict::fault(status, observed, fix.join("\n")))
}

fn overcommit(scene: &Scene) -> Result<Verdict, Unseen> {
    let mode: u32 = scene.tree().number("/proc/sys/vm/overcommit_memory")?;
    Ok(Verdict::if_good(mode < 2, mode.to_string(), Status::Warning, scene.sysctl("vm.overcommit_memory=0")))
}

fn max_map_count(scene: &Scene) -> Result<Verdict, Unseen> {
    let count: u64 = scene.tree().number("/proc/sys/vm/max_map_count")?;
    let status = if scene.question().fabric == Some(Fabric::Soft) { Status::Warning } else { Status::Note };
    Ok(Verdict::if_good(
        count >= MAPPINGS,
        count.to_string(),
        status,
        scene.sysctl(&format!("vm.max_map_count={MAPPINGS}")),
    ))
}

fn memory_limit(scene: &Scene) -> Result<Verdict, Unseen> {
    let groups = Groups::of(scene.tree(), "memory")
        .ok_or_else(|| Unseen::new("/sys/fs/cgroup", "no memory controller is mounted"))?;
    let (name, most) = match groups.version {
        Version::V1 => ("memory.limit_in_bytes", "-1"),
        Version::V2 => ("memory.max", "max"),
    };
    let mut limits = Vec::new();
    for directory in &groups.directories {
        let file = format!("{directory}/{name}");
        // The topmost group has no such file. "max", or more than all memory, is no limit.
        let Some(line) = if_there(scene.tree().line(&file))? else { continue };
        if line == most {
            continue;
        }
        let bytes: u64 = line.parse().map_err(|_| Unseen::new(&file, format!("{line:?} is no limit")))?;
        if bytes < 1 << 60 {
            limits.push((bytes, file));
        }
    }
    let Some((least, _)) = limits.iter().min().cloned() else { return Ok(Verdict::ok("no limit")) };
    let (wanted, observed) = (SHARD_BYTES * scene.shards() + PROCESS_BYTES, format!("{} MiB", least >> 20));
    if least >= wanted {
        return Ok(Verdict::ok(observed));
    }
    let mut fix =
        vec!["# in a container, on its host: docker update --memory SIZE --memory-swap SIZE CONTAINER".to_owned()];
    fix.extend(limits.into_iter().filter(|(bytes, _)| *bytes < wanted).map(|(_, file)| scene.write(most, &[file])));
    Ok(Verdict::fault(Status::Warning, observed, fix.join("\n")))
}

fn descriptors(scene: &Scene) -> Result<Verdict, Unseen> {
    let limit = Process::limit(scene.tree(), "Max open files")?;
    let wanted = SHARD_DESCRIPTORS * scene.shards();
    let observed = format!("{}, at most {}", told(limit.soft), told(limit.hard));
    let fix = [
        raise(scene, limit, wanted, "-n", "nofile"),
        "# for good: LimitNOFILE= in a unit, nofile in /etc/security/limits.d; docker run --ulimit nofile=N".into(),
    ];
    Ok(Verdict::if_good(limit.soft >= wanted, observed, Status::Warning, fix.join("\n")))
}
