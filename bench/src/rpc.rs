//! `lat`, `rate`, `bw`: calls through the whole engine.
#![forbid(unsafe_code)]

mod config;
mod form;
mod payload;
mod procedure_runner;
pub(crate) mod protocol;
mod reverse;
mod service;
mod target;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use clap::ArgMatches;
use rpcrdma::config::{AcceptConfig, ConnectConfig};
use rpcrdma::fabric::Capabilities;
use rpcrdma::server::WorkerConfig;
use rpcrdma::server::{Server, ServerConfig};
use rpcrdma::service::{Application, ShardSetup};
use rpcrdma::{Address, Config};
use rpcrdma_config::{memory_line, print_error};

use crate::cli::{
    self, BwArgs, CallArgs, Defer, DeviceArgs, Direction, EngineArgs, Form, Idle, LatArgs, Named, RateArgs, RpcOp,
    ServeArgs,
};
use crate::counters::Counters;
use crate::fabrics;
use crate::failure::Failure;
use crate::figures::Test;
use crate::limits::Limits;
use crate::output::{Output, print_text};
use crate::pin::{self, Placement, ServerCores};
use crate::placement;
use crate::process::ServerProcess;
use crate::report::{EngineInfo, TestInfo};
use crate::suite::Suite;
use crate::target::Length;

use config::Load;
use form::WireForm;
use procedure_runner::{RunDeferred, RunImmediately};
use protocol::ServerInfo;
use reverse::{ReverseControl, ReverseRun};
use service::Program;
use target::{CallSpec, RpcTarget};

/// Largest `-t` of a server.
const MAX_OUTSTANDING: usize = 16_383;

/// A running call server.
pub(crate) struct CallServer {
    server: Arc<Server>,
}

impl CallServer {
    /// Load and configuration of each shard.
    pub(crate) fn config(args: &ServeArgs) -> Result<(Load, Config, AcceptConfig), Failure> {
        // Without `--form` a server supports chunks.
        let form = args.form.unwrap_or(Form::Chunk);
        let long = matches!(form, Form::Continued | Form::Long);
        let load = Load {
            connections: args.qp as usize,
            outstanding: args.outstanding as usize,
            bulk: args.size,
            message: if long { args.size } else { 0 },
            form,
        };
        let shared = config::common_config(&args.engine, &args.device, args.idle, !args.no_batch, &load)?;
        let config = config::with_server_options(&args.engine, shared);
        let (config, accept) = config::apply_settings(&args.engine, &args.device, &config)?;
        Ok((load, config, accept))
    }

    /// Serves calls at `addresses`, on shards and workers on `cores`.
    pub(crate) fn start(args: &ServeArgs, addresses: &[Address], cores: &ServerCores) -> Result<Self, Failure> {
        let [first, others @ ..] = addresses else { return Err(Failure::run("serve", "no address")) };
        let (load, mut shard, accept) = Self::config(args)?;
        let info = ServerInfo {
            core: cores.shards[0] as u32,
            shards: cores.shards.len() as u32,
            idle: args.idle.into(),
            workers: args.engine.workers,
            credits: shard.limits.credits,
            inline_threshold: shard.wire.receive_size as u32,
            mode: shard.wire.credit_mode.into(),
            ..ServerInfo::for_load(&load).with_defer(args.engine.defer)
        };
        // The engine gives at most a quarter of a connection's credits to reverse calls.
        let max_reverse = shard.debug.reverse_credits.min(shard.limits.credits / 4).max(1);
        let (control, worker) = ReverseControl::new(max_reverse as usize);
        let program = Program::new(&info, Some(control))?;
        shard.memory.arenas = vec![program.arena()];
        print_error!("rpcperf: {}", memory_line(&shard, cores.shards.len(), 0));
        let config = ServerConfig {
            shard,
            accept,
            shards: cores.shards.len(),
            workers: workers(args, &load, cores),
            cores: Some(cores.shards.clone()),
            stats: args.stats.clone(),
            more_addresses: others.to_vec(),
            ..ServerConfig::default()
        };
        let server = match args.engine.defer {
            None => Server::start(first, program.services(&RunImmediately { on_workers: info.workers > 0 }), &config),
            Some(Defer(microseconds)) => {
                let make = move |_: &ShardSetup<'_>| {
                    let runner = RunDeferred::with_delay(Duration::from_micros(microseconds.into()));
                    Ok(Application { services: program.services(&runner), task: Some(Box::new(runner)) })
                };
                Server::start_with(first, make, &config)
            }
        };
        let server = server.map_err(|e| Failure::run("serve", e))?;
        let server = Arc::new(server);
        worker.spawn(Arc::clone(&server))?;
        Ok(Self { server })
    }

    /// Sum of the shards' counters.
    pub(crate) fn counters(&self) -> Option<Counters> {
        Some(Counters::now(&self.server.stats()))
    }
}

