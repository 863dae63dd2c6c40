//! Findings of the checks on good, faulty, empty and changing machines.

use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use rpcrdma_host::{CheckContext, Fabric, Finding, PlannedServer, Status, Tree};

use crate::faults::{self, IWARP, SOFT, VERBS};
use crate::machines::{ADDRESS, Machine, container, laptop, list, server};

const SERVERS: [(Option<Fabric>, Option<&str>); 4] =
    [(None, None), (SOFT, Some("1")), (IWARP, Some("0-3")), (VERBS, Some("1-3"))];

fn worst(findings: &[Finding]) -> Status {
    findings.iter().map(|finding| finding.status).max().expect("some findings")
}

fn status(findings: &[Finding], name: &str) -> Status {
    findings.iter().find(|finding| finding.name == name).unwrap_or_else(|| panic!("no {name}")).status
}

#[test]
fn the_worst_findings_of_a_laptop_are_notes() {
    let machine = laptop();
    for fabric in [None, SOFT, IWARP] {
        let findings = machine.run_checks(fabric, None);
        assert_eq!(worst(&findings), Status::Note, "{findings:#?}");
    }
    // Reserved cores raise notes to warnings, and never to errors.
    let findings = machine.run_checks(SOFT, Some("2"));
    for name in ["isolation", "irq-affinity", "irqbalance", "workqueues", "governor", "c-states", "huge-pages", "swap"]
    {
        assert_eq!(status(&findings, name), Status::Warning, "{name}");
    }
    assert_eq!(worst(&findings), Status::Warning);
    // A laptop has no RDMA device.
    assert_eq!(status(&machine.run_checks(VERBS, None), "memlock"), Status::Error);
    assert_eq!(status(&machine.run_checks(VERBS, None), "rdma-device"), Status::Error);
}

#[test]
fn wake_up_latency_depends_on_c_states_qos_bounds_and_halt_polling() {
    let machine = laptop();
    let bound = |us: &str| {
        for core in 0..4 {
            machine.file(&format!("/sys/devices/system/cpu/cpu{core}/power/pm_qos_resume_latency_us"), us);
        }
        machine.finding("c-states", SOFT, Some("2")).status
    };
    let statuses = ["0\n", "133\n", "20\n", "n/a\n"].map(bound);
    assert_eq!(statuses, [Status::Warning, Status::Warning, Status::Ok, Status::Ok]);

    // Only virtual machines have the idle driver haltpoll.
    let halt_poll = || {
        let finding = machine.finding("halt-poll", SOFT, None);
        (finding.status, finding.observed, finding.fix)
    };
    assert_eq!(halt_poll(), (Status::Ok, "idle driver intel_idle".into(), None));
    bound("0\n");
    let polls = "/sys/module/haltpoll/parameters/guest_halt_poll_ns";
    machine.file("/sys/devices/system/cpu/cpuidle/current_driver", "haltpoll\n").file(polls, "0\n");
    let fix = Some(format!("echo 200000 | sudo tee {polls}"));
    assert_eq!(halt_poll(), (Status::Note, "virtual cores halt immediately: guest_halt_poll_ns is 0".into(), fix));
    machine.file(polls, "200000\n");
    assert_eq!(halt_poll(), (Status::Ok, "virtual cores poll for up to 200 us".into(), None));
    machine.file(polls, "0\n");
    bound("n/a\n");
    assert_eq!(halt_poll(), (Status::Ok, "virtual cores do not halt".into(), None));
}

#[test]
fn a_container_is_detected_with_its_limits() {
    let machine = container();
    let findings = machine.run_checks(SOFT, None);
    assert_eq!(worst(&findings), Status::Warning, "{findings:#?}");
    for (name, wanted) in [
        ("container", Status::Note),
        ("shm", Status::Note),
        ("cpu-quota", Status::Warning),
        ("memory-limit", Status::Warning),
        ("affinity", Status::Ok),
        ("cpuset", Status::Ok),
    ] {
        assert_eq!(status(&findings, name), wanted, "{name}");
    }
    let cpuset = machine.finding("cpuset", SOFT, Some("1"));
    assert_eq!(cpuset.status, Status::Error);
    assert!(cpuset.fix.expect("a fix").contains("docker update --cpuset-cpus 1-2,10 CONTAINER"));
    // A quota of one core is enough for one thread.
    assert_eq!(machine.finding("cpu-quota", SOFT, Some("2")).status, Status::Ok);
    assert_eq!(status(&machine.run_checks(VERBS, None), "rdma-cm"), Status::Error);
}

