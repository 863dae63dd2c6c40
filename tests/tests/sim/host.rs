//! The server shards of one address.

use std::rc::Rc;
use std::sync::Arc;

use rpcrdma::Address;
use rpcrdma::fabric::Fabric;
use rpcrdma::fabric::software::{SoftwareFabric, SoftwareListener};
use rpcrdma::shard::{Notice, Shard, SimulatedTime};
use rpcrdma::stats::ShardStats;
use rpcrdma_tests::{services_for, shard_leak};

use crate::journal::Journal;
use crate::plan::Plan;
use crate::world::{Device, device, fabric_address};

/// Why a shard ends a connection of its own when its pool is dry.
pub(crate) const NO_BUFFER: &str = "no buffer for a control message";

/// One server shard.
pub(crate) struct Host {
    shard: Shard<Device>,
    journal: Journal,
    pub(crate) group: usize,
    /// It takes no more connections: another one has taken its place.
    pub(crate) retired: bool,
    /// Connections that it may lose: it has broken them itself.
    pub(crate) forgiven: u64,
}

impl Host {
    /// Opens a shard that listens.
    pub(crate) fn new(
        plan: &Rc<Plan>,
        group: usize,
        listener: &SoftwareListener,
        journal: Journal,
        time: &SimulatedTime,
        generation: u64,
    ) -> Self {
        let crate::plan::Group { config, software, chaos, .. } = &plan.groups[group];
        let chaos = rpcrdma::fabric::chaos::ChaosConfig { seed: chaos.seed ^ generation << 8, ..*chaos };
        let fabric = device(config, software, chaos, &journal, None);
        let services = Some(Arc::new(services_for(plan.inline)));
        let mut shard = Shard::open(fabric, config.clone(), services).expect("a server");
        shard.simulate(time);
        shard.listen(listener).expect("listening");
        Self { shard, journal, group, retired: false, forgiven: 0 }
    }

    /// One turn.
    pub(crate) fn turn(&mut self) {
        self.shard.poll_once();
        for notice in self.shard.take_notices() {
            match notice {
                Notice::Open(conn) => self.journal.note(format_args!("{conn:?} is open")),
                Notice::Closed { conn, reason } => {
                    self.journal.note(format_args!("{conn:?} is over: {reason}"));
                    self.forgiven += u64::from(reason.contains(NO_BUFFER));
                }
            }
        }
    }

    /// Takes nothing new, and ends what it has begun.
    pub(crate) fn drain(&mut self) {
        self.journal.note(format_args!("drains"));
        self.journal.count("servers drained", 1);
        self.retire();
        self.shard.drain();
    }

    /// Ends at once.
    pub(crate) fn abort(&mut self) {
        self.journal.note(format_args!("aborts"));
        self.journal.count("servers aborted", 1);
        self.retire();
        self.shard.abort();
    }

    fn retire(&mut self) {
        self.retired = true;
        self.forgiven += self.shard.stats().connections;
    }

    /// No connection is left.
    pub(crate) fn is_closed(&self) -> bool {
        self.shard.is_drained()
    }

    /// Connections that others may lose by its doing.
    pub(crate) fn may_lose(&self) -> u64 {
        self.forgiven + self.shard.fabric().inner().broken().len() as u64
    }

    /// Times that it had no memory for a call, at least.
    pub(crate) fn pool_empty(&mut self) -> u64 {
        self.shard.stats().pool_empty
    }

    /// Everything is where it was.
    pub(crate) fn check_balance(&mut self, calm: bool, hostile: bool) {
        let who = self.journal.who();
        let stats = self.shard.stats();
        assert_eq!(shard_leak(&stats), None, "{who}");
        assert_eq!(stats.fabric.receiver_not_ready, 0, "{who}: a message met no Receive");
        let fabric = self.shard.fabric();
        assert_eq!(fabric.windows(), 0, "{who}: windows are still bound");
        if calm && !hostile {
            assert_eq!(stats.peer_faults, 0, "{who}: a peer is said to have broken a rule");
            assert_eq!(stats.fabric.access_refused + stats.fabric.peer_violations, 0, "{who}");
        }
        let messages = stats.messages;
        if !hostile {
            let odd = messages.rejected_short + messages.rejected_dropped + messages.rejected_unexpected;
            assert_eq!(odd, 0, "{who}: {messages:?}");
        }
        self.journal.count("messages that were rejected", messages.rejected());
        self.journal.count("server pools dry", stats.pool_empty);
        self.journal.count("peer faults", stats.peer_faults);
        self.journal.count("pure grants", messages.grants_pure);
        self.journal.chaos(&fabric.inner().chaos_stats());
    }

    /// What it waits for, in words.
    pub(crate) fn waits_for(&mut self) -> String {
        let stats = self.shard.stats();
        format!("{}: {}", self.journal.who(), receives(&stats))
    }
}

/// The connections and the Receives of a shard, in words.
pub(crate) fn receives(stats: &ShardStats) -> String {
    let free: Vec<_> =
        stats.pool.classes.iter().map(|class| format!("{}x{}", class.free, class.size)).collect();
    format!(
        "{} connections, {} Receives of {} promised, free {free:?}",
        stats.connections, stats.receives_posted, stats.receives_promised
    )
}

/// Binds an address.
pub(crate) fn listener(address: &Address) -> SoftwareListener {
    SoftwareFabric::bind(&fabric_address(address)).expect("a free address")
}
