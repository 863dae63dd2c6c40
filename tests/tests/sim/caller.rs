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
use crate::host::receives;
use crate::journal::Journal;
use crate::plan::{self, Plan};
use crate::probe::Loss;
use crate::service::{Runs, services};

/// Maximum connections that a client opens in place of lost ones.
const RECONNECTS: usize = 6;

pub(crate) struct Caller {
    client: LocalClient<Device>,
    pub(crate) checker: CallChecker,
    plan: Rc<Plan>,
    index: usize,
    /// Addresses of the groups and of the hostile server.
    addresses: Rc<Addresses>,
    /// Prepared calls that are never made. They hold all buffers for `hoarding` turns.
    hoard: Vec<ClientCall>,
    hoarding: usize,
    reconnects: usize,
    /// Links that it opens late, and the number of its own rounds until then.
    late: (Vec<Option<usize>>, usize),
}

/// Listening addresses.
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
        (runs, later): (&Runs, &DeferredCalls),
    ) -> Self {
        let journal = journal.of(&format!("client{index}"));
        let plan::Caller { config, connect, software, chaos, links, late, habits, .. } = &plan.callers[index];
        let serves = plan.reverse != ReverseSupport::None;
        let fabric = device(plan.kind, (config, software), *chaos, &journal, Some(addresses), (serves, false));
        let services = serves.then(|| Arc::new(services(plan, runs, later)));
        // A client never grants 0 reverse credits.
        let reverse_credits = config.debug.reverse_credits.max(u32::from(serves));
        let shard = config.clone().with(|c| c.debug.reverse_credits = reverse_credits);
        let client = ClientConfig { services, connect: connect.clone(), ..small_client(shard) };
        let mut client = LocalClient::open(fabric, client).expect("a client");
        client.simulate(time);
        let context = CheckerContext { plan, journal, time, runs, who: index as u32, habits: habits.clone() };
        let mut caller = Self {
            client,
            checker: CallChecker::new(context, connect),
            plan: Rc::clone(plan),
            index,
            addresses: Rc::clone(addresses),
            hoard: Vec::new(),
            hoarding: 0,
            reconnects: 0,
            late: (Vec::new(), *late),
        };
        let now = if *late == 0 { links.len() } else { 1 };
        links[..now].iter().for_each(|&group| caller.connect(group));
        caller.late.0.extend_from_slice(&links[now..]);
        caller
    }

    fn own_plan(&self) -> &plan::Caller {
        &self.plan.callers[self.index]
    }

    fn connect(&mut self, group: Option<usize>) {
        let address = group.map_or(&self.addresses.hostile, |group| &self.addresses.groups[group]);
        match self.client.begin_connect(address) {
            Ok(connection) => {
                let config = &self.own_plan().config;
                let room = config.limits.max_calls.next_power_of_two();
                let terms = Terms::forward(&self.plan, self.own_plan(), group);
                self.checker.links.push(Link {
                    connection,
                    group,
                    terms,
                    hostile: group.is_none(),
                    closing: false,
                    over: false,
                    opened: false,
                    has_succeeded: true,
                    room,
                    under_way: 0,
                    abandoned: 0,
                });
            }
            Err(error) => {
                let error = error.to_string();
                let full = error.contains("receives for a connection");
                assert!(full || group.is_none(), "{}: {error}", self.checker.journal.who());
                self.checker.journal.count("connections not begun", 1);
            }
        }
    }

    /// A turn that also makes calls, cancels calls and drops replies.
    pub(crate) fn work(&mut self) {
        if let Some(left) = self.late.1.checked_sub(1) {
            self.late.1 = left;
        } else {
            std::mem::take(&mut self.late.0).into_iter().for_each(|group| self.connect(group));
        }
        self.checker.work(&mut self.client);
        self.hoard();
        let CallChecker { links, random, .. } = &mut self.checker;
        let lost = links.iter().filter(|link| link.over && !link.closing).count();
        if lost > self.reconnects && self.reconnects < RECONNECTS && random.once_in(10) {
            self.reconnects += 1;
            let over: Vec<_> = links.iter().filter(|link| link.over).map(|link| link.group).collect();
            let group = over[random.below(over.len())];
            self.connect(group);
        }
        self.turn();
    }

    /// Takes all message-sized buffers as they become free, or releases them.
    fn hoard(&mut self) {
        if self.hoarding == 0 {
            self.hoard.clear();
            let every = self.own_plan().hoard;
            if self.checker.random.once_in(every) {
                self.hoarding = self.checker.random.below(600);
                self.checker.journal.count("times that a client took all buffers", 1);
            }
            return;
        }
        self.hoarding -= 1;
        while let Ok(call) = self.client.prepare(ECHO, 600) {
            self.hoard.push(call);
        }
        let (promised, receives) = self.client.shard().fabric().promises();
        let few = promised > 0 && receives < promised + 64;
        self.checker.journal.count("turns with few Receives", u64::from(few));
    }

    /// Stops hoarding buffers.
    pub(crate) fn stop_hoarding(&mut self) {
        self.hoard.clear();
    }

    /// Calls not yet made.
    pub(crate) fn remaining(&self) -> usize {
        // Without a connection it can make none.
        let none = self.checker.links.iter().all(|link| link.over) && self.reconnects >= RECONNECTS;
        if none { 0 } else { self.checker.remaining() }
    }

    pub(crate) fn turn(&mut self) {
        let mut ended = Vec::new();
        self.client.poll(|done| ended.push(done));
        for link in &mut self.checker.links {
            link.opened |= self.client.is_established(link.connection);
        }
        for done in ended {
            self.checker.ended(&mut self.client, done);
        }
        for index in 0..self.checker.links.len() {
            self.check_closed(index);
        }
    }

    /// Checks that a closed connection has no calls left.
    fn check_closed(&mut self, index: usize) {
        let link = &mut self.checker.links[index];
        if link.over {
            return;
        }
        let Some(reason) = self.client.close_reason(link.connection) else { return };
        link.over = true;
        // Addresses differ from run to run.
        let reason = reason.to_string().split('"').step_by(2).collect::<String>();
        self.checker.journal.note(format_args!("link {index} has ended: {reason}"));
        assert_eq!(link.under_way, 0, "{}: a connection has ended, its calls have not", self.checker.journal.who());
    }

    /// No memory is kept or exposed, by the engine's count and by the probe's.
    pub(crate) fn is_quiet(&mut self) -> bool {
        self.checker.release(usize::MAX);
        self.client.shard().fabric().windows() == 0 && self.client.stats().exposed_buffers == 0
    }

    /// Calls once on every open connection, some at a time. Returns true when all have been called.
    pub(crate) fn ping(&mut self) -> bool {
        self.checker.ping(&mut self.client)
    }

    /// Closes every connection in order.
    pub(crate) fn close(&mut self) {
        for link in &mut self.checker.links {
            link.closing = true;
            self.client.begin_close(link.connection);
        }
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.checker.links.iter().all(|link| link.over)
    }

    /// By group: connections that others ended, once established or before.
    pub(crate) fn losses(&self) -> Vec<Loss> {
        let probe = self.client.shard().fabric();
        let broken = probe.inner().broken();
        (0..self.plan.groups.len()).map(|group| probe.losses(group, broken)).collect()
    }

    /// Closes the shard at once, with calls in flight. Every call still completes.
    pub(crate) fn close_now(self) {
        let Self { client, mut checker, .. } = self;
        checker.journal.note(format_args!("dies"));
        checker.journal.count("clients that died", 1);
        checker.check_all_ended(client.close(Duration::ZERO));
    }

    /// Checks that all memory, windows and counters are back to their initial state.
    pub(crate) fn check_leaks(&mut self, calm: bool) {
        self.checker.release(usize::MAX);
        self.checker.check_claims();
        let journal = &self.checker.journal;
        let who = journal.who();
        let stats = self.client.stats();
        let hostile = self.checker.links.iter().any(|link| link.hostile);
        assert_eq!(shard_leak(&stats), None, "{who}");
        // A hostile server may send more messages than there are Receives while the application holds the buffers.
        if !hostile {
            assert_eq!(stats.fabric.receiver_not_ready, 0, "{who}: a message met no Receive");
        }
        let probe = self.client.shard().fabric();
        assert_eq!(probe.windows(), 0, "{who}: windows are still bound");
        if calm && !hostile {
            assert_eq!(stats.peer_faults, 0, "{who}: a peer is said to have broken a rule");
            assert_eq!(stats.fabric.access_refused + stats.fabric.peer_violations, 0, "{who}");
        }
        let messages = stats.messages;
        if !hostile {
            assert_eq!(probe.destroyed_unclosed(), 0, "{who}: it ended connections that were in order");
            let unknown = messages.rejected_unknown_xid.saturating_sub(self.checker.one_way_sent);
            let odd = messages.rejected_short + messages.rejected_dropped + unknown + messages.rejected_unexpected;
            assert_eq!(odd, 0, "{who}: {messages:?}");
        }
        journal.count("late replies", messages.rejected_late);
        journal.count("pure grants", messages.grants_pure);
        let receive_size = self.client.config().wire.receive_size;
        journal.count("Receives that have another size", u64::from(stats.receive_size != receive_size));
        journal.count("calls sent again", stats.calls_retransmitted);
        journal.chaos(&probe.inner().chaos_stats());
    }

    /// Describes what the client is waiting for.
    pub(crate) fn waits_for(&mut self) -> String {
        let receives = receives(&self.client.stats());
        let windows = self.client.shard().fabric().windows();
        format!("{}: {}, {windows} windows, {receives}", self.checker.journal.who(), self.checker.waits_for())
    }
}