#[test]
fn cores_of_an_isolated_cpuset_partition_count_as_isolated() {
    let machine = server();
    let group = "/sys/fs/cgroup/system.slice/server.service";
    machine.file("/sys/devices/system/cpu/isolated", "\n");
    assert_eq!(machine.finding("isolation", None, Some("4-5")).status, Status::Warning);
    machine.file(&format!("{group}/cpuset.cpus.partition"), "isolated\n");
    machine.file(&format!("{group}/cpuset.cpus.effective"), "4-5\n");
    let found = machine.finding("isolation", None, Some("4-5"));
    assert_eq!((found.status, found.observed.as_str()), (Status::Ok, "isolated: 4-5"));
    // A partition that the kernel has invalidated.
    machine
        .file(&format!("{group}/cpuset.cpus.partition"), "isolated invalid (Cpu list in cpuset.cpus not exclusive)\n");
    assert_eq!(machine.finding("isolation", None, Some("4-5")).status, Status::Warning);
    machine.file("/sys/fs/cgroup/cpuset.cpus.isolated", "5\n");
    assert_eq!(machine.finding("isolation", None, Some("5")).status, Status::Ok);
}

#[test]
fn offline_siblings_and_unshared_send_queues_are_ok() {
    let machine = server();
    let status = |name| machine.finding(name, None, Some("1-3")).status;
    machine.file("/sys/devices/system/cpu/isolated", "1-3\n");
    assert_eq!(status("smt"), Status::Warning);
    machine.file("/sys/devices/system/cpu/online", "0-8,12-15\n");
    assert_eq!(status("smt"), Status::Ok, "the siblings are offline");
    let queue = "/sys/class/net/eth0/queues/tx-0/xps_cpus";
    assert_eq!(
        [("0004\n", Status::Ok), ("0006\n", Status::Ok), ("0014\n", Status::Note), ("0010\n", Status::Ok)].map(
            |(mask, wanted)| {
                machine.file(queue, mask);
                status("rps-xps") == wanted
            }
        ),
        [true; 4]
    );
}

#[test]
fn an_interrupt_disturbs_cores_that_are_allowed_and_effective() {
    let machine = server();
    let status_of_irq_24 = |allowed: &str, effective: &str| {
        machine.file("/proc/irq/24/smp_affinity_list", allowed);
        machine.file("/proc/irq/24/effective_affinity_list", effective);
        machine.finding("irq-affinity", None, Some("1-3")).status
    };
    assert_eq!(status_of_irq_24("0-15\n", "2\n"), Status::Warning);
    assert_eq!(status_of_irq_24("0-15\n", "4\n"), Status::Ok);
    // The interrupt was redirected and moves at its next occurrence.
    assert_eq!(status_of_irq_24("0\n", "2\n"), Status::Ok);
    // The device of the interrupt has not started, so there is no effective affinity.
    assert_eq!(status_of_irq_24("0-15\n", "\n"), Status::Warning);
}

#[test]
fn an_address_of_a_peer_selects_the_device_on_the_route() {
    let machine = server();
    let find_device = |device: Option<&str>, ip: &str| {
        let ip = Some(ip.parse().expect("an address"));
        let planned = PlannedServer { fabric: VERBS, ip, device: device.map(Into::into), cores: None };
        CheckContext::new(machine.tree(), planned)
            .run_checks()
            .into_iter()
            .find(|finding| finding.name == "rdma-device")
            .expect("the check was run")
    };
    let find_by_route = |ip| find_device(None, ip);
    assert_eq!(find_by_route("192.0.2.77").observed, "mlx5_0");
    assert_eq!(find_by_route("0.0.0.0").observed, "mlx5_0");
    assert_eq!(find_by_route("203.0.113.1").status, Status::Error, "there is no route");
    assert_eq!(find_device(Some("mlx5_0"), "203.0.113.1").observed, "mlx5_0", "the address names the device");
    assert_eq!(find_device(Some("mlx5_7"), "192.0.2.77").observed, "no device mlx5_7, only mlx5_0");
}

#[test]
fn most_findings_on_an_empty_machine_are_unknown() {
    let machine = Machine::empty();
    for (fabric, cores) in SERVERS {
        let findings = machine.run_checks(fabric, cores);
        let known: Vec<_> = findings.iter().filter(|finding| finding.status != Status::Unknown).collect();
        for finding in known {
            // For these checks, missing files mean the default.
            let default = ["numa-balancing", "container", "affinity", "device-node"];
            let missing = ["rdma-device", "rdma-cm"];
            let expected = (default.contains(&finding.name) && finding.status == Status::Ok)
                || (missing.contains(&finding.name) && finding.status == Status::Error);
            assert!(expected, "{finding:?}");
        }
    }
}

