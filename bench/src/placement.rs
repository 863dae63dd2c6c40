//! Findings of `rpcrdma doctor` on a run's cores, on standard error.
#![forbid(unsafe_code)]

use std::path::Path;

use rpcrdma::Address;
use rpcrdma_config::print_error;
use rpcrdma_host::check::Area;
use rpcrdma_host::{CheckContext, CoreList, Fabric, PlannedServer, Status, Tree};

/// Warns about findings on these cores of this machine, or of the machine below `root`. Call it before pinning: a
/// pinned process is restricted to one core.
pub(crate) fn warn(root: Option<&Path>, address: &Address, cores: impl IntoIterator<Item = usize>) {
    if let Some(line) = warning_line(root.map(Tree::new).unwrap_or_default(), address, cores.into_iter().collect()) {
        print_error!("rpcperf: {line}");
    }
}

fn warning_line(tree: Tree, address: &Address, cores: CoreList) -> Option<String> {
    // An unresolved name is reported when the client connects.
    let ip = address.socket_address().ok().flatten().map(|at| at.ip());
    let hint = format!("`rpcrdma doctor {address} --cores {cores}` says what to do");
    let device = address.named_device().ok().flatten().map(|named| named.name);
    let fabric = Fabric::from_scheme(address.scheme());
    let context = CheckContext::new(tree, PlannedServer { fabric, ip, device, cores: Some(cores) });
    let found: Vec<String> = context
        .run_checks()
        .into_iter()
        .filter(|finding| finding.area == Area::Cores && finding.status >= Status::Warning)
        .map(|finding| format!("{}: {}", finding.name, finding.observed))
        .collect();
    (!found.is_empty()).then(|| format!("placement: {}; {hint}", found.join("; ")))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use clap::Parser;
    use rpcrdma_host::Topology;
    use rpcrdma_host::plan::{Plan, PlanRequest};

    use super::*;
    use crate::cli::{Cli, Command, Idle, TestKind};
    use crate::pin::Placement;

    #[test]
    fn findings_about_the_cores_are_one_line() {
        let root = tempfile::tempdir().unwrap();
        let file = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let line = |cores: &[usize]| {
            let cores = cores.iter().copied().collect();
            warning_line(Tree::new(root.path()), &"soft:x".parse().unwrap(), cores)
        };
        file("sys/devices/system/cpu/online", "0-3\n");
        file("sys/devices/system/cpu/isolated", "2-3\n");
        // Memory findings do not concern placement.
        file("proc/sys/vm/overcommit_memory", "2\n");
        assert_eq!(line(&[2, 3]), None);
        let warning = line(&[1, 2]).unwrap();
        assert_eq!(
            warning,
            "placement: isolation: not isolated: 1; `rpcrdma doctor soft:x --cores 1-2` says what to do"
        );
        file("sys/devices/system/cpu/cpu2/cpufreq/scaling_governor", "powersave\n");
        let warning = line(&[1, 2]).unwrap();
        assert!(
            warning.contains("isolation: ") && warning.contains("; governor: powersave") && !warning.contains('\n'),
            "{warning}"
        );
    }

    #[test]
    fn the_command_line_of_topo_is_valid() {
        let root = tempfile::tempdir().unwrap();
        let cpus = root.path().join("sys/devices/system/cpu");
        fs::create_dir_all(&cpus).unwrap();
        fs::write(cpus.join("online"), "0-4\n").unwrap();
        fs::write(cpus.join("isolated"), "2-3\n").unwrap();
        let topology = Topology::read(&Tree::new(root.path()));
        let plan = Plan::propose(&topology, None, PlanRequest::Threads { shards: 2, workers: 2 }).unwrap();
        let line = plan.commands("soft:x").into_iter().find(|line| line.starts_with("rpcperf ")).unwrap();
        let cli = Cli::try_parse_from(line.split(' ')).unwrap_or_else(|error| panic!("{line}: {error}"));
        let Command::Serve(args) = cli.command else { panic!("{line}") };
        let given = Placement::decide_for_server(&[], None).unwrap();
        let cores = given.server_cores(&args.cores, args.engine.shards as usize, args.engine.workers as usize);
        assert_eq!((&cores.shards[..], cores.workers.as_deref()), (plan.shards(), Some(plan.workers())), "{line}");
        assert_eq!((args.idle, args.only), (Idle::Poll, Some(TestKind::Calls)), "{line}");
    }
}
