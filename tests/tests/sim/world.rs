//! One run: participants take turns on one thread, in an order that the seed determines.

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rpcrdma::shard::{SimulatedTime, SimulatedWorkers};
use rpcrdma::wire::Revision;
use rpcrdma::{Address, CreditMode, Services};
use rpcrdma_tests::Random;

use crate::call_checker::CallChecker;
use crate::caller::{Addresses, Caller};
use crate::deferred_calls::DeferredCalls;
use crate::device::{FabricKind, MediumListener, listener};
use crate::hostile::{HostileClient, HostileServer};
use crate::journal::{Journal, Tally};
use crate::plan::{Plan, ShutdownMode};
use crate::server_shard::ServerShard;
use crate::service::{Executions, services};

/// Maximum rounds of a wait.
const MAX_ROUNDS: u64 = 60_000;
/// Maximum rounds of a stall.
const MAX_STALL: usize = 120;
/// Turns within which delayed completions arrive.
const MAX_DELAY: usize = 80;

/// Outcome of a run.
#[derive(Debug)]
pub(crate) struct Outcome {
    /// Number of events, and their hash.
    pub(crate) digest: (u64, u64),
    pub(crate) tally: Tally,
}

/// Runs a seed to its end. Panics if an invariant fails.
pub(crate) fn run(seed: u64, decode_by_layout: bool, trace: bool) -> Outcome {
    let mut world = World::new(Plan::from_seed(seed, decode_by_layout), trace);
    world.work();
    world.check_idle_state();
    world.end();
    Outcome { digest: world.journal.digest(), tally: world.journal.tally() }
}

struct World {
    plan: Rc<Plan>,
    journal: Journal,
    time: SimulatedTime,
    random: Random,
    listeners: Vec<MediumListener>,
    servers: Vec<ServerShard>,
    callers: Vec<Caller>,
    hostile_clients: Vec<HostileClient>,
    hostile_server: Option<HostileServer>,
    /// By participant: remaining rounds of its stall.
    stalled: Vec<usize>,
    /// Number of servers opened so far.
    servers_opened: u32,
    executions: Executions,
    /// By group: services of its servers.
    services: Vec<Arc<Services>>,
    /// By group: workers of its servers.
    workers: Vec<SimulatedWorkers>,
    /// Deferred calls of the servers, by group; the last entry has those of all clients.
    deferred: Vec<DeferredCalls>,
    /// Checkers of closed servers.
    old_checkers: Vec<CallChecker>,
    /// By group: connections that clients may lose because of closed servers.
    allowed_losses: Vec<u64>,
    /// By group: buffer allocations that failed at closed servers.
    pool_empty: Vec<u64>,
    /// By group: whether one of its servers has been closed.
    drained: Vec<bool>,
    /// By group: established connections that clients have lost.
    lost: Vec<u64>,
    /// By group: connections that clients have lost before they were established.
    missed: Vec<u64>,
    /// By group: calls that its servers have rejected because they had no memory or were draining.
    rejected_calls: Vec<u64>,
}

/// An address that is unique, also across processes.
fn address(kind: FabricKind) -> Address {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    format!("{}:sim-{}-{number}", kind.scheme(), std::process::id()).parse().expect("a name")
}

