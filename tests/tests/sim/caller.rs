//! A simulated client shard: makes calls (`call_checker.rs`) and serves its servers' calls.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use rpcrdma::Address;
use rpcrdma::client::{ClientCall, ClientConfig, LocalClient};
use rpcrdma::shard::SimulatedTime;
use rpcrdma::wire::properties::ReverseSupport;
use rpcrdma_tests::{ECHO, With, shard_leak, small_client};

use crate::call_checker::{CallChecker, CheckerContext, Link};
use crate::deferred_calls::DeferredCalls;
use crate::device::{Device, device};
use crate::forms::Terms;
use crate::journal::Journal;
use crate::plan::{self, Plan};
use crate::probe::LossCounts;
use crate::server_shard::describe_receives;
use crate::service::{Executions, services};

/// Maximum number of connections that a client opens in place of lost ones.
const MAX_RECONNECTS: usize = 6;

pub(crate) struct Caller {
    client: LocalClient<Device>,
    pub(crate) checker: CallChecker,
    plan: Rc<Plan>,
    index: usize,
    /// Addresses to which the client connects.
    addresses: Rc<Addresses>,
    /// Prepared calls that are never made, and that hold all message buffers.
    hoard: Vec<ClientCall>,
    /// Remaining turns until the client drops the hoard.
    hoard_turns: usize,
    reconnects: usize,
    /// Groups to which the client connects late (`None`: the hostile server), and the remaining turns until then.
    late: (Vec<Option<usize>>, usize),
}

/// Listening addresses of the servers: one for each group of server shards, and the hostile server's.
#[derive(Debug)]
pub(crate) struct Addresses {
    pub(crate) groups: Vec<Address>,
    pub(crate) hostile: Address,
}

impl Caller {
    /// Opens the shard and starts to connect.
    pub(crate) fn new(
        plan: &Rc<Plan>,
        index: usize,
        addresses: &Rc<Addresses>,
        journal: &Journal,
        time: &SimulatedTime,
        (executions, deferred): (&Executions, &DeferredCalls),
    ) -> Self {
        let journal = journal.handle_for(&format!("client{index}"));
        let plan::CallerPlan { config, connect, software, chaos, links, late, workload, .. } = &plan.callers[index];
        let serves = plan.reverse != ReverseSupport::None;
        let fabric = device(plan.kind, (config, software), *chaos, &journal, Some(addresses), (serves, false));
        let services = serves.then(|| Arc::new(services(plan, executions, deferred)));
        // A client that serves calls grants at least one reverse credit.
        let reverse_credits = config.debug.reverse_credits.max(u32::from(serves));
        let shard = config.clone().with(|c| c.debug.reverse_credits = reverse_credits);
        let client = ClientConfig { services, connect: connect.clone(), ..small_client(shard) };
        let mut client = LocalClient::open(fabric, client).expect("a client");
        client.simulate(time);
        let context =
            CheckerContext { plan, journal, time, executions, participant: index as u32, workload: workload.clone() };
        let mut caller = Self {
            client,
            checker: CallChecker::new(context, connect),
            plan: Rc::clone(plan),
            index,
            addresses: Rc::clone(addresses),
            hoard: Vec::new(),
            hoard_turns: 0,
            reconnects: 0,
            late: (Vec::new(), *late),
        };
        let now = if *late == 0 { links.len() } else { 1 };
        links[..now].iter().for_each(|&group| caller.connect(group));
        caller.late.0.extend_from_slice(&links[now..]);
        caller
    }

    fn plan(&self) -> &plan::CallerPlan {
        &self.plan.callers[self.index]
    }

    /// Starts to connect to a group, or to the hostile server.
    fn connect(&mut self, group: Option<usize>) {
        let address = group.map_or(&self.addresses.hostile, |group| &self.addresses.groups[group]);
        match self.client.begin_connect(address) {
            Ok(connection) => {
                let config = &self.plan().config;
                let guaranteed_calls = config.limits.max_calls.next_power_of_two();
                let terms = Terms::forward(&self.plan, self.plan(), group);
                self.checker.links.push(Link {
                    connection,
                    group,
                    terms,
                    hostile: group.is_none(),
                    closing: false,
                    has_ended: false,
                    was_open: false,
                    has_succeeded: true,
                    guaranteed_calls,
                    outstanding: 0,
                    abandoned: 0,
                });
            }
            Err(error) => {
                let error = error.to_string();
                let lacks_receives = error.contains("receives for a connection");
                assert!(lacks_receives || group.is_none(), "{}: {error}", self.checker.journal.participant());
                self.checker.journal.count("connections refused locally", 1);
            }
        }
    }

    /// Takes a turn that also makes calls, cancels calls and drops replies.
    pub(crate) fn work(&mut self) {
        if let Some(turns) = self.late.1.checked_sub(1) {
            self.late.1 = turns;
        } else {
            std::mem::take(&mut self.late.0).into_iter().for_each(|group| self.connect(group));
        }
        self.checker.work(&mut self.client);
        self.hoard();
        let CallChecker { links, random, .. } = &mut self.checker;
        let lost = links.iter().filter(|link| link.has_ended && !link.closing).count();
        if lost > self.reconnects && self.reconnects < MAX_RECONNECTS && random.once_in(10) {
            self.reconnects += 1;
            let groups: Vec<_> = links.iter().filter(|link| link.has_ended).map(|link| link.group).collect();
            let group = groups[random.below(groups.len())];
            self.connect(group);
        }
        self.turn();
    }