/// Workers, on their own cores if there are enough.
fn workers(args: &ServeArgs, load: &Load, cores: &ServerCores) -> Option<WorkerConfig> {
    let count = args.engine.workers as usize;
    (count > 0).then(|| WorkerConfig {
        count,
        cores: cores.workers.clone(),
        ring_capacity: load.calls().max(256),
        idle: args.idle.policy(),
    })
}

/// A call client's test.
struct CallPlan<'a> {
    name: &'static str,
    call: &'a CallArgs,
    /// All options of the command line.
    given: &'a ArgMatches,
    test: Test,
    limits: Limits,
    hgrm: Option<&'a Path>,
    default_size: usize,
    length: Length,
}

/// Runs `lat` as a client.
pub(crate) fn latency(args: &LatArgs, given: &ArgMatches) -> Result<(), Failure> {
    let LatArgs { call, latency } = args;
    run(&CallPlan {
        name: "lat",
        call,
        given,
        test: Test::Latency { rate: latency.rate },
        limits: latency.limits(),
        hgrm: latency.hgrm.as_deref(),
        default_size: call.wire_form.usual_size(64),
        length: call.length(10_000)?,
    })
}

/// Runs `rate` as a client.
pub(crate) fn rate(args: &RateArgs, given: &ArgMatches) -> Result<(), Failure> {
    let RateArgs { call, throughput } = args;
    let (limits, default_size) = (throughput.limits(), call.wire_form.usual_size(64));
    let length = call.length(1_000_000)?;
    run(&CallPlan { name: "rate", call, given, test: Test::Rate, limits, hgrm: None, default_size, length })
}

/// Runs `bw` as a client.
pub(crate) fn bandwidth(args: &BwArgs, given: &ArgMatches) -> Result<(), Failure> {
    let BwArgs { call, throughput } = args;
    if call.op == RpcOp::Null {
        return Err(Failure::Usage("--op null carries no payload, so it has no bandwidth: use rate".into()));
    }
    let (limits, default_size, length) = (throughput.limits(), args.usual_size(), call.length(5000)?);
    run(&CallPlan { name: "bw", call, given, test: Test::Bandwidth, limits, hgrm: None, default_size, length })
}

fn run(plan: &CallPlan<'_>) -> Result<(), Failure> {
    let CallArgs { common, engine, wire_form, .. } = plan.call;
    let direction = wire_form.direction();
    let placement = Placement::decide(common.cores)?;
    let text = common.server_address();
    let address = fabrics::parse(&text)?;
    common.device.check(&address)?;
    let reverse_core = (direction != Direction::Forward).then(|| placement.third_core());
    let servers = common
        .loopback
        .is_some()
        .then(|| placement.server_cores(&[placement.server], engine.shards as usize, engine.workers as usize));
    let ours = [placement.client].into_iter().chain(reverse_core).chain(servers.iter().flat_map(ServerCores::all));
    placement::warn(common.root.as_deref(), &address, ours);
    let wire_form = plan.checked_wire_form()?;
    let sizes = plan.sizes(&wire_form)?;
    let query_load = Load { connections: 1, outstanding: 1, bulk: 0, message: 0, form: Form::Inline };
    let query_config = config::common_config(engine, &common.device, common.idle, !common.no_batch, &query_load)?;
    let (query_config, connect) = config::apply_settings(engine, &common.device, &query_config)?;
    if engine.config.print_config {
        let (_, config, connect) = plan.config(&wire_form, sizes[0], usize::MAX)?;
        return print_text(&rpcrdma_config::to_toml(&config, &connect));
    }
    let output = Output::new(plan.test, direction, common.json.as_deref(), plan.hgrm, &sizes)?;
    let pending = output.pending();
    let prepared = PreparedRun { text, address, placement, query_config, connect, wire_form, sizes, output };
    pending.complete(measure(plan, prepared))
}

/// A run whose options were checked.
struct PreparedRun {
    /// The server's address, as given and parsed.
    text: String,
    address: Address,
    placement: Placement,
    /// Configuration of the connection that queries the server before the measurement.
    query_config: Config,
    connect: ConnectConfig,
    wire_form: WireForm,
    sizes: Vec<usize>,
    output: Output,
}

