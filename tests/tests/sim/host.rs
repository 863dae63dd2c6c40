//! Server shards of one address: they serve and make reverse calls (`call_checker.rs`).

use std::rc::Rc;
use std::sync::Arc;

use rpcrdma::Services;
use rpcrdma::client::{ClientConfig, LocalClient};
use rpcrdma::shard::{ConnRef, ShardEvent, SimulatedTime, SimulatedWorkers};
use rpcrdma::stats::ShardStats;
use rpcrdma_tests::{shard_leak, small_client};

use crate::call_checker::{CallChecker, CheckerContext, Link};
use crate::device::{Device, MediumListener, device};
use crate::forms::Terms;
use crate::journal::Journal;
use crate::plan::Plan;
use crate::service::Runs;

/// First name of the servers' calls.
const FIRST_NAME: u32 = 1000;

pub(crate) struct Host {
    client: LocalClient<Device>,
    pub(crate) checker: CallChecker,
    plan: Rc<Plan>,
    pub(crate) group: usize,
    /// Connections, in the order of the checker's links.
    conns: Vec<ConnRef>,
    /// It accepts no more connections. Another shard has taken its place.
    pub(crate) retired: bool,
    /// Connections that it ended itself, and whose loss is allowed.
    allowed_losses: u64,
}

impl Host {
    /// Opens a listening shard.
    pub(crate) fn new(
        plan: &Rc<Plan>,
        group: usize,
        listener: &MediumListener,
        journal: Journal,
        (time, runs): (&SimulatedTime, &Runs),
        (services, workers): (&Arc<Services>, &SimulatedWorkers),
        generation: u32,
    ) -> Self {
        let crate::plan::Group { config, connect, software, chaos, habits, workers: count, .. } = &plan.groups[group];
        let seed = chaos.seed ^ u64::from(generation) << 8;
        let chaos = rpcrdma::fabric::testing::chaos::ChaosConfig { seed, ..*chaos };
        let strangers = plan.hostile_clients.contains(&group);
        let fabric = device(plan.kind, (config, software), chaos, &journal, None, (true, strangers));
        let services = Some(Arc::clone(services));
        let client = ClientConfig { services, connect: connect.clone(), ..small_client(config.clone()) };
        let mut client = LocalClient::open(fabric, client).expect("a server");
        client.simulate(time);
        if *count > 0 {
            client.shard_mut().simulate_workers(workers);
        }
        client.shard_mut().listen(listener).expect("listening");
        let who = FIRST_NAME + generation;
        let context = CheckerContext { plan, journal, time, runs, who, habits: habits.clone() };
        let (checker, plan) = (CallChecker::new(context, connect), Rc::clone(plan));
        Self { client, checker, plan, group, conns: Vec::new(), retired: false, allowed_losses: 0 }
    }

    /// A turn that also makes reverse calls.
    pub(crate) fn work(&mut self) {
        if !self.retired {
            self.checker.work(&mut self.client);
        }
        self.turn();
    }

    /// A turn without new calls that drops a reply. Clients' calls may wait for its memory.
    pub(crate) fn rest(&mut self) {
        self.checker.release(1);
        self.turn();
    }

    pub(crate) fn turn(&mut self) {
        self.client.shard_mut().poll_once();
        let events = std::mem::take(self.client.shard_mut().events());
        for event in events {
            match event {
                ShardEvent::Open(conn) => self.opened(conn),
                ShardEvent::Closed { conn, reason } => {
                    self.checker.journal.note(format_args!("{conn:?} has ended: {reason}"));
                    let link = self.conns.iter().position(|&known| known == conn);
                    if let Some(link) = link {
                        self.checker.links[link].over = true;
                    }
                }
            }
        }
        let ended = std::mem::take(self.client.shard_mut().done());
        for done in ended {
            self.checker.ended(&mut self.client, done);
        }
    }

    fn opened(&mut self, conn: ConnRef) {
        self.checker.journal.note(format_args!("{conn:?} is open"));
        let config = &self.plan.groups[self.group].config;
        self.conns.push(conn);
        self.checker.links.push(Link {
            connection: self.client.adopt(conn),
            group: Some(self.group),
            terms: Terms::back(&self.plan, config),
            hostile: self.plan.hostile_clients.contains(&self.group),
            closing: false,
            over: false,
            opened: true,
            has_succeeded: false,
            // The smallest share that the lowest credit limit leaves to this direction.
            room: config.debug.reverse_credits.min(1) as usize,
            under_way: 0,
            abandoned: 0,
        });
    }