impl World {
    fn new(plan: Plan, trace: bool) -> Self {
        let time = SimulatedTime::new();
        let journal = Journal::new(time.clone(), trace);
        journal.trace(|| format!("{plan:#?}"));
        let plan = Rc::new(plan);
        let groups = plan.groups.len();
        let executions = Executions::default();
        let deferred = (0..=groups).map(|_| DeferredCalls::default()).collect::<Vec<_>>();
        let services: Vec<_> =
            deferred[..groups].iter().map(|deferred| Arc::new(services(&plan, &executions, deferred))).collect();
        let workers = plan.groups.iter().zip(&services);
        let workers = workers
            .map(|(group, services)| SimulatedWorkers::new(group.workers, group.worker_ring, Arc::clone(services)));
        let workers = workers.collect();
        let address = || address(plan.kind);
        let addresses = Rc::new(Addresses { groups: (0..groups).map(|_| address()).collect(), hostile: address() });
        let mut world = Self {
            random: Random::new(plan.seed ^ 77 << 40),
            listeners: addresses.groups.iter().map(listener).collect(),
            servers: Vec::new(),
            callers: Vec::new(),
            hostile_clients: Vec::new(),
            hostile_server: plan
                .hostile_server
                .then(|| HostileServer::new(&plan, addresses.hostile.clone(), journal.handle_for("badsrv"))),
            stalled: Vec::new(),
            servers_opened: 0,
            executions,
            services,
            workers,
            deferred,
            old_checkers: Vec::new(),
            allowed_losses: vec![0; groups],
            pool_empty: vec![0; groups],
            drained: vec![false; groups],
            lost: vec![0; groups],
            missed: vec![0; groups],
            rejected_calls: vec![0; groups],
            plan: Rc::clone(&plan),
            journal,
            time,
        };
        for (group, shards) in plan.groups.iter().map(|group| group.shards).enumerate() {
            (0..shards).for_each(|_| world.open_server(group));
        }
        for index in 0..plan.callers.len() {
            let service_state = (&world.executions, &world.deferred[groups]);
            world.callers.push(Caller::new(&plan, index, &addresses, &world.journal, &world.time, service_state));
        }
        for (index, &group) in plan.hostile_clients.iter().enumerate() {
            let journal = world.journal.handle_for(&format!("bad{index}"));
            let address = addresses.groups[group].clone();
            world.hostile_clients.push(HostileClient::new(&plan, index, address, journal));
        }
        let count = |what, times| world.journal.count(what, times);
        for config in plan.groups.iter().map(|group| &group.config) {
            let mode = match config.wire.credit_mode {
                CreditMode::V2Windowed => "servers of version 2, windowed",
                CreditMode::V2Incremental => "servers of version 2, incremental",
                CreditMode::V1 => "servers of version 1",
            };
            count(mode, 1);
        }
        count("runs with the older code points", u64::from(plan.revision == Revision::Cel09));
        count(plan.kind.name(), 1);
        world.journal.count("calm runs", u64::from(plan.is_calm()));
        world.journal.count("runs with host authentication", u64::from(plan.authenticates()));
        let workers = plan.groups.iter().any(|group| group.workers > 0);
        world.journal.count("runs with workers", u64::from(workers));
        world
    }

    fn open_server(&mut self, group: usize) {
        let journal = self.journal.handle_for(&format!("server{}", self.servers_opened));
        self.servers_opened += 1;
        let listener = &self.listeners[group];
        let state = (&self.time, &self.executions);
        let services = (&self.services[group], &self.workers[group]);
        let server = ServerShard::new(&self.plan, group, listener, journal, state, services, self.servers_opened);
        self.servers.push(server);
    }

