//! Every check has a finding on any tree.

use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use rpcrdma_host::{Fabric, Finding, Question, Scene, Status, Tree};

use crate::faults::{self, IWARP, SOFT, VERBS};
use crate::trees::{ADDRESS, Machine, container, laptop, list, server};

const QUESTIONS: [(Option<Fabric>, Option<&str>); 4] =
    [(None, None), (SOFT, Some("1")), (IWARP, Some("0-3")), (VERBS, Some("1-3"))];

fn worst(findings: &[Finding]) -> Status {
    findings.iter().map(|finding| finding.status).max().expect("some findings")
}

fn status(findings: &[Finding], name: &str) -> Status {
    findings.iter().find(|finding| finding.name == name).unwrap_or_else(|| panic!("no {name}")).status
}

#[test]
fn a_laptop_has_notes_and_no_more() {
    let machine = laptop();
    for fabric in [None, SOFT, IWARP] {
        let findings = machine.examine(fabric, None);
        assert_eq!(worst(&findings), Status::Note, "{findings:#?}");
    }
    // Reserved cores turn notes into warnings, but never into errors.
    let findings = machine.examine(SOFT, Some("2"));
    for name in ["isolation", "irq-affinity", "irqbalance", "workqueues", "governor", "c-states", "huge-pages", "swap"]
    {
        assert_eq!(status(&findings, name), Status::Warning, "{name}");
    }
    assert_eq!(worst(&findings), Status::Warning);
    // It lacks an RDMA device.
    assert_eq!(status(&machine.examine(VERBS, None), "memlock"), Status::Error);
    assert_eq!(status(&machine.examine(VERBS, None), "rdma-device"), Status::Error);
}

#[test]
fn how_long_a_core_may_take_to_wake_up_is_bounded_in_several_ways() {
    let machine = laptop();
    let bound = |us: &str| {
        for core in 0..4 {
            machine.file(&format!("/sys/devices/system/cpu/cpu{core}/power/pm_qos_resume_latency_us"), us);
        }
        machine.finding("c-states", SOFT, Some("2")).status
    };
    let told = ["0\n", "133\n", "20\n", "n/a\n"].map(bound);
    assert_eq!(told, [Status::Warning, Status::Warning, Status::Ok, Status::Ok]);

    // Virtual machines only.
    let told = || {
        let finding = machine.finding("halt-poll", SOFT, None);
        (finding.status, finding.observed, finding.fix)
    };
    assert_eq!(told(), (Status::Ok, "idle driver intel_idle".into(), None));
    bound("0\n");
    let polls = "/sys/module/haltpoll/parameters/guest_halt_poll_ns";
    machine.file("/sys/devices/system/cpu/cpuidle/current_driver", "haltpoll\n").file(polls, "0\n");
    let fix = Some(format!("echo 200000 | sudo tee {polls}"));
    assert_eq!(told(), (Status::Note, "they halt at once: guest_halt_poll_ns is 0".into(), fix));
    machine.file(polls, "200000\n");
    assert_eq!(told(), (Status::Ok, "they poll up to 200 us".into(), None));
    machine.file(polls, "0\n");
    bound("n/a\n");
    assert_eq!(told(), (Status::Ok, "they do not halt".into(), None));
}

#[test]
fn a_container_is_seen_with_its_limits() {
    let machine = container();
    let findings = machine.examine(SOFT, None);
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
    let asked = machine.finding("cpuset", SOFT, Some("1"));
    assert_eq!(asked.status, Status::Error);
    assert!(asked.fix.expect("a fix").contains("docker update --cpuset-cpus 1-2,10 CONTAINER"));
    // A quota of one core is enough for one thread.
    assert_eq!(machine.finding("cpu-quota", SOFT, Some("2")).status, Status::Ok);
    assert_eq!(status(&machine.examine(VERBS, None), "rdma-cm"), Status::Error);
}