    /// Takes all free message buffers for some turns, and then drops them.
    fn hoard(&mut self) {
        if self.hoard_turns == 0 {
            self.hoard.clear();
            let interval = self.plan().hoard;
            if self.checker.random.once_in(interval) {
                self.hoard_turns = self.checker.random.below(600);
                self.checker.journal.count("times that a client took all buffers", 1);
            }
            return;
        }
        self.hoard_turns -= 1;
        while let Ok(call) = self.client.prepare(ECHO, 600) {
            self.hoard.push(call);
        }
        let (promised, receives) = self.client.shard().fabric().promised_and_posted();
        let has_few = promised > 0 && receives < promised + 64;
        self.checker.journal.count("turns with few Receives", u64::from(has_few));
    }

    /// Drops the hoarded buffers.
    pub(crate) fn drop_hoard(&mut self) {
        self.hoard.clear();
    }

    /// Number of calls that the client can still make.
    pub(crate) fn remaining(&self) -> usize {
        let disconnected = self.checker.links.iter().all(|link| link.has_ended) && self.reconnects >= MAX_RECONNECTS;
        if disconnected { 0 } else { self.checker.remaining() }
    }

    pub(crate) fn turn(&mut self) {
        let mut ended = Vec::new();
        self.client.poll(|done| ended.push(done));
        for link in &mut self.checker.links {
            link.was_open |= self.client.is_established(link.connection);
        }
        for done in ended {
            self.checker.check_completed(&mut self.client, done);
        }
        for index in 0..self.checker.links.len() {
            self.check_closed(index);
        }
    }

    /// Checks that a closed connection has no calls left.
    fn check_closed(&mut self, index: usize) {
        let link = &mut self.checker.links[index];
        if link.has_ended {
            return;
        }
        let Some(reason) = self.client.close_reason(link.connection) else { return };
        link.has_ended = true;
        // Removes quoted addresses, which differ from run to run.
        let reason = reason.to_string().split('"').step_by(2).collect::<String>();
        self.checker.journal.note(format_args!("link {index} has ended: {reason}"));
        assert_eq!(
            link.outstanding,
            0,
            "{}: outstanding calls of a closed connection",
            self.checker.journal.participant()
        );
    }

    /// Drops all kept replies. Returns true if engine and probe count no exposed memory.
    pub(crate) fn is_quiet(&mut self) -> bool {
        self.checker.release(usize::MAX);
        self.client.shard().fabric().windows() == 0 && self.client.stats().exposed_buffers == 0
    }

    /// Calls once on every open connection, as many at a time as memory allows. Returns true once it has called all.
    pub(crate) fn ping(&mut self) -> bool {
        self.checker.ping(&mut self.client)
    }

    /// Starts the orderly close of every connection.
    pub(crate) fn close(&mut self) {
        for link in &mut self.checker.links {
            link.closing = true;
            self.client.begin_close(link.connection);
        }
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.checker.links.iter().all(|link| link.has_ended)
    }

    /// By group: connections that the peer or the network ended.
    pub(crate) fn losses(&self) -> Vec<LossCounts> {
        let probe = self.client.shard().fabric();
        let broken = probe.inner().broken();
        (0..self.plan.groups.len()).map(|group| probe.losses(group, broken)).collect()
    }

    /// Closes the shard immediately. Checks that every outstanding call completes.
    pub(crate) fn close_now(self) {
        let Self { client, mut checker, .. } = self;
        checker.journal.note(format_args!("dies"));
        checker.journal.count("clients that died", 1);
        checker.check_all_completed(client.close(Duration::ZERO));
    }

    /// Checks that no memory, window or Receive is in use, and that the counters report no error. In a `calm` run,
    /// delays are the only faults.
    pub(crate) fn check_leaks(&mut self, calm: bool) {
        self.checker.release(usize::MAX);
        self.checker.check_executions();
        let journal = &self.checker.journal;
        let participant = journal.participant();
        let stats = self.client.stats();
        let hostile = self.checker.links.iter().any(|link| link.hostile);
        assert_eq!(shard_leak(&stats), None, "{participant}");
        // While the client hoards all buffers, a hostile server may send more messages than there are Receives.
        if !hostile {
            assert_eq!(stats.fabric.receiver_not_ready, 0, "{participant}: messages without a Receive");
        }
        let probe = self.client.shard().fabric();
        assert_eq!(probe.windows(), 0, "{participant}: bound windows");
        if calm && !hostile {
            assert_eq!(stats.peer_faults, 0, "{participant}: faults of correct peers");
            assert_eq!(stats.fabric.access_refused + stats.fabric.peer_violations, 0, "{participant}");
        }
        let messages = stats.messages;
        if !hostile {
            assert_eq!(probe.destroyed_unclosed(), 0, "{participant}: destroyed connections of correct peers");
            let unknown = messages.rejected_unknown_xid.saturating_sub(self.checker.one_way_sent);
            let rejected = messages.rejected_short + messages.rejected_dropped + unknown + messages.rejected_unexpected;
            assert_eq!(rejected, 0, "{participant}: rejected messages of correct peers: {messages:?}");
        }
        journal.count("late replies", messages.rejected_late);
        journal.count("pure grants", messages.grants_pure);
        let receive_size = self.client.config().wire.receive_size;
        journal.count("shards that end with another Receive size", u64::from(stats.receive_size != receive_size));
        journal.count("calls retransmitted", stats.calls_retransmitted);
        journal.count_chaos(&probe.inner().chaos_stats());
    }

    /// Describes what the client is waiting for.
    pub(crate) fn waits_for(&mut self) -> String {
        let receives = describe_receives(&self.client.stats());
        let windows = self.client.shard().fabric().windows();
        format!("{}: {}, {windows} windows, {receives}", self.checker.journal.participant(), self.checker.waits_for())
    }
}