    /// Advances the time, and lets participants take or skip a turn, in random order. If `working`, they start calls.
    fn round(&mut self, working: bool) {
        self.time.advance(Duration::from_nanos(1 + self.random.below(self.plan.tick as usize) as u64));
        let (servers, callers, hostile) = (self.servers.len(), self.callers.len(), self.hostile_clients.len());
        let workers: Vec<_> = self
            .plan
            .groups
            .iter()
            .enumerate()
            .flat_map(|(group, plan)| (0..plan.workers).map(move |worker| (group, worker)))
            .collect();
        // A participant is a number: servers come first, then callers, hostile clients, the hostile server, workers,
        // and the groups' deferred calls.
        let first_worker = servers + callers + hostile + 1;
        let first_deferred = first_worker + workers.len();
        let all = first_deferred + self.deferred.len();
        self.stalled.resize(all, 0);
        if working && self.plan.stall != 0 && self.random.once_in(self.plan.stall) {
            let participant = self.random.below(all);
            self.stalled[participant] = self.random.below(MAX_STALL);
        }
        let first = self.random.below(all);
        for step in 0..all {
            let participant = (first + step) % all;
            if self.stalled[participant] > 0 && working {
                self.stalled[participant] -= 1;
                continue;
            }
            if self.random.below(100) < self.plan.idle {
                continue;
            }
            if participant < servers {
                let server = &mut self.servers[participant];
                if working { server.work() } else { server.turn_without_calls() }
            } else if participant < servers + callers {
                let caller = &mut self.callers[participant - servers];
                if working { caller.work() } else { caller.turn() }
            } else if participant < servers + callers + hostile {
                self.hostile_clients[participant - servers - callers].turn();
            } else if let Some(&(group, worker)) = participant.checked_sub(first_worker).and_then(|at| workers.get(at))
            {
                let worked = self.workers[group].turn(worker);
                self.journal.count("calls on workers", u64::from(worked));
            } else if let Some(deferred) = participant.checked_sub(first_deferred).and_then(|at| self.deferred.get(at))
            {
                if let Some(disconnected) = deferred.answer(&mut self.random) {
                    self.journal.count("deferred calls answered", 1);
                    self.journal.count("deferred calls answered after their connection closed", disconnected);
                }
            } else if let Some(server) = &mut self.hostile_server {
                server.turn();
            }
        }
        self.close_retired_servers();
    }

    /// Closes retired servers whose last connection has ended.
    fn close_retired_servers(&mut self) {
        let mut index = 0;
        while index < self.servers.len() {
            if self.servers[index].is_retired && self.servers[index].is_closed() && self.random.once_in(30) {
                let server = self.servers.swap_remove(index);
                self.close_server(server);
            } else {
                index += 1;
            }
        }
    }

    fn close_server(&mut self, mut server: ServerShard) {
        let group = server.group;
        // Delayed completions must arrive, and the workers' calls must end.
        for turn in 0.. {
            server.turn();
            while self.deferred[group].answer(&mut self.random).is_some() {}
            if turn >= MAX_DELAY && !server.has_calls_at_workers() {
                break;
            }
            assert!(turn < 10_000, "the workers never complete their calls: {}", server.waits_for());
            (0..self.plan.groups[group].workers).for_each(|worker| _ = self.workers[group].turn(worker));
        }
        server.check_leaks(self.plan.is_calm(), !self.plan.hostile_clients.is_empty());
        self.allowed_losses[group] += server.allowed_losses();
        self.pool_empty[group] += server.pool_empty();
        self.old_checkers.push(server.checker);
    }

    /// Runs rounds without new calls until a condition holds. Panics with `failure` if it never does.
    fn run_until(&mut self, failure: &str, mut condition: impl FnMut(&mut Self) -> bool) {
        for _ in 0..MAX_ROUNDS {
            if condition(self) {
                return;
            }
            self.round(false);
        }
        let callers: Vec<_> = self.callers.iter_mut().map(Caller::waits_for).collect();
        let servers: Vec<_> = self.servers.iter_mut().map(ServerShard::waits_for).collect();
        panic!("{failure}: {callers:?}, {servers:?}");
    }

    /// Makes calls and injects faults.
    fn work(&mut self) {
        for _ in 0..MAX_ROUNDS {
            if self.callers.iter().all(|caller| caller.remaining() == 0) {
                break;
            }
            self.round(true);
            if self.plan.restart != 0 && self.random.once_in(self.plan.restart) {
                self.restart_participant();
            }
        }
        self.callers.iter_mut().for_each(Caller::drop_hoard);
        self.run_until("calls never complete", World::is_idle);
    }

