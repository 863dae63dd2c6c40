//! Frequency, sleep states, and the clock.

use crate::check::{Status, Verdict};
use crate::scene::Scene;
use crate::topology::CPU;
use crate::tree::{Unseen, if_there};

const HALT_POLL: &str = "/sys/module/haltpoll/parameters/guest_halt_poll_ns";
const CLOCK: &str = "/sys/devices/system/clocksource/clocksource0";
/// Longest wake-up of a core, in microseconds: about that of a thread.
const WAKE_US: u64 = 20;
/// Clocks that need a system call, and in some cases a slow device access.
const SLOW_CLOCKS: &[&str] = &["hpet", "acpi_pm", "pit", "jiffies", "refined-jiffies"];

checks! {
    "governor", Cores: governor,
        wanted "frequency governor: performance",
        why "others lower the frequency of a core that waits, and raise it again milliseconds after work has come";
    "c-states", Cores: c_states,
        wanted "no C-state is used that takes longer than 20 us to leave",
        why "a shard or a worker that sleeps (idle policies adaptive, yield, event) is answered so much later";
    "halt-poll", Cores: halt_poll,
        wanted "virtual cores that have nothing to do poll before they halt, or do not halt",
        why "a virtual core that has halted is woken by the hypervisor: what sleeps on it is answered so much later, some 10 to 100 us, whatever its C-state says";
    "clock", Cores: clock,
        wanted "a clock that is read without a system call, such as tsc",
        why "deadlines and latencies are read from it: with a slow one each look is a system call, some also an exit to the hypervisor";
}

fn governor(scene: &Scene) -> Result<Verdict, Unseen> {
    let file = |core: usize| format!("{CPU}/cpu{core}/cpufreq/scaling_governor");
    let cores = scene.cores();
    let of_core = |core| Ok(if_there(scene.tree().line(&file(core)))?.map(|governor| (core, governor)));
    let told: Vec<(usize, String)> =
        cores.iter().map(of_core).filter_map(Result::transpose).collect::<Result<_, _>>()?;
    if told.is_empty() {
        return Err(Unseen::new(
            format!("{CPU}/cpu*/cpufreq/scaling_governor"),
            "not there: firmware or a hypervisor decides",
        ));
    }
    let slow: Vec<&(usize, String)> = told.iter().filter(|(_, governor)| governor != "performance").collect();
    let Some((_, name)) = slow.first() else { return Ok(Verdict::ok("performance")) };
    let observed = format!("{name} on {} of {} cores", slow.len(), told.len());
    let files: Vec<String> = match scene.question().cores {
        None => vec![format!("{CPU}/cpu*/cpufreq/scaling_governor")],
        Some(_) => slow.iter().map(|(core, _)| file(*core)).collect(),
    };
    Ok(Verdict::fault(scene.if_pinned(), observed, scene.write("performance", &files)))
}

/// File with the bound on a core's wake-up time.
fn resume_latency(core: usize) -> String {
    format!("{CPU}/cpu{core}/power/pm_qos_resume_latency_us")
}

/// The bound on a core's wake-up time, in microseconds, if there is one. In the file, 0 means no bound, and n/a means 0
/// (power management's quality of service).
fn bound(scene: &Scene, core: usize) -> Option<u64> {
    match scene.tree().line(&resume_latency(core)).ok()?.as_str() {
        "0" => None,
        "n/a" => Some(0),
        bound => bound.parse().ok(),
    }
}

fn c_states(scene: &Scene) -> Result<Verdict, Unseen> {
    let tree = scene.tree();
    let (mut seen, mut deep, mut longest) = (0, Vec::new(), (0, String::new()));
    for core in scene.cores().iter() {
        let folder = format!("{CPU}/cpu{core}/cpuidle");
        let bound = bound(scene, core).unwrap_or(u64::MAX);
        for state in tree.numbered(&folder, "state").unwrap_or_default() {
            let file = |name| format!("{folder}/state{state}/{name}");
            let Some(latency) = if_there(tree.number::<u64>(&file("latency")))? else { continue };
            seen += 1;
            if latency > WAKE_US && latency <= bound && tree.line(&file("disable"))? == "0" {
                longest = longest.max((latency, tree.line(&file("name")).unwrap_or_default()));
                deep.push((state, file("disable")));
            }
        }
    }
    if seen == 0 {
        return Err(Unseen::new(
            format!("{CPU}/cpu*/cpuidle/state*"),
            "not there: the kernel has no C-states to choose from",
        ));
    }
    if deep.is_empty() {
        return Ok(Verdict::ok("none that takes longer"));
    }
    let files: Vec<String> = if scene.question().cores.is_some() {
        deep.into_iter().map(|(_, file)| file).collect()
    } else {
        let mut states: Vec<usize> = deep.into_iter().map(|(state, _)| state).collect();
        states.sort_unstable();
        states.dedup();
        states.iter().map(|state| format!("{CPU}/cpu*/cpuidle/state{state}/disable")).collect()
    };
    let observed = format!("{} takes {} us", longest.1, longest.0);
    Ok(Verdict::fault(scene.if_pinned(), observed, scene.write("1", &files)))
}

fn halt_poll(scene: &Scene) -> Result<Verdict, Unseen> {
    let tree = scene.tree();
    let driver = tree.line(&format!("{CPU}/cpuidle/current_driver"))?;
    if driver != "haltpoll" {
        return Ok(Verdict::ok(format!("idle driver {driver}")));
    }
    let polls: u64 = tree.number(HALT_POLL)?;
    if polls > 0 {
        return Ok(Verdict::ok(format!("they poll up to {} us", polls / 1000)));
    }
    let halting: Vec<usize> = scene.cores().iter().filter(|&core| bound(scene, core) != Some(0)).collect();
    if halting.is_empty() {
        return Ok(Verdict::ok("they do not halt"));
    }
    let fix = match scene.question().cores {
        None => scene.write("200000", &[HALT_POLL.to_owned()]),
        Some(_) => scene.write("n/a", &halting.iter().map(|&core| resume_latency(core)).collect::<Vec<_>>()),
    };
    Ok(Verdict::fault(scene.if_pinned(), "they halt at once: guest_halt_poll_ns is 0", fix))
}

fn clock(scene: &Scene) -> Result<Verdict, Unseen> {
    let name = scene.tree().line(&format!("{CLOCK}/current_clocksource"))?;
    let others = scene.tree().line(&format!("{CLOCK}/available_clocksource")).unwrap_or_default();
    let better = others.split(' ').find(|other| !SLOW_CLOCKS.contains(other) && !other.is_empty());
    let fix = match better {
        Some(other) => scene.write(other, &[format!("{CLOCK}/current_clocksource")]),
        None => "# the kernel found no better one: `dmesg | grep -i clocksource` says why; on a virtual machine give it the host's TSC"
            .to_owned(),
    };
    Ok(Verdict::if_good(!SLOW_CLOCKS.contains(&name.as_str()), name, Status::Warning, fix))
}
