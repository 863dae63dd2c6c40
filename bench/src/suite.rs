//! One invocation: each size in turn, probed before and after, reported, held to its limits.
#![forbid(unsafe_code)]

use crate::clock::Clock;
use crate::env;
use crate::failure::Failure;
use crate::latency;
use crate::limits::Limits;
use crate::memcpy;
use crate::output::Output;
use crate::pin::Placement;
use crate::probe::{self, Probes};
use crate::process::ServerProcess;
use crate::progress::Progress;
use crate::report::{Entry, Report, SCHEMA, TestInfo};
use crate::samples::Samples;
use crate::target::{Length, Target};
use crate::throughput;

/// What is measured of a target.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Test {
    /// Round trips; open loop if there is a rate.
    Latency {
        /// Operations per second.
        rate: Option<f64>,
    },
    /// Operations and bytes per second.
    Bandwidth,
}

/// All that one invocation needs besides the target.
pub(crate) struct Suite {
    clock: Clock,
    placement: Placement,
    server: Option<ServerProcess>,
    test: Test,
    length: Length,
    limits: Limits,
    output: Output,
    info: TestInfo,
}

impl Suite {
    /// `server` is ours, and lives as long as the suite.
    pub(crate) fn new(
        placement: Placement,
        server: Option<ServerProcess>,
        test: Test,
        length: Length,
        limits: Limits,
        output: Output,
        mut info: TestInfo,
    ) -> Self {
        let clock = Clock::new();
        info.clock = clock.name().to_owned();
        Self { clock, placement, server, test, length, limits, output, info }
    }

    /// Measures each size with a target of its own.
    pub(crate) fn run<T: Target>(
        mut self,
        sizes: &[usize],
        mut connect: impl FnMut(usize) -> Result<T, Failure>,
    ) -> Result<(), Failure> {
        self.output.begin(&self.info);
        let mut report = Report {
            schema: SCHEMA,
            test_info: self.info.clone(),
            results: Vec::with_capacity(sizes.len()),
            error: None,
        };
        let mut missed = Vec::new();
        for &size in sizes {
            match self.one_size(size, &mut connect) {
                Ok(entry) => {
                    missed.extend(entry.limits_missed.iter().cloned());
                    report.results.push(entry);
                }
                Err(failure) => {
                    report.error = Some(self.explain(size, &failure));
                    break;
                }
            }
        }
        self.output.end(&report)?;
        match report.error {
            Some(error) => Err(Failure::Run(error)),
            None if missed.is_empty() => Ok(()),
            None => Err(Failure::Limit(missed)),
        }
    }

    fn one_size<T: Target>(
        &self,
        size: usize,
        connect: &mut impl FnMut(usize) -> Result<T, Failure>,
    ) -> Result<Entry, Failure> {
        let mut target = connect(size)?;
        let mut entry = Entry { size, outstanding: target.depth(), ..Entry::default() };
        let before = self.probe();
        let mut progress = Progress::new(format!("{} bytes", size), self.clock.ns());
        let mut samples: Option<Samples> = None;
        let preempted = env::preemptions();
        match self.test {
            Test::Latency { rate } => {
                let out = latency::measure(&mut target, &self.clock, self.length, rate, &mut progress)?;
                entry.iters = out.samples.count();
                entry.seconds = out.seconds;
                entry.rtt_ns = out.samples.latency();
                samples = Some(out.samples);
            }
            Test::Bandwidth => {
                let out = throughput::measure(&mut target, &self.clock, self.length, &mut progress)?;
                let bytes = size as f64;
                entry.iters = out.operations;
                entry.seconds = out.seconds;
                entry.rps = Some(out.per_second);
                entry.bytes_per_s = Some(out.per_second * bytes);
                entry.peak_bytes_per_s = Some(out.peak_per_second * bytes);
            }
        }
        drop(progress);
        entry.preemptions = env::preemptions().zip(preempted).map(|(after, before)| after - before);
        entry.probe_rtt_ns = Probes { before, after: self.probe() };
        drop(target);
        if let Some(rate) = entry.bytes_per_s {
            let memcpy = memcpy::bytes_per_second(&self.clock, size);
            entry.memcpy_bytes_per_s = Some(memcpy);
            entry.memcpy_ratio = Some(rate / memcpy);
        }
        entry.limits_missed = self.limits.missed(&entry);
        self.output.result(&entry, samples.as_ref())?;
        Ok(entry)
    }

    /// Only between two cores of this machine.
    fn probe(&self) -> Option<u64> {
        let there = self.info.server_core.filter(|_| !self.placement.shared)?;
        let probe = || probe::line_round_trip(&self.clock, there);
        match &self.server {
            Some(server) => server.paused(probe),
            None => probe(),
        }
    }

    fn explain(&mut self, size: usize, failure: &Failure) -> String {
        let ended = self.server.as_mut().and_then(ServerProcess::ended);
        let server = ended.map_or_else(String::new, |how| format!("; {how}"));
        format!("{size} bytes: {failure}{server}")
    }
}