fn measure(plan: &CallPlan<'_>, prepared: PreparedRun) -> Result<(), Failure> {
    let common = &plan.call.common;
    let direction = plan.call.wire_form.direction();
    let PreparedRun { text, address, mut placement, query_config, connect, wire_form, mut sizes, output } = prepared;
    let server = if common.loopback.is_some() { Some(plan.start_server(&text, &placement, &sizes)?) } else { None };
    // The server would inherit the affinity, so pinning follows its start.
    pin::pin(placement.client)?;
    // A first connection queries the server before any measurement or output.
    let (client, serving) = target::connect(&address, query_config, connect, None)?;
    let device = rpcrdma::fabric::Fabric::capabilities(client.shard().fabric()).clone();
    drop(client);
    plan.check_against_server(&wire_form, &serving, &mut sizes)?;
    if server.is_none() {
        placement.adopt_server_core(serving.core as usize);
    }
    if direction != Direction::Forward {
        placement.note = format!("{}; the server's calls are made on core {}", placement.note, placement.third_core());
    }
    let specs: Vec<CallSpec> =
        sizes.iter().map(|&size| plan.spec(&wire_form, size, &serving, &placement)).collect::<Result<_, _>>()?;
    let largest = specs.iter().max_by_key(|spec| spec.config.memory_bytes()).unwrap_or(&specs[0]);
    print_error!("rpcperf: {}", memory_line(&largest.config, 1, largest.active));
    let fabric = (fabrics::name(&address), device);
    let info = plan.info(&text, fabric, &placement, &serving, &specs[0]);
    let suite = Suite::new(placement, server, plan.length, plan.limits, output, info);
    suite.run(&sizes, |size| {
        let spec = specs.iter().find(|spec| spec.size == size).unwrap_or(&specs[0]);
        RpcTarget::connect(&address, spec)
    })
}

