//! One invocation: each size in turn, probed before and after, reported, held to its limits.
#![forbid(unsafe_code)]

use crate::clock::Clock;
use crate::counters::Counters;
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
    /// Operations per second.
    Rate,
    /// Operations and bytes per second.
    Bandwidth,
}

impl Test {
    /// Closed loop or open, in words.
    pub(crate) fn looped(self) -> String {
        match self {
            Self::Latency { rate: Some(rate) } => {
                format!("open, {rate} operations/s, timed from when they were due")
            }
            Self::Latency { rate: None } | Self::Rate | Self::Bandwidth => "closed".to_owned(),
        }
    }
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
        &mut self,
        size: usize,
        connect: &mut impl FnMut(usize) -> Result<T, Failure>,
    ) -> Result<Entry, Failure> {
        let mut target = connect(size)?;
        let mut entry = Entry { size, outstanding: target.depth(), ..Entry::default() };
        let before = self.probe();
        let mut progress = Progress::new(format!("{} bytes", size), self.clock.ns());
        let mut samples: Option<Samples> = None;
        let counted = [target.counters(), self.server_counters()];
        let preempted = env::preemptions();
        match self.test {
            Test::Latency { rate } => {
                let out = latency::measure(&mut target, &self.clock, self.length, rate, &mut progress)?;
                entry.iters = out.samples.count();
                entry.seconds = out.seconds;
                entry.rtt_ns = out.samples.latency();
                samples = Some(out.samples);
            }
            Test::Rate | Test::Bandwidth => {
                let out = throughput::measure(&mut target, &self.clock, self.length, &mut progress)?;
                entry.iters = out.operations;
                entry.seconds = out.seconds;
                entry.rps = Some(out.per_second);
                if let Test::Bandwidth = self.test {
                    entry.bytes_per_s = Some(out.per_second * size as f64);
                    entry.peak_bytes_per_s = Some(out.peak_per_second * size as f64);
                } else {
                    entry.peak_rps = Some(out.peak_per_second);
                }
            }
        }
        drop(progress);
        entry.preemptions = env::preemptions().zip(preempted).map(|(after, before)| after - before);
        let now = [target.counters(), self.server_counters()];
        let [client, server] = [0, 1].map(|side| Some(now[side]?.since(&counted[side]?).usage()));
        (entry.client, entry.server) = (client, server);
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

    fn server_counters(&mut self) -> Option<Counters> {
        self.server.as_mut()?.counters()
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
