//! One invocation: probes, measures, reports and checks each size.
#![forbid(unsafe_code)]

use rpcrdma_config::print_error;

use crate::cli::Direction;
use crate::clock::Clock;
use crate::counters::Counters;
use crate::env;
use crate::failure::Failure;
use crate::figures::{Figures, Test};
use crate::limits::Limits;
use crate::memcpy;
use crate::output::Output;
use crate::pin::Placement;
use crate::probe::{self, Probes};
use crate::process::ServerProcess;
use crate::progress::Progress;
use crate::report::{Entry, TestInfo};
use crate::stop::{self, INTERRUPTED};
use crate::target::{Length, Target};

/// State of one invocation, except the target.
pub(crate) struct Suite {
    clock: Clock,
    placement: Placement,
    server: Option<ServerProcess>,
    length: Length,
    limits: Limits,
    output: Output,
    info: TestInfo,
}

impl Suite {
    /// Creates the state. `server` was started by this invocation, and lives as long as the suite.
    pub(crate) fn new(
        placement: Placement,
        server: Option<ServerProcess>,
        length: Length,
        limits: Limits,
        output: Output,
        mut info: TestInfo,
    ) -> Self {
        let clock = Clock::new();
        info.clock = clock.name().to_owned();
        Self { clock, placement, server, length, limits, output, info }
    }

    /// Measures each size with its own target.
    pub(crate) fn run<T: Target>(
        mut self,
        sizes: &[usize],
        mut connect: impl FnMut(usize) -> Result<T, Failure>,
    ) -> Result<(), Failure> {
        self.output.begin(&self.info)?;
        let (mut missed, mut error) = (Vec::new(), None);
        for &size in sizes {
            let outcome = self.measure_size(size, &mut connect, &mut missed);
            let figures =
                if self.output.has_entry(size) { "the figures are those until then" } else { "there are no figures" };
            // The order matters: a signal that arrives after the check of `is_requested` ends the process.
            stop::set_measuring(false);
            error = match outcome {
                // The signal is the cause of any failure: the run was too short for a figure, or the signal also
                // reached the server's process.
                _ if stop::is_requested() => Some(format!("{size} bytes: {INTERRUPTED}: {figures}")),
                outcome => outcome.err().map(|failure| self.describe_failure(size, &failure)),
            };
            if error.is_some() {
                break;
            }
        }
        self.output.end(error.map(Failure::Run))?;
        if missed.is_empty() { Ok(()) } else { Err(Failure::Limit(missed)) }
    }

    /// Measures one size, and reports its entry, even if an error follows.
    fn measure_size<T: Target>(
        &mut self,
        size: usize,
        connect: &mut impl FnMut(usize) -> Result<T, Failure>,
        missed: &mut Vec<String>,
    ) -> Result<(), Failure> {
        let mut target = connect(size)?;
        stop::set_measuring(true);
        let mut entry = Entry { size, outstanding: target.depth(), ..Entry::default() };
        let before = self.probe();
        let memcpy = self.memcpy(size);
        let mut progress = Progress::new(format!("{} bytes", size), self.clock.ns());
        let counted = [target.counters(), self.server_counters()];
        let preempted = env::preemptions();
        if self.output.direction != Direction::Forward {
            target.start_reverse()?;
        }
        let own = match self.output.direction {
            Direction::Reverse => None,
            _ => Some(self.output.test.run(&mut target, &self.clock, self.length, &mut progress)?),
        };
        let theirs = match self.output.direction {
            Direction::Forward => None,
            // A server that does not answer calls would not answer the query for its figures either.
            _ if own.as_ref().is_some_and(|own| own.broken.is_some()) => None,
            _ => match target.end_reverse() {
                Err(_) if stop::is_requested() && own.is_some() => None,
                theirs => Some(theirs?),
            },
        };
        drop(progress);
        entry.preemptions = env::preemptions().zip(preempted).map(|(after, before)| after - before);
        let all = enter_figures(&mut entry, self.output.test, own, theirs);
        let theirs = if all.broken.is_none() { self.server_counters() } else { None };
        let now = [target.counters(), theirs];
        let counted = [0, 1].map(|side| Some(now[side].as_ref()?.since(counted[side].as_ref()?)));
        if let Some(counted) = &counted[0] {
            target.verify(counted, all.operations)?;
        }
        [entry.client, entry.server] = counted.map(|side| side.map(Counters::into_usage));
        entry.probe_rtt_ns = Probes { before, after: if all.broken.is_none() { self.probe() } else { None } };
        drop(target);
        if let Some(rate) = entry.own.bytes_per_s {
            // The host's speed may have changed during the measurement.
            let memcpy = self.memcpy(size).zip(memcpy).map(|(after, before)| (before + after) / 2.0);
            entry.memcpy_bytes_per_s = memcpy;
            entry.memcpy_ratio = memcpy.map(|memcpy| rate / memcpy);
        }
        entry.limits_missed = self.limits.missed(&entry);
        let written = self.output.add_entry(&entry, all.samples.as_ref());
        // The error of an interrupted run is the signal, so this failure is only printed.
        if let (true, Err(failure)) = (stop::is_requested(), &written) {
            print_error!("rpcperf: {failure}");
        }
        written?;
        missed.append(&mut entry.limits_missed);
        all.broken.map_or(Ok(()), |why| Err(Failure::Run(format!("{why}; the figures are those until then"))))
    }

    /// Copy rate of this core, for bandwidth tests.
    fn memcpy(&self, size: usize) -> Option<f64> {
        matches!(self.output.test, Test::Bandwidth).then(|| memcpy::bytes_per_second(&self.clock, size))
    }

    fn server_counters(&mut self) -> Option<Counters> {
        self.server.as_mut()?.counters()
    }

    /// Probes the distance of both cores, if they are two cores of this machine.
    fn probe(&self) -> Option<u64> {
        let server_core = self.info.server_core.filter(|_| !self.placement.shared)?;
        let probe = || probe::line_round_trip(&self.clock, server_core);
        match &self.server {
            Some(server) => server.while_paused(probe),
            None => probe(),
        }
    }

    fn describe_failure(&mut self, size: usize, failure: &Failure) -> String {
        let ended = self.server.as_mut().and_then(ServerProcess::exit_message);
        let server = ended.map_or_else(String::new, |how| format!("; {how}"));
        format!("{size} bytes: {failure}{server}")
    }
}

/// Enters the figures of one or both directions; returns their sum.
fn enter_figures(entry: &mut Entry, test: Test, own: Option<Figures>, theirs: Option<Figures>) -> Figures {
    let size = entry.size;
    let all = match (own, theirs) {
        (Some(own), Some(theirs)) => {
            let sum = own.sum(&theirs);
            entry.own = own.measured(test, size);
            entry.reverse = Some(theirs.measured(test, size));
            entry.sum = Some(sum.measured(test, size));
            return sum;
        }
        (Some(figures), None) | (None, Some(figures)) => figures,
        (None, None) => unreachable!("a run has at least one direction"),
    };
    entry.own = all.measured(test, size);
    all
}
