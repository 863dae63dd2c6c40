//! `serve`: the server of all tests.
#![forbid(unsafe_code)]

use std::sync::mpsc;
use std::thread;

use rpcrdma::Address;
use rpcrdma::fabric::Fabric;
use rpcrdma::fabric::any::AnyFabric;
use rpcrdma_config::program;

use crate::cli::{Idle, Named, ServeArgs, TestKind};
use crate::fabrics;
use crate::failure::Failure;
use crate::idle::Idler;
use crate::output::print_text;
use crate::pin::{self, Placement};
use crate::placement;
use crate::process;
use crate::raw::{RawServer, Welcome};
use crate::rpc::CallServer;

/// Serves until killed.
pub(crate) fn run(args: &ServeArgs) -> Result<(), Failure> {
    if let Some(parent) = args.parent {
        process::exit_with_parent(parent)?;
    }
    if args.only.is_none() && args.idle == Idle::Poll {
        return Err(Failure::Usage(
            "--idle poll: calls and raw tests are served by two threads on one core, which cannot both poll all the time; \
             use --only calls or --only raw"
                .to_owned(),
        ));
    }
    if args.only == Some(TestKind::Raw) && args.stats.is_some() {
        return Err(Failure::Usage("--stats: raw tests have no statistics; omit --only raw".to_owned()));
    }
    let addresses = args.addresses()?;
    addresses.iter().try_for_each(|address| args.device.check(address))?;
    let [address, others @ ..] = &addresses[..] else {
        return Err(Failure::Usage("--listen: no address".to_owned()));
    };
    if !others.is_empty() && args.only != Some(TestKind::Calls) {
        return Err(Failure::Usage("--listen: raw tests are served at one address; use --only calls".to_owned()));
    }
    if args.engine.config.print_config {
        let (_, config, accept) = CallServer::config(args)?;
        return print_text(&rpcrdma_config::to_toml(&config, &accept));
    }
    let (shards, workers) = (args.shards(), args.engine.workers as usize);
    let threads = if args.only == Some(TestKind::Raw) { 1 } else { shards + workers };
    if args.cores.len() > threads {
        let given = args.cores.len();
        return Err(Failure::Usage(format!(
            "--cores: {given} cores for {threads} threads: see --shards and --workers"
        )));
    }
    let placement = Placement::decide_for_server(&args.cores, args.client_core)?;
    let cores = placement.server_cores(&args.cores, shards, workers);
    let core = cores.shards[0];
    // The parent has already warned about both sides' cores.
    if args.parent.is_none() {
        placement::warn(args.root.as_deref(), address, cores.all().take(threads));
    }
    let calls = match args.only {
        Some(TestKind::Raw) => None,
        _ => Some(CallServer::start(args, &addresses, &cores)?),
    };
    let raw = match args.only {
        Some(TestKind::Calls) => None,
        _ => Some(start_raw(fabrics::raw_address(address)?, args, core, placement.shared)?),
    };
    let what = match (&calls, &raw) {
        (Some(_), Some(_)) => "calls and raw tests",
        (Some(_), None) => "calls",
        _ => "raw tests",
    };
    process::announce(&args.listen.join(", "), &format!("{what}, core {core}, idle policy {}", args.idle.name()));
    if args.parent.is_some() {
        process::answer_counter_requests(|| calls.as_ref()?.counters());
    }
    loop {
        thread::park();
    }
}

/// Starts raw tests on a separate thread; returns once it listens.
fn start_raw(address: Address, args: &ServeArgs, core: usize, shared: bool) -> Result<(), Failure> {
    let (started, outcome) = mpsc::channel();
    let (idle, device) = (args.idle, args.device.clone());
    let serve = move || {
        let listening = pin::pin(core).and_then(|()| listen(fabrics::open(&address, idle, &device)?, &address));
        match listening {
            Ok(fabric) => {
                // The spawning thread waits for this message, so it is received.
                let _ = started.send(Ok(()));
                let welcome = Welcome { core: core as u32, idle: idle.into(), ..Welcome::default() };
                RawServer::new(fabric, welcome, Idler::new(idle, shared)).run()
            }
            Err(failure) => drop(started.send(Err(failure))),
        }
    };
    program::spawn("raw", serve).map_err(|e| Failure::run("raw tests", e))?;
    outcome.recv().unwrap_or_else(|_| Err(Failure::Run("the thread of raw tests ended".to_owned())))
}

fn listen(mut fabric: AnyFabric, address: &Address) -> Result<AnyFabric, Failure> {
    let listener = address.bind().map_err(|e| Failure::run("listen", e))?;
    fabric.listen(&listener).map_err(|e| Failure::run("listen", e))?;
    Ok(fabric)
}
