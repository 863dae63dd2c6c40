//! Limits of locked, mapped and used memory, and of descriptors.

use crate::cgroup::{Groups, Version};
use crate::check::{Status, Verdict};
use crate::context::{CheckContext, Fabric};
use crate::process::{Limit, Process};
use crate::tree::{ReadError, if_exists};

/// Memory of one shard in bytes, rounded up: its arena with the default configuration, and the device's queues.
pub(super) const SHARD_BYTES: u64 = 64 << 20;
/// Memory of the rest of a server, in bytes.
const PROCESS_BYTES: u64 = 64 << 20;
/// File descriptors of one shard, the usual default limit of a process. It suffices for the default configuration,
/// which serves about 70 connections at full credits, with up to 4 descriptors each.
const SHARD_DESCRIPTORS: u64 = 1024;
/// The kernel's default limit of mappings per process. The software fabric uses at most half of it.
const MAPPINGS: u64 = 65530;

checks! {
    "memlock", Memory: memlock,
        wanted "64 MiB of lockable memory per shard (RLIMIT_MEMLOCK), or CAP_IPC_LOCK",
        why "RDMA devices pin registered memory, and registration fails beyond the limit; other fabrics pin none";
    "overcommit", Memory: overcommit,
        wanted "vm.overcommit_memory 0 or 1",
        why "in mode 2 address space counts as memory, so mapping peers' memory fails long before memory is used up";
    "max-map-count", Memory: max_map_count,
        wanted "vm.max_map_count of at least 65530",
        why "each area that a peer of the software fabric shares takes a mapping, up to half of the limit";
    "memory-limit", Memory: memory_limit,
        wanted "memory limits of at least 64 MiB plus 64 MiB per shard in the process's control groups",
        why "all buffers are touched at the start, and beyond the limit the kernel kills the process";
    "descriptors", Network on Soft Iwarp: descriptors,
        wanted "1024 open files per shard (RLIMIT_NOFILE)",
        why "each connection takes a descriptor, and on the software fabric one more per shared arena; connections that get \
              none are refused";
}

/// Returns the command that raises a limit of the shell: `ulimit` if permitted, otherwise prlimit as root.
///
/// The two commands call the limit `shell_option` and `resource`.
fn raise(context: &CheckContext, limit: Limit, wanted: u64, shell_option: &str, resource: &str) -> String {
    let value = if wanted == u64::MAX { "unlimited".to_owned() } else { wanted.to_string() };
    if limit.hard >= wanted || context.process().is_root() {
        return format!("ulimit {shell_option} {value}");
    }
    context.as_root(&format!("prlimit --pid $$ --{resource}={value}:{value}"))
}

fn limit_text(limit: u64) -> String {
    if limit == u64::MAX { "unlimited".to_owned() } else { limit.to_string() }
}

fn memlock(context: &CheckContext) -> Result<Verdict, ReadError> {
    let limit = Process::limit(context.tree(), "Max locked memory")?;
    let wanted = SHARD_BYTES * context.shards();
    let is_privileged = context.process().can_pin_all(context.tree());
    let observed = format!(
        "soft limit {} bytes, hard limit {}; CAP_IPC_LOCK: {}",
        limit_text(limit.soft),
        limit_text(limit.hard),
        if is_privileged { "yes" } else { "no" }
    );
    if limit.soft >= wanted || is_privileged {
        return Ok(Verdict::ok(observed));
    }
    let status = match context.server().fabric {
        Some(Fabric::Verbs) => Status::Error,
        Some(Fabric::Soft | Fabric::Iwarp) => return Ok(Verdict::ok(observed + "; this fabric pins no memory")),
        None => Status::Note,
    };
    let fix = [
        raise(context, limit, u64::MAX, "-l", "memlock"),
        "# permanently: LimitMEMLOCK=infinity in a unit, memlock in /etc/security/limits.d; docker run --ulimit memlock=-1".into(),
    ];
    Ok(Verdict::fault(status, observed, fix.join("\n")))
}

fn overcommit(context: &CheckContext) -> Result<Verdict, ReadError> {
    let mode: u32 = context.tree().read_number("/proc/sys/vm/overcommit_memory")?;
    Ok(Verdict::ok_if(mode < 2, mode.to_string(), Status::Warning, context.sysctl("vm.overcommit_memory=0")))
}

fn max_map_count(context: &CheckContext) -> Result<Verdict, ReadError> {
    let count: u64 = context.tree().read_number("/proc/sys/vm/max_map_count")?;
    let status = if context.server().fabric == Some(Fabric::Soft) { Status::Warning } else { Status::Note };
    Ok(Verdict::ok_if(
        count >= MAPPINGS,
        count.to_string(),
        status,
        context.sysctl(&format!("vm.max_map_count={MAPPINGS}")),
    ))
}

fn memory_limit(context: &CheckContext) -> Result<Verdict, ReadError> {
    let groups = Groups::read(context.tree(), "memory")
        .ok_or_else(|| ReadError::new("/sys/fs/cgroup", "no memory controller is mounted"))?;
    let (name, unlimited) = match groups.version {
        Version::V1 => ("memory.limit_in_bytes", "-1"),
        Version::V2 => ("memory.max", "max"),
    };
    let mut limits = Vec::new();
    for directory in &groups.directories {
        let file = format!("{directory}/{name}");
        // The topmost group has no such file. "max" (version 2), or more than any memory (version 1), is no limit.
        let Some(line) = if_exists(context.tree().read_line(&file))? else { continue };
        if line == unlimited {
            continue;
        }
        let bytes: u64 =
            line.parse().map_err(|_| ReadError::new(&file, format!("expected a limit, found {line:?}")))?;
        if bytes < 1 << 60 {
            limits.push((bytes, file));
        }
    }
    let Some((least, _)) = limits.iter().min().cloned() else { return Ok(Verdict::ok("no limit")) };
    let (wanted, observed) = (SHARD_BYTES * context.shards() + PROCESS_BYTES, format!("{} MiB", least >> 20));
    if least >= wanted {
        return Ok(Verdict::ok(observed));
    }
    let mut fix =
        vec!["# in a container, on its host: docker update --memory SIZE --memory-swap SIZE CONTAINER".to_owned()];
    let too_low = limits.into_iter().filter(|(bytes, _)| *bytes < wanted);
    fix.extend(too_low.map(|(_, file)| context.write(unlimited, &[file])));
    Ok(Verdict::fault(Status::Warning, observed, fix.join("\n")))
}

fn descriptors(context: &CheckContext) -> Result<Verdict, ReadError> {
    let limit = Process::limit(context.tree(), "Max open files")?;
    let wanted = SHARD_DESCRIPTORS * context.shards();
    let observed = format!("soft limit {}, hard limit {}", limit_text(limit.soft), limit_text(limit.hard));
    let fix = [
        raise(context, limit, wanted, "-n", "nofile"),
        "# permanently: LimitNOFILE= in a unit, nofile in /etc/security/limits.d; docker run --ulimit nofile=N".into(),
    ];
    Ok(Verdict::ok_if(limit.soft >= wanted, observed, Status::Warning, fix.join("\n")))
}
