//! Cores that this process may use, and pinning to them.
#![forbid(unsafe_code)]

use std::fmt::{Display, Write as _};
use std::sync::OnceLock;

use core_affinity::CoreId;
use rustix::thread::{CpuSet, sched_getaffinity};

use crate::start_error::{StartError, StartErrorKind};

/// The cores that this process may use, ascending.
///
/// The list is read once. A thread inherits the core of the pinned thread that starts it, but may then be pinned to any
/// core of the list.
pub fn allowed_cores() -> &'static [usize] {
    static ALLOWED: OnceLock<Vec<usize>> = OnceLock::new();
    ALLOWED.get_or_init(|| {
        let main_set = sched_getaffinity(Some(rustix::process::getpid()));
        let thread_set = sched_getaffinity(None);
        let allows = |set: &Result<CpuSet, _>, core| set.as_ref().is_ok_and(|set| set.is_set(core));
        (0..CpuSet::MAX_CPU).filter(|&core| allows(&main_set, core) || allows(&thread_set, core)).collect()
    })
}

/// Binds the calling thread to one core.
pub fn pin_current_thread(core: usize) -> Result<(), StartError> {
    check_core(core)?;
    if core_affinity::set_for_current(CoreId { id: core }) {
        return Ok(());
    }
    // The function returns a bool only; `errno` still has the reason.
    Err(refused(core, std::io::Error::last_os_error()))
}

fn refused(core: usize, reason: impl Display) -> StartError {
    let allowed = as_list(allowed_cores());
    StartError::new(
        StartErrorKind::Core,
        format_args!(
            "cannot pin this thread to core {core}: {reason} (allowed for this process: {allowed}); check that the \
             core is online: `cat /sys/devices/system/cpu/online`"
        ),
    )
}

/// Refuses a core that this process may not use.
pub(super) fn check_core(core: usize) -> Result<(), StartError> {
    if allowed_cores().contains(&core) {
        return Ok(());
    }
    let (allowed, pid) = (as_list(allowed_cores()), rustix::process::getpid().as_raw_nonzero().get());
    Err(StartError::new(
        StartErrorKind::Core,
        format_args!(
            "core {core} is not allowed for this process (allowed: {allowed}); allow it with `taskset -cp \
             {core},{allowed} {pid}` before the threads start, start the process with `taskset -c {core},{allowed} \
             COMMAND`, or widen cpuset.cpus of its cgroup"
        ),
    ))
}

/// Formats cores as `taskset` reads them: `[0, 1, 2, 5]` as `0-2,5`.
fn as_list(cores: &[usize]) -> String {
    let mut list = String::new();
    for run in cores.chunk_by(|a, b| a + 1 == *b) {
        let comma = if list.is_empty() { "" } else { "," };
        let (first, last) = (run[0], run[run.len() - 1]);
        // Writing to a string does not fail.
        let _ = if first == last { write!(list, "{comma}{first}") } else { write!(list, "{comma}{first}-{last}") };
    }
    list
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn core_lists_are_formatted_as_taskset_reads_them() {
        assert_eq!(as_list(&[]), "");
        assert_eq!(as_list(&[3]), "3");
        assert_eq!(as_list(&[0, 1, 2, 5, 7, 8]), "0-2,5,7-8");
    }

    #[test]
    fn a_pinned_thread_stays_and_threads_that_it_starts_may_use_other_cores() {
        let cores = allowed_cores();
        std::thread::spawn(move || {
            pin_current_thread(cores[0]).unwrap();
            let now = sched_getaffinity(None).unwrap();
            assert_eq!((now.count(), now.is_set(cores[0])), (1, true));
            assert_eq!(allowed_cores(), cores);
            let last = cores[cores.len() - 1];
            std::thread::spawn(move || pin_current_thread(last)).join().unwrap().unwrap();
        })
        .join()
        .unwrap();
    }

    #[test]
    fn error_of_a_refused_core_names_the_allowed_cores_and_the_command() {
        let error = pin_current_thread(CpuSet::MAX_CPU + 7).unwrap_err();
        let text = error.to_string();
        assert!(text.contains(&format!("core {}", CpuSet::MAX_CPU + 7)), "{text}");
        assert!(text.contains(&format!("(allowed: {})", as_list(allowed_cores()))), "{text}");
        assert!(text.contains(&format!(" {}`", std::process::id())) && text.contains("taskset -cp"), "{text}");
        let refused = refused(3, "no").to_string();
        assert!(refused.starts_with("cannot pin this thread to core 3:"), "{refused}");
    }
}
