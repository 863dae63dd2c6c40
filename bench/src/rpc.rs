//! `lat`, `rate`, `bw`: calls through the whole engine.
#![forbid(unsafe_code)]

mod config;
mod service;
mod target;

use std::path::Path;

use rpcrdma::Config;
use rpcrdma::handoff::workers::WorkerConfig;
use rpcrdma::server::{Server, ServerConfig};

use crate::cli::{BwArgs, CommonArgs, EngineArgs, LatArgs, RateArgs, RpcOp, ServeArgs};
use crate::counters::Counters;
use crate::env::Machine;
use crate::fabrics;
use crate::failure::Failure;
use crate::limits::Limits;
use crate::output::Output;
use crate::pin::{self, Placement};
use crate::process::ServerProcess;
use crate::report::{EngineInfo, TestInfo};
use crate::suite::{Suite, Test};
use crate::table::Kind;
use crate::target::Length;

use config::Load;
use service::Info;
use target::{RpcTarget, Spec};

/// A running server of calls.
pub(crate) struct CallServer {
    server: Server,
}

impl CallServer {
    /// Serves calls at an address, on a shard on `core`.
    pub(crate) fn start(args: &ServeArgs, core: usize, placement: &Placement) -> Result<Self, Failure> {
        let address = fabrics::parse(&args.listen)?;
        let load =
            Load { connections: args.qp as usize, outstanding: args.outstanding as usize, bulk: args.size };
        let shared = config::shared(&args.engine, args.idle, !args.no_batch, &load)?;
        let info = Info {
            core: core as u32,
            idle: args.idle,
            workers: args.engine.workers,
            window: shared.window,
            inline: shared.inline as u32,
            load,
        };
        let program = service::program(&info)?;
        let config = ServerConfig {
            shard: Config { arenas: program.arena.into_iter().collect(), ..shared },
            shards: 1,
            cores: Some(vec![core]),
            workers: workers(args, &load, core, placement),
        };
        let server =
            Server::start(&address, program.services, &config).map_err(|e| Failure::run("serve", e))?;
        Ok(Self { server })
    }

    /// What its shard counted so far.
    pub(crate) fn counters(&self) -> Option<Counters> {
        self.server.stats().first().map(Counters::from)
    }
}

/// The workers, on cores of their own if there are enough.
fn workers(args: &ServeArgs, load: &Load, core: usize, placement: &Placement) -> Option<WorkerConfig> {
    let count = args.engine.workers as usize;
    let free = placement.allowed.iter().copied().filter(|&other| other != core && other != placement.client);
    let cores: Vec<usize> = free.take(count).collect();
    (count > 0).then(|| WorkerConfig {
        count,
        cores: (cores.len() == count).then_some(cores),
        ring_capacity: load.calls().max(256),
        idle: config::policy(args.idle),
    })
}

/// What a client of calls was asked for, whichever of the three commands it was.
struct Plan<'a> {
    name: &'static str,
    common: &'a CommonArgs,
    engine: &'a EngineArgs,
    op: RpcOp,
    outstanding: usize,
    test: Test,
    kind: Kind,
    limits: Limits,
    hgrm: Option<&'a Path>,
    default_size: usize,
    length: Length,
}

/// Runs `lat` as a client.
pub(crate) fn latency(args: &LatArgs) -> Result<(), Failure> {
    run(&Plan {
        name: "lat",
        common: &args.common,
        engine: &args.engine,
        op: args.op,
        outstanding: args.outstanding as usize,
        test: Test::Latency { rate: args.latency.rate },
        kind: Kind::Latency,
        limits: args.latency.limits(),
        hgrm: args.latency.hgrm.as_deref(),
        default_size: 64,
        length: args.common.length(10_000)?,
    })
}

/// Runs `rate` as a client.
pub(crate) fn rate(args: &RateArgs) -> Result<(), Failure> {
    run(&Plan {
        name: "rate",
        common: &args.common,
        engine: &args.engine,
        op: args.op,
        outstanding: args.outstanding as usize,
        test: Test::Rate,
        kind: Kind::Rate,
        limits: args.throughput.limits(),
        hgrm: None,
        default_size: 64,
        length: args.common.length(1_000_000)?,
    })
}

