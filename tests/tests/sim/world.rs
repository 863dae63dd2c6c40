//! One run: participants take turns on one thread, scheduled by the seed.

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
use crate::device::{Kind, MediumListener, listener};
use crate::host::Host;
use crate::hostile::{HostileClient, HostileServer};
use crate::journal::{Journal, Tally};
use crate::plan::{Plan, ShutdownMode};
use crate::service::{Runs, services};

/// Rounds after which a wait fails.
const MAX_ROUNDS: u64 = 60_000;
/// Rounds of a stall.
const STALL: usize = 120;

/// Outcome of a run.
#[derive(Debug)]
pub(crate) struct Outcome {
    /// Number of events, and their hash.
    pub(crate) digest: (u64, u64),
    pub(crate) tally: Tally,
}

/// Runs a seed to its end. Panics if an invariant fails.
pub(crate) fn run(seed: u64, decode_by_layout: bool, trace: bool) -> Outcome {
    let mut world = World::new(Plan::of(seed, decode_by_layout), trace);
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
    hosts: Vec<Host>,
    callers: Vec<Caller>,
    hostile_clients: Vec<HostileClient>,
    hostile_server: Option<HostileServer>,
    /// By participant: remaining rounds of its stall.
    stalled: Vec<usize>,
    hosts_so_far: u32,
    runs: Runs,
    /// By group: its services, and its workers.
    services: Vec<Arc<Services>>,
    workers: Vec<SimulatedWorkers>,
    /// Deferred calls: by group, and the clients' last.
    later: Vec<DeferredCalls>,
    /// Desks of closed servers.
    old_checkers: Vec<CallChecker>,
    /// Sums over closed servers, by group.
    allowed_losses: Vec<u64>,
    pool_empty: Vec<u64>,
    drained: Vec<bool>,
    lost: Vec<u64>,
    missed: Vec<u64>,
    turned_away: Vec<u64>,
}

