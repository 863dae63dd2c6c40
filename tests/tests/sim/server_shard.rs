//! A simulated server shard: serves its clients (`service.rs`) and makes reverse calls (`call_checker.rs`).

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
use crate::service::Executions;

/// Added to a server's number, to tell its calls from those of clients, whose numbers are lower.
const SERVER_NUMBERS: u32 = 1000;

pub(crate) struct ServerShard {
    client: LocalClient<Device>,
    pub(crate) checker: CallChecker,
    plan: Rc<Plan>,
    pub(crate) group: usize,
    /// Connections, in the order of the checker's links.
    conns: Vec<ConnRef>,
    /// Whether the shard is closing, so that it accepts no more connections.
    pub(crate) is_retired: bool,
    /// Number of connections that this shard ends by closing, so that clients may lose them.
    allowed_losses: u64,
}

impl ServerShard {
    /// Opens a listening shard.
    pub(crate) fn new(
        plan: &Rc<Plan>,
        group: usize,
        listener: &MediumListener,
        journal: Journal,
        (time, executions): (&SimulatedTime, &Executions),
        (services, workers): (&Arc<Services>, &SimulatedWorkers),
        number: u32,
    ) -> Self {
        let crate::plan::GroupPlan { config, connect, software, chaos, workload, workers: count, .. } =
            &plan.groups[group];
        let seed = chaos.seed ^ u64::from(number) << 8;
        let chaos = rpcrdma::fabric::testing::chaos::ChaosConfig { seed, ..*chaos };
        let has_hostile_clients = plan.hostile_clients.contains(&group);
        let fabric = device(plan.kind, (config, software), chaos, &journal, None, (true, has_hostile_clients));
        let services = Some(Arc::clone(services));
        let client = ClientConfig { services, connect: connect.clone(), ..small_client(config.clone()) };
        let mut client = LocalClient::open(fabric, client).expect("a server");
        client.simulate(time);
        if *count > 0 {
            client.shard_mut().simulate_workers(workers);
        }
        client.shard_mut().listen(listener).expect("listening");
        let participant = SERVER_NUMBERS + number;
        let context = CheckerContext { plan, journal, time, executions, participant, workload: workload.clone() };
        let (checker, plan) = (CallChecker::new(context, connect), Rc::clone(plan));
        Self { client, checker, plan, group, conns: Vec::new(), is_retired: false, allowed_losses: 0 }
    }

    /// Takes a turn that also makes reverse calls.
    pub(crate) fn work(&mut self) {
        if !self.is_retired {
            self.checker.work(&mut self.client);
        }
        self.turn();
    }

    /// Takes a turn without new calls. Drops a reply, because clients' calls may wait for its memory.
    pub(crate) fn turn_without_calls(&mut self) {
        self.checker.release(1);
        self.turn();
    }

    pub(crate) fn turn(&mut self) {
        self.client.shard_mut().poll_once();
        let events = std::mem::take(self.client.shard_mut().events());
        for event in events {
            match event {
                ShardEvent::Open(conn) => self.add_link(conn),
                ShardEvent::Closed { conn, reason } => {
                    self.checker.journal.note(format_args!("{conn:?} has ended: {reason}"));
                    let link = self.conns.iter().position(|&known| known == conn);
                    if let Some(link) = link {
                        self.checker.links[link].has_ended = true;
                    }
                }
            }
        }
        let ended = std::mem::take(self.client.shard_mut().done());
        for done in ended {
            self.checker.check_completed(&mut self.client, done);
        }
    }

    /// Adds an accepted connection.
    fn add_link(&mut self, conn: ConnRef) {
        self.checker.journal.note(format_args!("{conn:?} is open"));
        let config = &self.plan.groups[self.group].config;
        self.conns.push(conn);
        self.checker.links.push(Link {
            connection: self.client.adopt(conn),
            group: Some(self.group),
            terms: Terms::reverse(&self.plan, config),
            hostile: self.plan.hostile_clients.contains(&self.group),
            closing: false,
            has_ended: false,
            was_open: true,
            has_succeeded: false,
            // If this direction has credits at all, the lowest credit limit leaves it one credit.
            guaranteed_calls: config.debug.reverse_credits.min(1) as usize,
            outstanding: 0,
            abandoned: 0,
        });
    }

    /// Starts a drain: refuses new calls and completes those in flight.
    pub(crate) fn drain(&mut self) {
        self.checker.journal.note(format_args!("drains"));
        self.checker.journal.count("servers drained", 1);
        self.retire();
        self.client.shard_mut().drain();
    }