/// Runs `bw` as a client.
pub(crate) fn bandwidth(args: &BwArgs) -> Result<(), Failure> {
    if args.op == RpcOp::Null {
        return Err(Failure::Usage(
            "--op null carries no payload: there is no bandwidth of it; see rate".into(),
        ));
    }
    run(&Plan {
        name: "bw",
        common: &args.common,
        engine: &args.engine,
        op: args.op,
        outstanding: args.outstanding as usize,
        test: Test::Bandwidth,
        kind: Kind::Bandwidth,
        limits: args.throughput.limits(),
        hgrm: None,
        default_size: if args.op.is_bulk() { 65536 } else { 2048 },
        length: args.common.length(5000)?,
    })
}

fn run(plan: &Plan<'_>) -> Result<(), Failure> {
    let common = plan.common;
    let mut placement = Placement::decide(common.cores)?;
    let text = common.address.clone().unwrap_or_else(ServerProcess::own_address);
    let address = fabrics::parse(&text)?;
    let mut sizes = plan.sizes()?;
    let probing = Load { connections: 1, outstanding: 1, bulk: 0 };
    let probing = config::shared(plan.engine, common.idle, !common.no_batch, &probing)?;
    let output = Output::new(plan.kind, common.json.as_deref(), plan.hgrm, common.all && sizes.len() > 1)?;
    let server = if common.loopback { Some(plan.start_server(&text, &placement, &sizes)?) } else { None };
    // Not before the server was started: it would inherit our one core.
    pin::pin(placement.client)?;
    // A first connection finds out who serves there, before anything is measured or printed.
    let (client, serving) = target::connect(&address, probing)?;
    let device = rpcrdma::fabric::Fabric::capabilities(client.shard().fabric()).device.clone();
    drop(client);
    plan.agree(&serving, &mut sizes)?;
    if server.is_none() {
        placement.server_says(serving.core as usize);
    }
    let specs: Vec<Spec> =
        sizes.iter().map(|&size| plan.spec(size, &serving, placement.shared)).collect::<Result<_, _>>()?;
    let fabric = (fabrics::name(&address), device);
    let info = plan.info(&text, fabric, &placement, &serving, &specs[0].config);
    let suite = Suite::new(placement, server, plan.test, plan.length, plan.limits, output, info);
    suite.run(&sizes, |size| {
        let spec = specs.iter().find(|spec| spec.size == size).unwrap_or(&specs[0]);
        RpcTarget::connect(&address, spec)
    })
}