    /// Refuses new calls and completes those in flight.
    pub(crate) fn drain(&mut self) {
        self.checker.journal.note(format_args!("drains"));
        self.checker.journal.count("servers drained", 1);
        self.retire();
        self.client.shard_mut().drain();
    }

    /// Closes at once.
    pub(crate) fn abort(&mut self) {
        self.checker.journal.note(format_args!("aborts"));
        self.checker.journal.count("servers aborted", 1);
        self.retire();
        self.client.shard_mut().abort();
    }

    fn retire(&mut self) {
        self.retired = true;
        self.checker.links.iter_mut().for_each(|link| link.closing = true);
        self.allowed_losses += self.client.stats().connections;
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.client.shard().is_drained()
    }

    /// Some calls are with the workers.
    pub(crate) fn at_workers(&mut self) -> bool {
        self.client.stats().worker_queue_depth > 0
    }

    /// Connections that clients may lose because of this shard.
    pub(crate) fn may_lose(&mut self) -> u64 {
        // Includes version 1 connections for whose calls it had no memory.
        self.allowed_losses
            + self.client.shard().fabric().inner().broken().len() as u64
            + self.client.stats().calls_shed
    }

    /// Lower bound of the calls that found no memory.
    pub(crate) fn pool_empty(&mut self) -> u64 {
        self.client.stats().pool_empty
    }

    /// Checks that all memory, windows and counters are back to their initial state.
    pub(crate) fn check_leaks(&mut self, calm: bool, hostile: bool) {
        self.checker.release(usize::MAX);
        let journal = self.checker.journal.clone();
        let who = journal.who();
        assert_eq!(self.checker.under_way(), 0, "{who}: {}", self.checker.waits_for());
        let stats = self.client.stats();
        assert_eq!(shard_leak(&stats), None, "{who}");
        assert_eq!(stats.fabric.receiver_not_ready, 0, "{who}: a message met no Receive");
        let probe = self.client.shard().fabric();
        assert_eq!(probe.windows(), 0, "{who}: windows are still bound");
        if calm && !hostile {
            assert_eq!(stats.peer_faults, 0, "{who}: a peer is said to have broken a rule");
            assert_eq!(stats.fabric.access_refused + stats.fabric.peer_violations, 0, "{who}");
        }
        let messages = stats.messages;
        if !hostile {
            if !self.retired {
                assert_eq!(probe.destroyed_unclosed(), 0, "{who}: it ended connections that were in order");
            }
            let unknown = messages.rejected_unknown_xid.saturating_sub(self.checker.one_way_sent);
            let odd = messages.rejected_short + messages.rejected_dropped + unknown + messages.rejected_unexpected;
            assert_eq!(odd, 0, "{who}: {messages:?}");
        }
        journal.count("messages that were rejected", messages.rejected());
        journal.count("server pools dry", stats.pool_empty);
        journal.count("calls that full workers held back", stats.backpressure);
        journal.count("peer faults", stats.peer_faults);
        journal.count("pure grants", messages.grants_pure);
        let receive_size = self.client.config().wire.receive_size;
        journal.count("Receives that have another size", u64::from(stats.receive_size != receive_size));
        journal.count("late replies to servers", messages.rejected_late);
        journal.chaos(&probe.inner().chaos_stats());
    }

    /// Describes what the server is waiting for.
    pub(crate) fn waits_for(&mut self) -> String {
        let stats = self.client.stats();
        format!("{}: {}, {}", self.checker.journal.who(), self.checker.waits_for(), receives(&stats))
    }

    /// No memory is exposed to clients.
    pub(crate) fn is_quiet(&mut self) -> bool {
        self.checker.release(usize::MAX);
        self.client.shard().fabric().windows() == 0 && self.client.stats().exposed_buffers == 0
    }

    /// Calls every client once, some at a time. Returns true when all have been called.
    pub(crate) fn ping(&mut self) -> bool {
        let calls = !self.retired && self.plan.reverse != rpcrdma::wire::properties::ReverseSupport::None;
        !calls || self.checker.ping(&mut self.client)
    }
}

/// Describes the connections and Receives of a shard.
pub(crate) fn receives(stats: &ShardStats) -> String {
    let free: Vec<_> = stats.pool.classes.iter().map(|class| format!("{}x{}", class.free, class.size)).collect();
    format!(
        "{} connections, {} Receives of {} reserved, free {free:?}",
        stats.connections, stats.receives_posted, stats.receives_reserved
    )
}