/// One file at a time is missing, unreadable or malformed.
#[test]
fn every_check_has_a_finding_if_any_file_is_missing_or_malformed() {
    let machine = server();
    let counts: Vec<usize> = SERVERS.map(|(fabric, cores)| machine.run_checks(fabric, cores).len()).into();
    let run = |what: &str| {
        for ((fabric, cores), count) in SERVERS.into_iter().zip(&counts) {
            assert_eq!(machine.run_checks(fabric, cores).len(), *count, "{what}");
        }
    };
    // Files of one core represent those of all cores.
    let is_of_other_core = |path: &String| path.contains("/cpu/cpu") && !path.contains("/cpu/cpu1/");
    let files: Vec<String> = machine.files().into_iter().filter(|path| !is_of_other_core(path)).collect();
    assert!(files.len() > 100, "{} files", files.len());
    for path in files {
        let (text, mode) =
            (fs::read(machine.path(&path)).expect("a file"), fs::metadata(machine.path(&path)).expect("a mode"));
        machine.remove(&path);
        run(&format!("without {path}"));
        machine.directory(&path);
        run(&format!("{path} cannot be read"));
        machine.remove(&path);
        for nonsense in [&b""[..], b"-1\n", b"99999999999999999999999\n", b"\xff\xfe: \x00\na b c d e f g h\na b\n"] {
            machine.file(&path, nonsense);
            run(&format!("{path} contains {nonsense:?}"));
        }
        machine.file(&path, text);
        fs::set_permissions(machine.path(&path), mode.permissions()).expect("a mode");
    }
    run("restored");
}

/// For each fault, makes each file that causes it unreadable.
#[test]
fn checks_do_not_pass_if_their_deciding_file_is_unreadable() {
    let (mut files, mut passed) = (0, Vec::new());
    for fault in faults::all() {
        let (good, machine) = (server(), server());
        (fault.make)(&machine);
        let differs = |path: &String| fs::read(machine.path(path)).ok() != fs::read(good.path(path)).ok();
        for path in machine.files().iter().filter(|path| differs(path)) {
            let text = fs::read(machine.path(path)).expect("a file");
            machine.remove(path).directory(path);
            let found = machine.finding(fault.check, fault.fabric, Some(fault.cores));
            if found.status == Status::Ok {
                passed.push(format!("{}, which cannot read {path}: {}", fault.check, found.observed));
            }
            machine.remove(path).file(path, text);
            files += 1;
        }
    }
    assert_eq!(passed, [""; 0]);
    assert!(files > 40, "only {files} files");
}

#[test]
fn absence_of_irqbalance_is_unknown_if_processes_are_hidden() {
    let irqbalance = |machine: &Machine| machine.finding("irqbalance", None, Some("1-3"));
    let machine = server();
    assert_eq!(irqbalance(&machine).observed, "irqbalance does not run");
    // With `hidepid` on `/proc`, even the first process of other users is invisible.
    machine.remove("/proc/1/comm");
    let hidden = irqbalance(&machine);
    assert_eq!(hidden.status, Status::Unknown);
    assert!(hidden.observed.contains("hides processes"), "{hidden:?}");
    // A container shows only its own processes.
    let machine = container();
    let inside = irqbalance(&machine);
    assert_eq!((inside.status, inside.observed.as_str()), (Status::Unknown, "docker may hide processes of the host"));
    assert!(inside.fix.expect("a command").contains("on the host"));
    machine.file("/proc/700/comm", "irqbalance\n");
    assert_eq!(irqbalance(&machine).status, Status::Warning);
}

#[test]
fn devices_may_disappear_during_checks() {
    let machine = server();
    let done = AtomicBool::new(false);
    let device = machine.path("/sys/devices/pci0/0000:3b:00.0");
    let aside = machine.path("/aside");
    thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                fs::rename(&device, &aside).expect("unplugged");
                thread::yield_now();
                fs::rename(&aside, &device).expect("plugged in");
            }
        });
        let count = server().run_checks(VERBS, Some("1-3")).len();
        for _ in 0..200 {
            assert_eq!(machine.run_checks(VERBS, Some("1-3")).len(), count);
        }
        done.store(true, Ordering::Relaxed);
    });
}

#[test]
fn checks_of_this_machine_are_complete() {
    for fabric in [None, SOFT, IWARP, VERBS] {
        for cores in [None, Some("0"), Some("0-1"), Some("8191")] {
            let ip = fabric.map(|_| ADDRESS);
            let findings = CheckContext::new(
                Tree::default(),
                PlannedServer { fabric, ip, cores: cores.map(list), ..PlannedServer::default() },
            )
            .run_checks();
            assert!(findings.len() > 20);
            for finding in &findings {
                assert!(!finding.observed.is_empty(), "{finding:?}");
                let is_bad = finding.status > Status::Unknown;
                assert!(!is_bad || finding.fix.is_some(), "{finding:?}");
            }
        }
    }
}