impl Plan<'_> {
    /// The sizes that the operation can have: all of -a that fit, or an error for the -s that does not.
    fn sizes(&self) -> Result<Vec<usize>, Failure> {
        let common = self.common;
        if self.op == RpcOp::Null {
            if common.all || common.size.is_some() {
                return Err(Failure::Usage(
                    "--op null carries no payload: -s and -a say nothing there".into(),
                ));
            }
            return Ok(vec![0]);
        }
        let mut sizes = common.sizes(self.default_size);
        if self.op == RpcOp::Echo {
            let inline = self.engine.inline as usize & !3;
            let longest = target::longest_echo(self.engine.scheme()?, inline);
            retain(&mut sizes, longest, || {
                format!(
                    "an echo travels inline, and within the inline threshold of {inline} bytes there is room for {longest} \
                     beside the headers; larger payloads go by --op read or write, or with a larger --inline"
                )
            })?;
        }
        Ok(sizes)
    }

    /// What the server can do, and we want.
    fn agree(&self, serving: &Info, sizes: &mut Vec<usize>) -> Result<(), Failure> {
        let inline = self.engine.inline & !3;
        if serving.inline != inline {
            let theirs = serving.inline;
            return Err(Failure::Usage(format!(
                "--inline {inline}: the server's is {theirs}, and both ends must have the same"
            )));
        }
        if self.op.is_bulk() {
            let largest = serving.load.bulk;
            retain(sizes, largest, || {
                format!(
                    "the server has memory for payloads of up to {largest} bytes: start it with a larger -s"
                )
            })?;
        }
        Ok(())
    }

    fn start_server(
        &self,
        address: &str,
        placement: &Placement,
        sizes: &[usize],
    ) -> Result<ServerProcess, Failure> {
        let common = self.common;
        let largest = if self.op.is_bulk() { sizes.iter().copied().max().unwrap_or(1) } else { 1 };
        let mut arguments: Vec<String> = Vec::new();
        let mut option = |name: &str, value: String| arguments.extend([name.to_owned(), value]);
        option("--only", "calls".to_owned());
        option("--cores", format!("{},{}", placement.client, placement.server));
        option("--idle", common.idle.name().to_owned());
        option("--size", largest.to_string());
        option("--outstanding", self.outstanding.to_string());
        option("--qp", common.qp.to_string());
        arguments.extend(common.no_batch.then(|| "--no-batch".to_owned()));
        arguments.extend(self.engine.arguments());
        ServerProcess::start(address, &arguments)
    }

    fn spec(&self, size: usize, serving: &Info, yields: bool) -> Result<Spec, Failure> {
        let connections = self.common.qp as usize;
        let bulk = if self.op.is_bulk() { size } else { 0 };
        let most = if bulk > 0 { serving.load.outstanding_with(size, connections) } else { usize::MAX };
        let outstanding = self.outstanding.min(most);
        let load = Load { connections, outstanding, bulk };
        let mut config = config::shared(self.engine, self.common.idle, !self.common.no_batch, &load)?;
        // Each connection has a set of its own.
        config.bulk_buffers = if bulk > 0 { vec![(size, outstanding)] } else { Vec::new() };
        let active = self.engine.active.map_or(connections, |active| connections.min(active as usize));
        Ok(Spec { op: self.op, size, connections, active, outstanding, yields, config })
    }

    fn info(
        &self,
        address: &str,
        (fabric, device): (&str, String),
        placement: &Placement,
        serving: &Info,
        config: &Config,
    ) -> TestInfo {
        let common = self.common;
        TestInfo {
            title: self.title(),
            test: self.name.to_owned(),
            op: self.op.name().to_owned(),
            method: self.method().to_owned(),
            fabric: fabric.to_owned(),
            device,
            address: address.to_owned(),
            loopback: common.loopback,
            looped: self.test.looped(),
            pinning: placement.note.clone(),
            client_core: placement.client,
            server_core: Some(placement.server),
            clock: String::new(),
            idle: common.idle.name().to_owned(),
            server_idle: serving.idle.name().to_owned(),
            qps: common.qp,
            cq_mod: None,
            batching: config.batch,
            engine: Some(EngineInfo {
                protocol: config::scheme_name(config.scheme),
                credits: config.window,
                server_credits: serving.window,
                inline: serving.inline,
                workers: serving.workers,
                signal_every: config.signal_every,
                coalesced_grants: config.coalesce_grants,
                remote_invalidate: config.remote_invalidate,
            }),
            rpcperf_version: env!("CARGO_PKG_VERSION"),
            optimized_build: !cfg!(debug_assertions),
            machine: Machine::read(Some(placement.client)),
        }
    }

    fn title(&self) -> String {
        let op = match self.op {
            RpcOp::Null => "Null",
            RpcOp::Echo => "Echo",
            RpcOp::Read => "Read",
            RpcOp::Write => "Write",
        };
        match self.test {
            Test::Latency { .. } => format!("RPC {op} Latency Test: full round trips"),
            Test::Rate => format!("RPC {op} Rate Test"),
            Test::Bandwidth => format!("RPC {op} BW Test"),
        }
    }

    fn method(&self) -> &'static str {
        match self.op {
            RpcOp::Null => "call without arguments, reply without results",
            RpcOp::Echo => "call with the payload inline, reply with it inline",
            RpcOp::Read => {
                "call with a Write chunk, RDMA Write of the payload by the server, reply, revocation of the chunk"
            }
            RpcOp::Write => {
                "call with a Read chunk, RDMA Read of the payload by the server, reply, revocation of the chunk"
            }
        }
    }
}

/// Drops the sizes above `longest`; an error if none is left.
fn retain(sizes: &mut Vec<usize>, longest: usize, why: impl FnOnce() -> String) -> Result<(), Failure> {
    let smallest = sizes.first().copied().unwrap_or_default();
    sizes.retain(|&size| size <= longest);
    if sizes.is_empty() { Err(Failure::Usage(format!("-s {smallest}: {}", why()))) } else { Ok(()) }
}
