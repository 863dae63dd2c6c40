//! `raw-lat`, `raw-bw`: the bare fabric, without calls.
#![forbid(unsafe_code)]

mod client;
mod hello;
mod memory;
mod server;
#[cfg(test)]
mod tests;

use std::path::Path;

use clap::ArgMatches;
use rpcrdma::Address;
use rpcrdma::fabric::Fabric;

use crate::cli::{self, CommonArgs, DeviceArgs, Direction, Named, RawBwArgs, RawLatArgs, RawOp};
use crate::fabrics;
use crate::failure::Failure;
use crate::figures::Test;
use crate::idle::Idler;
use crate::limits::Limits;
use crate::output::Output;
use crate::pin::{self, Placement};
use crate::placement;
use crate::process::ServerProcess;
use crate::report::TestInfo;
use crate::suite::Suite;
use crate::target::Length;

use client::{RawSpec, RawTarget};
pub(crate) use hello::Welcome;
pub(crate) use server::RawServer;

/// Arguments of a raw client, common to both commands.
struct RawPlan<'a> {
    name: &'static str,
    common: &'a CommonArgs,
    /// All options of the command line.
    given: &'a ArgMatches,
    op: RawOp,
    depth: u32,
    cq_mod: u32,
    test: Test,
    limits: Limits,
    hgrm: Option<&'a Path>,
    sizes: Vec<usize>,
    length: Length,
}

/// Runs `raw-lat` as a client.
pub(crate) fn latency(args: &RawLatArgs, given: &ArgMatches) -> Result<(), Failure> {
    let RawLatArgs { op, common, latency, tx_depth } = args;
    run(&RawPlan {
        name: "raw-lat",
        common,
        given,
        op: *op,
        depth: *tx_depth,
        cq_mod: 1,
        test: Test::Latency { rate: latency.rate },
        limits: latency.limits(),
        hgrm: latency.hgrm.as_deref(),
        sizes: common.sizes(RawLatArgs::USUAL_SIZE),
        length: common.length(10_000)?,
    })
}

/// Runs `raw-bw` as a client.
pub(crate) fn bandwidth(args: &RawBwArgs, given: &ArgMatches) -> Result<(), Failure> {
    let &RawBwArgs { op, ref common, tx_depth: depth, cq_mod, ref throughput } = args;
    let (test, limits, hgrm) = (Test::Bandwidth, throughput.limits(), None);
    let (sizes, length) = (common.sizes(RawBwArgs::USUAL_SIZE), common.length(5000)?);
    run(&RawPlan { name: "raw-bw", common, given, op, depth, cq_mod, test, limits, hgrm, sizes, length })
}

fn run(plan: &RawPlan<'_>) -> Result<(), Failure> {
    let common = plan.common;
    let placement = Placement::decide(common.cores)?;
    let address = common.server_address();
    let raw = fabrics::raw_address(&fabrics::parse(&address)?)?;
    let output = Output::new(plan.test, Direction::Forward, common.json.as_deref(), plan.hgrm, &plan.sizes)?;
    let pending = output.pending();
    pending.complete(start(plan, &address, &raw, placement, output))
}

/// Starts the server of `--loopback`, and measures.
fn start(
    plan: &RawPlan<'_>,
    address: &str,
    raw: &Address,
    placement: Placement,
    output: Output,
) -> Result<(), Failure> {
    let common = plan.common;
    common.device.check(raw)?;
    placement::warn(
        common.root.as_deref(),
        raw,
        [placement.client].into_iter().chain(common.loopback.is_some().then_some(placement.server)),
    );
    let server = if common.loopback.is_some() {
        let (core, client) = (placement.server.to_string(), placement.client.to_string());
        let idle = common.idle.name();
        let arguments =
            ["--only", "raw", "--cores", &core, "--client-core", &client, "--idle", &idle].map(str::to_owned);
        Some(ServerProcess::start(address, &[&arguments[..], &cli::given_options::<DeviceArgs>(plan.given)].concat())?)
    } else {
        None
    };
    // The server would inherit the affinity, so pinning follows its start.
    pin::pin(placement.client)?;
    measure(plan, address, raw, placement, server, output)
}

fn measure(
    plan: &RawPlan<'_>,
    address: &str,
    raw: &Address,
    mut placement: Placement,
    server: Option<ServerProcess>,
    output: Output,
) -> Result<(), Failure> {
    let common = plan.common;
    let open = || fabrics::open(raw, common.idle, &common.device);
    let to = raw.fabric_address();
    let probe_spec = RawSpec { qps: 1, ..plan.spec(1, 1) };
    let fabric = open()?;
    let capabilities = fabric.capabilities().clone();
    let sizes = plan.sizes_within(capabilities.max_message as usize)?;
    // A first connection queries the server before any measurement or output.
    let serving = RawTarget::connect(fabric, to, probe_spec, Idler::new(common.idle, true))?.server();
    if let Some(serving) = serving.filter(|_| server.is_none()) {
        placement.adopt_server_core(serving.core as usize);
    }
    let fabric = (address, fabrics::name(raw), capabilities);
    let info = TestInfo {
        test: plan.name.to_owned(),
        method: plan.method().to_owned(),
        server_idle: serving.map_or(common.idle, |serving| serving.idle.into()).name(),
        cq_mod: matches!(plan.test, Test::Bandwidth).then_some(plan.cq_mod),
        ..TestInfo::new(("Raw", &plan.op.name()), common, &placement, plan.test, fabric)
    };
    let shared = placement.shared;
    let suite = Suite::new(placement, server, plan.length, plan.limits, output, info);
    suite.run(&sizes, |size| {
        let spec = plan.spec(size, plan.depth).with_affordable_depth();
        RawTarget::connect(open()?, to, spec, Idler::new(common.idle, shared))
    })
}

impl RawPlan<'_> {
    fn spec(&self, size: usize, depth: u32) -> RawSpec {
        RawSpec {
            op: self.op,
            round_trips: matches!(self.test, Test::Latency { .. }),
            size,
            qps: self.common.qp,
            depth,
            cq_mod: self.cq_mod,
            batch: !self.common.no_batch,
        }
    }

    /// Sizes of the operation: all of `-a` that fit, or an error for an `-s` that does not.
    fn sizes_within(&self, longest_message: usize) -> Result<Vec<usize>, Failure> {
        if self.op != RawOp::Send {
            return Ok(self.sizes.clone());
        }
        let sizes: Vec<usize> = self.sizes.iter().copied().filter(|&size| size <= longest_message).collect();
        if sizes.is_empty() {
            return Err(Failure::Usage(format!(
                "-s {}: the longest message of this fabric has {longest_message} bytes; larger payloads need --op \
                 read or write",
                self.sizes[0]
            )));
        }
        Ok(sizes)
    }

    fn method(&self) -> &'static str {
        match (self.test, self.op) {
            (Test::Latency { .. }, RawOp::Send) => "round trip: Send of the payload, answered by a Send of it",
            (Test::Latency { .. }, RawOp::Read) => "round trip: RDMA Read of the payload, from post to completion",
            (Test::Latency { .. }, RawOp::Write) => {
                "round trip: RDMA Write of the payload, then a Send of 8 bytes, answered by a Send of 8 bytes"
            }
            (Test::Rate | Test::Bandwidth, _) => "one direction, at the full queue depth, counted at the completions",
        }
    }
}