#[test]
fn a_partition_of_control_groups_isolates_as_well() {
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
fn siblings_that_nobody_uses_and_queues_of_ones_own_are_quiet() {
    let machine = server();
    let status = |name| machine.finding(name, None, Some("1-3")).status;
    machine.file("/sys/devices/system/cpu/isolated", "1-3\n");
    assert_eq!(status("smt"), Status::Warning);
    machine.file("/sys/devices/system/cpu/online", "0-8,12-15\n");
    assert_eq!(status("smt"), Status::Ok, "they are offline");
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
fn an_interrupt_disturbs_where_it_goes_and_may_go() {
    let machine = server();
    let of_irq_24 = |may: &str, goes: &str| {
        machine.file("/proc/irq/24/smp_affinity_list", may).file("/proc/irq/24/effective_affinity_list", goes);
        machine.finding("irq-affinity", None, Some("1-3")).status
    };
    assert_eq!(of_irq_24("0-15\n", "2\n"), Status::Warning);
    assert_eq!(of_irq_24("0-15\n", "4\n"), Status::Ok);
    // It was redirected, and moves at its next occurrence.
    assert_eq!(of_irq_24("0\n", "2\n"), Status::Ok);
    // Its device has not started.
    assert_eq!(of_irq_24("0-15\n", "\n"), Status::Warning);
}

#[test]
fn peers_addresses_lead_to_the_device_on_the_way() {
    let machine = server();
    let on = |device: Option<&str>, ip: &str| {
        let ip = Some(ip.parse().expect("an address"));
        let question = Question { fabric: VERBS, ip, device: device.map(Into::into), cores: None };
        Scene::new(machine.tree(), question)
            .examine()
            .into_iter()
            .find(|finding| finding.name == "rdma-device")
            .expect("asked")
    };
    let at = |ip| on(None, ip);
    assert_eq!(at("192.0.2.77").observed, "mlx5_0");
    assert_eq!(at("0.0.0.0").observed, "mlx5_0");
    assert_eq!(at("203.0.113.1").status, Status::Error, "there is no route");
    assert_eq!(on(Some("mlx5_0"), "203.0.113.1").observed, "mlx5_0", "the address names it");
    assert_eq!(on(Some("mlx5_7"), "192.0.2.77").observed, "none of mlx5_0 is called mlx5_7");
}

#[test]
fn nothing_at_all_is_unknown() {
    let machine = Machine::empty();
    for (fabric, cores) in QUESTIONS {
        let findings = machine.examine(fabric, cores);
        let known: Vec<_> = findings.iter().filter(|finding| finding.status != Status::Unknown).collect();
        for finding in known {
            // A missing file means the default.
            let plain = ["numa-balancing", "container", "affinity", "device-node"];
            let missing = ["rdma-device", "rdma-cm"];
            let expected = (plain.contains(&finding.name) && finding.status == Status::Ok)
                || (missing.contains(&finding.name) && finding.status == Status::Error);
            assert!(expected, "{finding:?}");
        }
    }
}

/// Files are missing, unreadable or different, one at a time.
#[test]
fn half_of_a_tree_is_enough_to_look_at() {
    let machine = server();
    let asked: Vec<usize> = QUESTIONS.map(|(fabric, cores)| machine.examine(fabric, cores).len()).into();
    let look = |what: &str| {
        for ((fabric, cores), asked) in QUESTIONS.into_iter().zip(&asked) {
            assert_eq!(machine.examine(fabric, cores).len(), *asked, "{what}");
        }
    };
    // One core represents all.
    let of_others = |path: &String| path.contains("/cpu/cpu") && !path.contains("/cpu/cpu1/");
    let files: Vec<String> = machine.files().into_iter().filter(|path| !of_others(path)).collect();
    assert!(files.len() > 100, "{} files", files.len());
    for path in files {
        let (text, mode) =
            (fs::read(machine.path(&path)).expect("a file"), fs::metadata(machine.path(&path)).expect("a mode"));
        machine.remove(&path);
        look(&format!("without {path}"));
        machine.folder(&path);
        look(&format!("{path} cannot be read"));
        machine.remove(&path);
        for nonsense in [&b""[..], b"-1\n", b"99999999999999999999999\n", b"\xff\xfe: \x00\na b c d e f g h\na b\n"] {
            machine.file(&path, nonsense);
            look(&format!("{path} says {nonsense:?}"));
        }
        machine.file(&path, text);
        fs::set_permissions(machine.path(&path), mode.permissions()).expect("a mode");
    }
    look("as it was");
}

/// Each file that makes a check fire is made unreadable. The finding must not be good.
#[test]
fn unreadable_deciding_facts_are_not_ok() {
    let (mut looked, mut taken_for_good) = (0, Vec::new());
    for fault in faults::all() {
        let (good, machine) = (server(), server());
        (fault.make)(&machine);
        let differs = |path: &String| fs::read(machine.path(path)).ok() != fs::read(good.path(path)).ok();
        for path in machine.files().iter().filter(|path| differs(path)) {
            let text = fs::read(machine.path(path)).expect("a file");
            machine.remove(path).folder(path);
            let found = machine.finding(fault.check, fault.fabric, Some(fault.cores));
            if found.status == Status::Ok {
                taken_for_good.push(format!("{}, which cannot read {path}: {}", fault.check, found.observed));
            }
            machine.remove(path).file(path, text);
            looked += 1;
        }
    }
    assert_eq!(taken_for_good, [""; 0]);
    assert!(looked > 40, "only {looked} files");
}

#[test]
fn a_process_that_may_be_hidden_is_not_called_absent() {
    let irqbalance = |machine: &Machine| machine.finding("irqbalance", None, Some("1-3"));
    let machine = server();
    assert_eq!(irqbalance(&machine).observed, "it does not run");
    // With `hidepid` on `/proc`, even the first process of other users is invisible.
    machine.remove("/proc/1/comm");
    let hidden = irqbalance(&machine);
    assert_eq!(hidden.status, Status::Unknown);
    assert!(hidden.observed.contains("hides processes"), "{hidden:?}");
    // A container has processes of its own.
    let machine = container();
    let inside = irqbalance(&machine);
    assert_eq!((inside.status, inside.observed.as_str()), (Status::Unknown, "docker may not see it"));
    assert!(inside.fix.expect("a command").contains("on the host"));
    machine.file("/proc/700/comm", "irqbalance\n");
    assert_eq!(irqbalance(&machine).status, Status::Warning, "seen is seen");
}

#[test]
fn devices_may_go_while_they_are_looked_at() {
    let machine = server();
    let gone = AtomicBool::new(false);
    let device = machine.path("/sys/devices/pci0/0000:3b:00.0");
    let aside = machine.path("/aside");
    thread::scope(|scope| {
        scope.spawn(|| {
            while !gone.load(Ordering::Relaxed) {
                fs::rename(&device, &aside).expect("unplugged");
                thread::yield_now();
                fs::rename(&aside, &device).expect("plugged in");
            }
        });
        let asked = server().examine(VERBS, Some("1-3")).len();
        for _ in 0..200 {
            assert_eq!(machine.examine(VERBS, Some("1-3")).len(), asked);
        }
        gone.store(true, Ordering::Relaxed);
    });
}

#[test]
fn this_machine_can_be_looked_at() {
    for fabric in [None, SOFT, IWARP, VERBS] {
        for cores in [None, Some("0"), Some("0-1"), Some("8191")] {
            let ip = fabric.map(|_| ADDRESS);
            let findings =
                Scene::new(Tree::default(), Question { fabric, ip, cores: cores.map(list), ..Question::default() })
                    .examine();
            assert!(findings.len() > 20);
            for finding in &findings {
                assert!(!finding.observed.is_empty(), "{finding:?}");
                let bad = finding.status > Status::Unknown;
                assert!(!bad || finding.fix.is_some(), "{finding:?}");
            }
        }
    }
}