/// A unique address, also across processes.
fn address(kind: Kind) -> Address {
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
        let runs = Runs::default();
        let later = (0..=groups).map(|_| DeferredCalls::default()).collect::<Vec<_>>();
        let services: Vec<_> =
            plan.groups.iter().zip(&later).map(|(_, later)| Arc::new(services(&plan, &runs, later))).collect();
        let workers = plan.groups.iter().zip(&services);
        let workers = workers
            .map(|(group, services)| SimulatedWorkers::new(group.workers, group.worker_ring, Arc::clone(services)));
        let workers = workers.collect();
        let address = || address(plan.kind);
        let addresses = Rc::new(Addresses { groups: (0..groups).map(|_| address()).collect(), hostile: address() });
        let mut world = Self {
            random: Random::new(plan.seed ^ 77 << 40),
            listeners: addresses.groups.iter().map(listener).collect(),
            hosts: Vec::new(),
            callers: Vec::new(),
            hostile_clients: Vec::new(),
            hostile_server: plan
                .hostile_server
                .then(|| HostileServer::new(&plan, addresses.hostile.clone(), journal.of("badsrv"))),
            stalled: Vec::new(),
            hosts_so_far: 0,
            runs,
            services,
            workers,
            later,
            old_checkers: Vec::new(),
            allowed_losses: vec![0; groups],
            pool_empty: vec![0; groups],
            drained: vec![false; groups],
            lost: vec![0; groups],
            missed: vec![0; groups],
            turned_away: vec![0; groups],
            plan: Rc::clone(&plan),
            journal,
            time,
        };
        for (group, shards) in plan.groups.iter().map(|group| group.shards).enumerate() {
            (0..shards).for_each(|_| world.open_host(group));
        }
        for index in 0..plan.callers.len() {
            let both = (&world.runs, &world.later[groups]);
            world.callers.push(Caller::new(&plan, index, &addresses, &world.journal, &world.time, both));
        }
        for (index, &group) in plan.hostile_clients.iter().enumerate() {
            let journal = world.journal.of(&format!("bad{index}"));
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
        world.journal.count("calm runs", u64::from(plan.calm()));
        world.journal.count("runs with host authentication", u64::from(plan.authenticates()));
        let workers = plan.groups.iter().any(|group| group.workers > 0);
        world.journal.count("runs with workers", u64::from(workers));
        world
    }

    fn open_host(&mut self, group: usize) {
        let journal = self.journal.of(&format!("server{}", self.hosts_so_far));
        self.hosts_so_far += 1;
        let listener = &self.listeners[group];
        let both = (&self.time, &self.runs);
        let work = (&self.services[group], &self.workers[group]);
        let host = Host::new(&self.plan, group, listener, journal, both, work, self.hosts_so_far);
        self.hosts.push(host);
    }

    /// Participants take or skip a turn, in any order; time passes.
    fn round(&mut self, working: bool) {
        self.time.advance(Duration::from_nanos(1 + self.random.below(self.plan.tick as usize) as u64));
        let (hosts, callers, bad) = (self.hosts.len(), self.callers.len(), self.hostile_clients.len());
        let workers: Vec<_> = self
            .plan
            .groups
            .iter()
            .enumerate()
            .flat_map(|(group, plan)| (0..plan.workers).map(move |worker| (group, worker)))
            .collect();
        let others = hosts + callers + bad + 1;
        let all = others + workers.len() + self.later.len();
        self.stalled.resize(all, 0);
        if working && self.plan.stall != 0 && self.random.once_in(self.plan.stall) {
            let who = self.random.below(all);
            self.stalled[who] = self.random.below(STALL);
        }
        let first = self.random.below(all);
        for step in 0..all {
            let who = (first + step) % all;
            if self.stalled[who] > 0 && working {
                self.stalled[who] -= 1;
                continue;
            }
            if self.random.below(100) < self.plan.idle {
                continue;
            }
            if who < hosts {
                let host = &mut self.hosts[who];
                if working { host.work() } else { host.rest() }
            } else if who < hosts + callers {
                let caller = &mut self.callers[who - hosts];
                if working { caller.work() } else { caller.turn() }
            } else if who < hosts + callers + bad {
                self.hostile_clients[who - hosts - callers].turn();
            } else if let Some(&(group, worker)) = who.checked_sub(others).and_then(|at| workers.get(at)) {
                let worked = self.workers[group].turn(worker);
                self.journal.count("calls on workers", u64::from(worked));
            } else if let Some(later) = who.checked_sub(others + workers.len()).and_then(|at| self.later.get(at)) {
                if let Some(abandoned) = later.answer(&mut self.random) {
                    self.journal.count("calls answered later", 1);
                    self.journal.count("calls that nobody waited for when they were answered", abandoned);
                }
            } else if let Some(server) = &mut self.hostile_server {
                server.turn();
            }
        }
        self.close_retired_hosts();
    }

    /// Closes retired servers whose last connection has ended.
    fn close_retired_hosts(&mut self) {
        let mut index = 0;
        while index < self.hosts.len() {
            if self.hosts[index].retired && self.hosts[index].is_closed() && self.random.once_in(30) {
                let host = self.hosts.swap_remove(index);
                self.close_host(host);
            } else {
                index += 1;
            }
        }
    }

    fn close_host(&mut self, mut host: Host) {
        let group = host.group;
        // Late completions and the workers' calls are still outstanding.
        for turn in 0.. {
            host.turn();
            while self.later[group].answer(&mut self.random).is_some() {}
            if turn >= 80 && !host.at_workers() {
                break;
            }
            assert!(turn < 10_000, "calls stay with the workers: {}", host.waits_for());
            (0..self.plan.groups[group].workers).for_each(|worker| _ = self.workers[group].turn(worker));
        }
        host.check_leaks(self.plan.calm(), !self.plan.hostile_clients.is_empty());
        self.allowed_losses[group] += host.may_lose();
        self.pool_empty[group] += host.pool_empty();
        self.old_checkers.push(host.checker);
    }

    /// Runs rounds until a condition holds.
    fn until(&mut self, what: &str, mut so: impl FnMut(&mut Self) -> bool) {
        for _ in 0..MAX_ROUNDS {
            if so(self) {
                return;
            }
            self.round(false);
        }
        let callers: Vec<_> = self.callers.iter_mut().map(Caller::waits_for).collect();
        let hosts: Vec<_> = self.hosts.iter_mut().map(Host::waits_for).collect();
        panic!("stuck: {what}: {callers:?}, {hosts:?}");
    }

    /// Makes calls and injects faults.
    fn work(&mut self) {
        for _ in 0..MAX_ROUNDS {
            if self.callers.iter().all(|caller| caller.remaining() == 0) {
                break;
            }
            self.round(true);
            if self.plan.restart != 0 && self.random.once_in(self.plan.restart) {
                self.restart_one();
            }
        }
        self.callers.iter_mut().for_each(Caller::stop_hoarding);
        self.until("calls do not end", World::is_idle);
    }

    /// A client dies, or a server shard is replaced.
    fn restart_one(&mut self) {
        if self.random.once_in(4) && self.callers.len() > 1 {
            let at = self.random.below(self.callers.len());
            let caller = self.callers.swap_remove(at);
            self.count_losses(&caller);
            caller.close_now();
            return;
        }
        let at = self.random.below(self.hosts.len());
        let host = &mut self.hosts[at];
        if host.retired {
            return;
        }
        let group = host.group;
        if self.random.once_in(2) {
            host.drain();
        } else {
            host.abort();
        }
        self.drained[group] = true;
        self.open_host(group);
    }

    fn count_losses(&mut self, caller: &Caller) {
        for group in 0..self.plan.groups.len() {
            let loss = caller.losses()[group];
            self.lost[group] += loss.lost;
            self.missed[group] += loss.missed;
            self.turned_away[group] += caller.checker.turned_away[group];
        }
    }

    /// Checks that completed calls leave nothing behind, and that every connection takes one more call.
    fn check_idle_state(&mut self) {
        self.hostile_clients.clear();
        self.hostile_server = None;
        self.until("memory stays exposed", |world| {
            world.callers.iter_mut().all(Caller::is_quiet) && world.hosts.iter_mut().all(Host::is_quiet)
        });
        let mut all = false;
        while !all {
            all = true;
            self.callers.iter_mut().for_each(|caller| all &= caller.ping());
            self.hosts.iter_mut().for_each(|host| all &= host.ping());
            self.until("connections do not work any more", World::is_idle);
        }
    }

    /// No call is outstanding.
    fn is_idle(&mut self) -> bool {
        let callers = self.callers.iter().map(|caller| &caller.checker);
        callers.chain(self.hosts.iter().map(|host| &host.checker)).all(|checker| checker.under_way() == 0)
    }

    /// Closes everything. Checks that all memory is free and every lost connection has a cause.
    fn end(&mut self) {
        match self.plan.ending {
            ShutdownMode::Close => self.callers.iter_mut().for_each(Caller::close),
            ShutdownMode::Drain | ShutdownMode::Abort => {
                self.drained.fill(true);
                // No server will ever accept the connections that wait there.
                self.listeners.clear();
                for host in self.hosts.iter_mut().filter(|host| !host.retired) {
                    if self.plan.ending == ShutdownMode::Drain { host.drain() } else { host.abort() }
                }
            }
        }
        self.until("connections do not end", |world| {
            world.callers.iter().all(Caller::is_closed) && world.hosts.iter().all(Host::is_closed)
        });
        // Late completions are still outstanding.
        for _ in 0..80 {
            for later in &self.later {
                while later.answer(&mut self.random).is_some() {}
            }
            self.hosts.iter_mut().for_each(Host::turn);
            self.callers.iter_mut().for_each(Caller::turn);
        }
        for mut caller in std::mem::take(&mut self.callers) {
            caller.check_leaks(self.plan.calm());
            self.count_losses(&caller);
        }
        for host in std::mem::take(&mut self.hosts) {
            self.close_host(host);
        }
        self.old_checkers.iter_mut().for_each(CallChecker::check_claims);
        for group in 0..self.plan.groups.len() {
            // A closed server promised nothing to waiting connections.
            let missed = if self.drained[group] { 0 } else { self.missed[group] };
            let (lost, allowed_losses) = (self.lost[group] + missed, self.allowed_losses[group]);
            assert!(
                lost <= allowed_losses,
                "group {group}: {lost} connections were lost, {allowed_losses} were broken"
            );
            let (away, empty) = (self.turned_away[group], self.pool_empty[group]);
            let drained = self.drained[group];
            assert!(drained || away <= empty, "group {group}: {away} calls turned away, {empty} times no memory");
        }
    }
}