    /// Closes a client immediately, or replaces a server shard.
    fn restart_participant(&mut self) {
        if self.random.once_in(4) && self.callers.len() > 1 {
            let at = self.random.below(self.callers.len());
            let caller = self.callers.swap_remove(at);
            self.count_losses(&caller);
            caller.close_now();
            return;
        }
        let at = self.random.below(self.servers.len());
        let server = &mut self.servers[at];
        if server.is_retired {
            return;
        }
        let group = server.group;
        if self.random.once_in(2) {
            server.drain();
        } else {
            server.abort();
        }
        self.drained[group] = true;
        self.open_server(group);
    }

    fn count_losses(&mut self, caller: &Caller) {
        for group in 0..self.plan.groups.len() {
            let losses = caller.losses()[group];
            self.lost[group] += losses.after_established;
            self.missed[group] += losses.before_established;
            self.rejected_calls[group] += caller.checker.rejected_calls[group];
        }
    }

    /// Checks that completed calls leave no memory exposed, and that every connection can carry one more call.
    fn check_idle_state(&mut self) {
        self.hostile_clients.clear();
        self.hostile_server = None;
        self.run_until("memory stays exposed", |world| {
            world.callers.iter_mut().all(Caller::is_quiet) && world.servers.iter_mut().all(ServerShard::is_quiet)
        });
        let mut all_called = false;
        while !all_called {
            all_called = true;
            self.callers.iter_mut().for_each(|caller| all_called &= caller.ping());
            self.servers.iter_mut().for_each(|server| all_called &= server.ping());
            self.run_until("a call on an idle connection never completes", World::is_idle);
        }
    }

    /// Whether no call is outstanding.
    fn is_idle(&mut self) -> bool {
        let callers = self.callers.iter().map(|caller| &caller.checker);
        callers.chain(self.servers.iter().map(|server| &server.checker)).all(|checker| checker.outstanding() == 0)
    }

    /// Closes all shards. Checks that all memory is free, and that every lost connection has a cause.
    fn end(&mut self) {
        match self.plan.shutdown {
            ShutdownMode::Close => self.callers.iter_mut().for_each(Caller::close),
            ShutdownMode::Drain | ShutdownMode::Abort => {
                self.drained.fill(true);
                // No server will ever accept the connections that wait at the listeners.
                self.listeners.clear();
                for server in self.servers.iter_mut().filter(|server| !server.is_retired) {
                    if self.plan.shutdown == ShutdownMode::Drain { server.drain() } else { server.abort() }
                }
            }
        }
        self.run_until("connections never end", |world| {
            world.callers.iter().all(Caller::is_closed) && world.servers.iter().all(ServerShard::is_closed)
        });
        for _ in 0..MAX_DELAY {
            for deferred in &self.deferred {
                while deferred.answer(&mut self.random).is_some() {}
            }
            self.servers.iter_mut().for_each(ServerShard::turn);
            self.callers.iter_mut().for_each(Caller::turn);
        }
        for mut caller in std::mem::take(&mut self.callers) {
            caller.check_leaks(self.plan.is_calm());
            self.count_losses(&caller);
        }
        for server in std::mem::take(&mut self.servers) {
            self.close_server(server);
        }
        self.old_checkers.iter_mut().for_each(CallChecker::check_executions);
        for group in 0..self.plan.groups.len() {
            // The close of a server may refuse connections that it has not accepted yet.
            let missed = if self.drained[group] { 0 } else { self.missed[group] };
            let (lost, allowed_losses) = (self.lost[group] + missed, self.allowed_losses[group]);
            assert!(
                lost <= allowed_losses,
                "group {group}: {lost} connections were lost, at most {allowed_losses} expected"
            );
            let (rejected, empty) = (self.rejected_calls[group], self.pool_empty[group]);
            let drained = self.drained[group];
            assert!(
                drained || rejected <= empty,
                "group {group}: {rejected} calls were rejected, but only {empty} buffer allocations failed"
            );
        }
    }
}