impl CallPlan<'_> {
    /// The requested form and protocol, checked against each other.
    fn checked_wire_form(&self) -> Result<WireForm, Failure> {
        let direction = self.call.wire_form.direction();
        if direction != Direction::Forward && self.call.common.qp != 1 {
            return Err(Failure::Usage(format!("-q {}: --reverse and --both use one connection", self.call.common.qp)));
        }
        // With --reverse and --both, a server needs twice the client's -t.
        let max_outstanding = MAX_OUTSTANDING / 2;
        if direction != Direction::Forward && self.call.outstanding as usize > max_outstanding {
            return Err(Failure::Usage(format!(
                "-t {}: a server has at most {max_outstanding} calls of its own outstanding (--reverse and --both)",
                self.call.outstanding
            )));
        }
        let inline_threshold = self.call.engine.inline_threshold as usize & !3;
        WireForm::new(
            self.call.op,
            self.call.wire_form.form,
            direction,
            self.call.engine.configured_mode()?,
            inline_threshold,
        )
    }

    /// Sizes of the operation: all of `-a` that fit, or an error for an `-s` that does not.
    fn sizes(&self, wire_form: &WireForm) -> Result<Vec<usize>, Failure> {
        let common = &self.call.common;
        if self.call.op == RpcOp::Null {
            if common.all || common.size.is_some() {
                return Err(Failure::Usage("--op null carries no payload, so -s and -a do not apply".into()));
            }
            return Ok(vec![0]);
        }
        let mut sizes = common.sizes(self.default_size);
        retain(&mut sizes, |size| wire_form.carries(size), || wire_form.explain_sizes())?;
        Ok(sizes)
    }

    /// Checks the plan against the server, and drops sizes beyond its memory.
    fn check_against_server(
        &self,
        wire_form: &WireForm,
        serving: &ServerInfo,
        sizes: &mut Vec<usize>,
    ) -> Result<(), Failure> {
        let agreed = config::negotiated_mode(wire_form.mode, serving.mode.into());
        if agreed != wire_form.mode {
            // Calls would work, but not in the requested mode.
            return Err(Failure::Usage(format!(
                "the server and this client negotiate {}, which differs from the request: set --version and --credit-mode \
                 to it, or start the server with other options",
                config::mode_name(agreed)
            )));
        }
        let inline_threshold = self.call.engine.inline_threshold & !3;
        if serving.inline_threshold != inline_threshold {
            let theirs = serving.inline_threshold;
            return Err(Failure::Usage(format!(
                "--inline {inline_threshold}: the server uses {theirs}, and both ends need the same value"
            )));
        }
        if wire_form.is_long() && serving.load().form != wire_form.form {
            let form = wire_form.form.name();
            return Err(Failure::Usage(format!(
                "--form {form}: the server has no memory for this form; start the server with --form {form}"
            )));
        }
        let largest = match wire_form.form {
            Form::Inline => usize::MAX,
            Form::Chunk => serving.bulk as usize,
            Form::Continued | Form::Long => serving.message as usize,
        };
        retain(
            sizes,
            |size| size <= largest,
            || {
                format!(
                    "the server has memory for payloads of up to {largest} bytes; start the server with a larger -s"
                )
            },
        )
    }

    fn start_server(&self, address: &str, placement: &Placement, sizes: &[usize]) -> Result<ServerProcess, Failure> {
        let common = &self.call.common;
        let wire_form = self.checked_wire_form()?;
        let largest = if wire_form.form == Form::Inline { 1 } else { sizes.iter().copied().max().unwrap_or(1) };
        // The engine gives a quarter of a server's credits to the reverse direction, and a server has twice as many
        // credits as `--outstanding`, so half of `--outstanding` is available for reverse calls.
        let factor = if self.call.wire_form.direction() == Direction::Forward { 1 } else { 2 };
        let mut arguments: Vec<String> = Vec::new();
        let mut option = |name: &str, value: String| arguments.extend([name.to_owned(), value]);
        option("--only", "calls".to_owned());
        option("--cores", placement.server.to_string());
        option("--client-core", placement.client.to_string());
        option("--idle", common.idle.name());
        option("--size", largest.to_string());
        option("--outstanding", (factor * self.call.outstanding as usize).to_string());
        option("--qp", common.qp.to_string());
        option("--form", wire_form.form.name());
        arguments.extend(common.no_batch.then(|| "--no-batch".to_owned()));
        arguments.extend(cli::given_options::<DeviceArgs>(self.given));
        arguments.extend(cli::given_options::<EngineArgs>(self.given));
        arguments.extend(self.call.engine.config.arguments::<AcceptConfig>());
        ServerProcess::start(address, &arguments)
    }

    /// Load and configuration of the client's shard, for payloads of `size` bytes and at most `max_outstanding` calls.
    fn config(
        &self,
        wire_form: &WireForm,
        size: usize,
        max_outstanding: usize,
    ) -> Result<(Load, Config, ConnectConfig), Failure> {
        let common = &self.call.common;
        let bulk = if wire_form.form == Form::Chunk { size } else { 0 };
        let message = if wire_form.is_long() { size } else { 0 };
        let (connections, outstanding) = (common.qp as usize, (self.call.outstanding as usize).min(max_outstanding));
        let load = Load { connections, outstanding, bulk, message, form: wire_form.form };
        let mut config =
            config::common_config(&self.call.engine, &common.device, common.idle, !common.no_batch, &load)?;
        // Each connection has its own set of these buffers.
        config.memory.bulk_buffers = if bulk > 0 { vec![(size, outstanding)] } else { load.exposed_messages() };
        let (config, connect) = config::apply_settings(&self.call.engine, &common.device, &config)?;
        Ok((load, config, connect))
    }

    fn spec(
        &self,
        wire_form: &WireForm,
        size: usize,
        serving: &ServerInfo,
        placement: &Placement,
    ) -> Result<CallSpec, Failure> {
        let common = &self.call.common;
        let connections = common.qp as usize;
        let chunks = wire_form.form == Form::Chunk || wire_form.is_long();
        let max_outstanding =
            if chunks && size > 0 { serving.load().outstanding_with(size, connections) } else { usize::MAX };
        let active = self.call.engine.active.map_or(connections, |active| connections.min(active as usize));
        let (load, config, connect) = self.config(wire_form, size, max_outstanding)?;
        let budget = config.memory.budget;
        let other_bytes = config.memory_bytes().saturating_sub(load.outstanding * size);
        let payload_budget = budget.saturating_sub(other_bytes);
        let affordable_calls =
            if wire_form.form == Form::Chunk { payload_budget / (active * size.max(1)) } else { usize::MAX };
        if affordable_calls == 0 {
            return Err(Failure::Usage(format!(
                "-q {connections} -s {size}: a payload of each connection exceeds memory.budget, {budget} bytes: raise it by \
                 --set, or lower -q, --active or -s"
            )));
        }
        // If the budget does not cover the payloads of all calls, fewer calls are outstanding.
        let (load, config, connect) = match load.outstanding <= affordable_calls {
            true => (load, config, connect),
            false => self.config(wire_form, size, max_outstanding.min(affordable_calls))?,
        };
        let outstanding = load.outstanding;
        let has_reverse_calls = self.call.wire_form.direction() != Direction::Forward;
        let yields = placement.shared || (has_reverse_calls && placement.third_core() == placement.client);
        let reverse = has_reverse_calls.then(|| {
            let run = ReverseRun {
                shape: wire_form.shape(size),
                outstanding,
                test: self.test,
                length: self.length,
                core: placement.third_core(),
                yields: placement.third_core() == placement.client || placement.third_core() == placement.server,
                idle: common.idle,
            };
            let info = ServerInfo {
                core: placement.client as u32,
                shards: 1,
                idle: common.idle.into(),
                credits: config.limits.credits,
                inline_threshold: config.wire.receive_size as u32,
                mode: config.wire.credit_mode.into(),
                ..ServerInfo::for_load(&load)
            };
            (run, info)
        });
        Ok(CallSpec { wire_form: *wire_form, size, connections, active, outstanding, yields, config, connect, reverse })
    }

    fn info(
        &self,
        address: &str,
        (fabric, device): (&str, Capabilities),
        placement: &Placement,
        serving: &ServerInfo,
        spec: &CallSpec,
    ) -> TestInfo {
        let (common, config) = (&self.call.common, &spec.config);
        TestInfo {
            test: self.name.to_owned(),
            method: method(self.call.op, spec.wire_form.form).to_owned(),
            server_idle: Idle::from(serving.idle).name(),
            batching: config.debug.batch,
            engine: Some(EngineInfo {
                protocol: config::mode_name(config.wire.credit_mode),
                form: spec.wire_form.form.name(),
                direction: self.call.wire_form.direction().name(),
                credits: config.limits.credits,
                server_credits: serving.credits,
                inline_threshold: serving.inline_threshold,
                shards: serving.shards,
                workers: serving.workers,
                deferred_us: serving.deferred_us(),
                signal_every: config.debug.signal_every,
                chunk_align: config.memory.chunk_align,
                coalesced_grants: config.debug.coalesce_grants,
                remote_invalidate: config.debug.remote_invalidate,
            }),
            ..TestInfo::new(("RPC", &self.call.op.name()), common, placement, self.test, (address, fabric, device))
        }
    }
}

