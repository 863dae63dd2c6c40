//! Machine description: processor, clock, kernel, huge pages; unreadable values are omitted.
#![forbid(unsafe_code)]

use std::fs;

use rpcrdma_host::tree::{field, selected};
use serde::Serialize;

/// The machine, as visible to this process.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Machine {
    /// Processor model.
    pub(crate) cpu_model: Option<String>,
    /// Whether the hypervisor flag is set: virtual cores may move between host cores at any time.
    pub(crate) virtual_machine: bool,
    /// Whether the time-stamp counter has a constant rate, also in sleep states (`constant_tsc` and `nonstop_tsc`).
    pub(crate) invariant_tsc: bool,
    /// Frequency governor of the client's core.
    pub(crate) governor: Option<String>,
    /// Clock source of the kernel.
    pub(crate) clock_source: Option<String>,
    /// Kernel release.
    pub(crate) kernel: Option<String>,
    /// Default huge pages: reserved and free.
    pub(crate) hugepages: Option<String>,
    /// Transparent huge pages: the mode in force.
    pub(crate) transparent_hugepages: Option<String>,
}

impl Machine {
    /// Reads the description. `core` is the client's.
    pub(crate) fn read(core: Option<usize>) -> Self {
        let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let flags = field(&cpuinfo, "flags").unwrap_or_default();
        let flag = |name| flags.split_whitespace().any(|f| f == name);
        let cpufreq = |core| read_trimmed(&format!("/sys/devices/system/cpu/cpu{core}/cpufreq/scaling_governor"));
        Self {
            cpu_model: field(&cpuinfo, "model name").map(str::to_owned),
            virtual_machine: flag("hypervisor"),
            invariant_tsc: flag("constant_tsc") && flag("nonstop_tsc"),
            governor: core.and_then(cpufreq),
            clock_source: read_trimmed("/sys/devices/system/clocksource/clocksource0/current_clocksource"),
            kernel: read_trimmed("/proc/sys/kernel/osrelease"),
            hugepages: fs::read_to_string("/proc/meminfo").ok().and_then(|text| hugepages(&text)),
            transparent_hugepages: read_trimmed("/sys/kernel/mm/transparent_hugepage/enabled")
                .and_then(|line| Some(selected(&line)?.to_owned())),
        }
    }
}

/// Preemptions of this thread so far.
pub(crate) fn preemptions() -> Option<u64> {
    field(&fs::read_to_string("/proc/thread-self/status").ok()?, "nonvoluntary_ctxt_switches")?.parse().ok()
}

fn read_trimmed(path: &str) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    let text = text.trim();
    (!text.is_empty()).then(|| text.to_owned())
}

fn hugepages(meminfo: &str) -> Option<String> {
    let [total, free, size] = ["HugePages_Total", "HugePages_Free", "Hugepagesize"].map(|f| field(meminfo, f));
    Some(format!("{} of {} free, {} each", free?, total?, size?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn huge_pages_have_their_number_and_size() {
        let meminfo = "MemTotal:  100 kB\nHugePages_Total:      8\nHugePages_Free:  3\nHugepagesize:  2048 kB\n";
        assert_eq!(hugepages(meminfo).unwrap(), "3 of 8 free, 2048 kB each");
        assert_eq!(hugepages("MemTotal: 100 kB\n"), None);
    }

    #[test]
    fn this_machine_has_a_kernel() {
        assert!(Machine::read(Some(0)).kernel.is_some());
        assert!(preemptions().is_some());
    }
}
