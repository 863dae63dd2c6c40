//! Frequency, sleep states, and the clock.

use crate::check::{Status, Verdict};
use crate::context::CheckContext;
use crate::topology::CPU;
use crate::tree::{ReadError, if_exists};

const HALT_POLL: &str = "/sys/module/haltpoll/parameters/guest_halt_poll_ns";
const CLOCK: &str = "/sys/devices/system/clocksource/clocksource0";
/// Longest acceptable exit latency of a C-state, in microseconds. Waking a thread takes about as long.
const MAX_EXIT_US: u64 = 20;
/// Clocks that need a system call, some of them also a slow device access.
const SLOW_CLOCKS: &[&str] = &["hpet", "acpi_pm", "pit", "jiffies", "refined-jiffies"];

checks! {
    "governor", Cores: governor,
        wanted "frequency governor: performance",
        why "other governors lower the frequency of an idle core, and raise it milliseconds after work has arrived";
    "c-states", Cores: c_states,
        wanted "no enabled C-state takes longer than 20 us to leave",
        why "leaving it delays each wake-up of a sleeping shard or worker (idle policies adaptive, yield, event)";
    "halt-poll", Cores: halt_poll,
        wanted "idle virtual cores poll before they halt, or do not halt",
        why "the hypervisor takes 10 to 100 us to wake a halted virtual core, whatever the exit latency of its C-state";
    "clock", Cores: clock,
        wanted "a clock that is read without a system call, such as tsc",
        why "deadlines and latencies read the clock, and each read of a slow one is a system call or a VM exit";
}

fn governor(context: &CheckContext) -> Result<Verdict, ReadError> {
    let file = |core: usize| format!("{CPU}/cpu{core}/cpufreq/scaling_governor");
    let cores = context.cores();
    let governor_of = |core| Ok(if_exists(context.tree().read_line(&file(core)))?.map(|governor| (core, governor)));
    let governors: Vec<(usize, String)> =
        cores.iter().map(governor_of).filter_map(Result::transpose).collect::<Result<_, _>>()?;
    if governors.is_empty() {
        return Err(ReadError::new(
            format!("{CPU}/cpu*/cpufreq/scaling_governor"),
            "does not exist: firmware or a hypervisor controls the frequency",
        ));
    }
    let slow: Vec<&(usize, String)> = governors.iter().filter(|(_, governor)| governor != "performance").collect();
    let Some((_, name)) = slow.first() else { return Ok(Verdict::ok("performance")) };
    let observed = format!("{name} on {} of {} cores", slow.len(), governors.len());
    let files: Vec<String> = match context.server().cores {
        None => vec![format!("{CPU}/cpu*/cpufreq/scaling_governor")],
        Some(_) => slow.iter().map(|(core, _)| file(*core)).collect(),
    };
    Ok(Verdict::fault(context.core_severity(), observed, context.write("performance", &files)))
}

/// Path of the file with the bound on a core's wake-up time.
fn resume_latency(core: usize) -> String {
    format!("{CPU}/cpu{core}/power/pm_qos_resume_latency_us")
}

/// Reads the bound on a core's wake-up time in microseconds, if there is one. In the file, `0` means no bound and `n/a`
/// means 0 (PM QoS).
fn wake_up_bound(context: &CheckContext, core: usize) -> Option<u64> {
    match context.tree().read_line(&resume_latency(core)).ok()?.as_str() {
        "0" => None,
        "n/a" => Some(0),
        bound => bound.parse().ok(),
    }
}

fn c_states(context: &CheckContext) -> Result<Verdict, ReadError> {
    let tree = context.tree();
    let (mut states, mut deep, mut longest) = (0, Vec::new(), (0, String::new()));
    for core in context.cores().iter() {
        let folder = format!("{CPU}/cpu{core}/cpuidle");
        let bound = wake_up_bound(context, core).unwrap_or(u64::MAX);
        for state in tree.read_numbers(&folder, "state").unwrap_or_default() {
            let file = |name| format!("{folder}/state{state}/{name}");
            let Some(latency) = if_exists(tree.read_number::<u64>(&file("latency")))? else { continue };
            states += 1;
            if latency > MAX_EXIT_US && latency <= bound && tree.read_line(&file("disable"))? == "0" {
                longest = longest.max((latency, tree.read_line(&file("name")).unwrap_or_default()));
                deep.push((state, file("disable")));
            }
        }
    }
    if states == 0 {
        return Err(ReadError::new(
            format!("{CPU}/cpu*/cpuidle/state*"),
            "does not exist: the kernel does not choose C-states",
        ));
    }
    if deep.is_empty() {
        return Ok(Verdict::ok("no enabled C-state takes longer"));
    }
    let files: Vec<String> = if context.server().cores.is_some() {
        deep.into_iter().map(|(_, file)| file).collect()
    } else {
        let mut deep_states: Vec<usize> = deep.into_iter().map(|(state, _)| state).collect();
        deep_states.sort_unstable();
        deep_states.dedup();
        deep_states.iter().map(|state| format!("{CPU}/cpu*/cpuidle/state{state}/disable")).collect()
    };
    let observed = format!("{} takes {} us", longest.1, longest.0);
    Ok(Verdict::fault(context.core_severity(), observed, context.write("1", &files)))
}

fn halt_poll(context: &CheckContext) -> Result<Verdict, ReadError> {
    let tree = context.tree();
    let driver = tree.read_line(&format!("{CPU}/cpuidle/current_driver"))?;
    if driver != "haltpoll" {
        return Ok(Verdict::ok(format!("idle driver {driver}")));
    }
    let polls: u64 = tree.read_number(HALT_POLL)?;
    if polls > 0 {
        return Ok(Verdict::ok(format!("virtual cores poll for up to {} us", polls / 1000)));
    }
    let halting: Vec<usize> = context.cores().iter().filter(|&core| wake_up_bound(context, core) != Some(0)).collect();
    if halting.is_empty() {
        return Ok(Verdict::ok("virtual cores do not halt"));
    }
    let fix = match context.server().cores {
        None => context.write("200000", &[HALT_POLL.to_owned()]),
        Some(_) => context.write("n/a", &halting.iter().map(|&core| resume_latency(core)).collect::<Vec<_>>()),
    };
    Ok(Verdict::fault(context.core_severity(), "virtual cores halt immediately: guest_halt_poll_ns is 0", fix))
}

fn clock(context: &CheckContext) -> Result<Verdict, ReadError> {
    let name = context.tree().read_line(&format!("{CLOCK}/current_clocksource"))?;
    let others = context.tree().read_line(&format!("{CLOCK}/available_clocksource")).unwrap_or_default();
    let better = others.split(' ').find(|other| !SLOW_CLOCKS.contains(other) && !other.is_empty());
    let fix = match better {
        Some(other) => context.write(other, &[format!("{CLOCK}/current_clocksource")]),
        None => {
            "# the kernel found no better clock (`dmesg | grep -i clocksource`); give a virtual machine the host's TSC"
                .to_owned()
        }
    };
    Ok(Verdict::ok_if(!SLOW_CLOCKS.contains(&name.as_str()), name, Status::Warning, fix))
}