/// Steps of one operation.
fn method(op: RpcOp, form: Form) -> &'static str {
    match (op, form) {
        (RpcOp::Null, _) => "call without arguments, reply without results",
        (RpcOp::Echo, Form::Inline | Form::Chunk) => "call with the payload inline, reply with it inline",
        (RpcOp::Echo, Form::Continued) => {
            "call with the payload, continued in several messages, reply with it, continued"
        }
        (RpcOp::Echo, Form::Long) => {
            "call in a Position Zero Read chunk, RDMA Read of it by the server, RDMA Write of the reply into the Reply chunk, \
             revocation of both"
        }
        (RpcOp::Read, Form::Inline) => "call, reply with the payload inline",
        (RpcOp::Read, Form::Continued) => "call, reply with the payload, continued in several messages",
        (RpcOp::Read, Form::Chunk) => {
            "call with a Write chunk, RDMA Write of the payload by the server, reply, revocation of the chunk"
        }
        (RpcOp::Read, Form::Long) => {
            "call with a Reply chunk, RDMA Write of the reply by the server, a message that announces it, revocation of the chunk"
        }
        (RpcOp::Write, Form::Inline) => "call with the payload inline, reply",
        (RpcOp::Write, Form::Continued) => "call with the payload, continued in several messages, reply",
        (RpcOp::Write, Form::Chunk) => {
            "call with a Read chunk, RDMA Read of the payload by the server, reply, revocation of the chunk"
        }
        (RpcOp::Write, Form::Long) => {
            "call in a Position Zero Read chunk, RDMA Read of it by the server, reply, revocation of the chunk"
        }
    }
}

/// Keeps the usable sizes; fails if none remains.
fn retain(
    sizes: &mut Vec<usize>,
    is_usable: impl Fn(usize) -> bool,
    why: impl FnOnce() -> String,
) -> Result<(), Failure> {
    let first = sizes.first().copied().unwrap_or_default();
    sizes.retain(|&size| is_usable(size));
    if sizes.is_empty() { Err(Failure::Usage(format!("-s {first}: {}", why()))) } else { Ok(()) }
}