    /// Closes immediately.
    pub(crate) fn abort(&mut self) {
        self.checker.journal.note(format_args!("aborts"));
        self.checker.journal.count("servers aborted", 1);
        self.retire();
        self.client.shard_mut().abort();
    }

    fn retire(&mut self) {
        self.is_retired = true;
        self.checker.links.iter_mut().for_each(|link| link.closing = true);
        self.allowed_losses += self.client.stats().connections;
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.client.shard().is_drained()
    }

    /// Whether the workers have any calls of this shard.
    pub(crate) fn has_calls_at_workers(&mut self) -> bool {
        self.client.stats().worker_queue_depth > 0
    }

    /// Maximum connections that clients may lose because of this shard.
    pub(crate) fn allowed_losses(&mut self) -> u64 {
        // In version 1, a call that the server sheds may end its connection.
        self.allowed_losses
            + self.client.shard().fabric().inner().broken().len() as u64
            + self.client.stats().calls_shed
    }

    /// Number of buffer allocations that failed.
    pub(crate) fn pool_empty(&mut self) -> u64 {
        self.client.stats().pool_empty
    }

    /// Checks that no memory, window or Receive is in use, and that the counters report no error.
    pub(crate) fn check_leaks(&mut self, calm: bool, hostile: bool) {
        self.checker.release(usize::MAX);
        let journal = self.checker.journal.clone();
        let participant = journal.participant();
        assert_eq!(self.checker.outstanding(), 0, "{participant}: {}", self.checker.waits_for());
        let stats = self.client.stats();
        assert_eq!(shard_leak(&stats), None, "{participant}");
        assert_eq!(stats.fabric.receiver_not_ready, 0, "{participant}: messages without a Receive");
        let probe = self.client.shard().fabric();
        assert_eq!(probe.windows(), 0, "{participant}: bound windows");
        if calm && !hostile {
            assert_eq!(stats.peer_faults, 0, "{participant}: faults of correct peers");
            assert_eq!(stats.fabric.access_refused + stats.fabric.peer_violations, 0, "{participant}");
        }
        let messages = stats.messages;
        if !hostile {
            if !self.is_retired {
                assert_eq!(probe.destroyed_unclosed(), 0, "{participant}: destroyed connections of correct peers");
            }
            let unknown = messages.rejected_unknown_xid.saturating_sub(self.checker.one_way_sent);
            let rejected = messages.rejected_short + messages.rejected_dropped + unknown + messages.rejected_unexpected;
            assert_eq!(rejected, 0, "{participant}: rejected messages of correct peers: {messages:?}");
        }
        journal.count("messages rejected", messages.rejected());
        journal.count("server pools empty", stats.pool_empty);
        journal.count("calls delayed by full worker queues", stats.backpressure);
        journal.count("peer faults", stats.peer_faults);
        journal.count("pure grants", messages.grants_pure);
        let receive_size = self.client.config().wire.receive_size;
        journal.count("shards that end with another Receive size", u64::from(stats.receive_size != receive_size));
        journal.count("late replies to reverse calls", messages.rejected_late);
        journal.count_chaos(&probe.inner().chaos_stats());
    }

    /// Describes what the server is waiting for.
    pub(crate) fn waits_for(&mut self) -> String {
        let stats = self.client.stats();
        format!("{}: {}, {}", self.checker.journal.participant(), self.checker.waits_for(), describe_receives(&stats))
    }

    /// Drops all kept replies. Returns true if no memory is exposed to clients.
    pub(crate) fn is_quiet(&mut self) -> bool {
        self.checker.release(usize::MAX);
        self.client.shard().fabric().windows() == 0 && self.client.stats().exposed_buffers == 0
    }

    /// Calls every client once, as many at a time as memory allows. Returns true once it has called all.
    pub(crate) fn ping(&mut self) -> bool {
        let makes_calls = !self.is_retired && self.plan.reverse != rpcrdma::wire::properties::ReverseSupport::None;
        !makes_calls || self.checker.ping(&mut self.client)
    }
}

/// Describes the connections and Receives of a shard.
pub(crate) fn describe_receives(stats: &ShardStats) -> String {
    let free: Vec<_> = stats.pool.classes.iter().map(|class| format!("{}x{}", class.free, class.size)).collect();
    format!(
        "{} connections, {} Receives of {} reserved, free {free:?}",
        stats.connections, stats.receives_posted, stats.receives_reserved
    )
}
