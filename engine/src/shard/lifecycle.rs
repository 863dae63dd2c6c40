//! Transitions of a shard's connections, and events for its owner.

use std::collections::VecDeque;
use std::hash::{BuildHasher as _, Hasher as _, RandomState};

use super::Notice;
use super::close_reason::CloseReason;
use crate::fabric::{QpId, RequestId};

/// Time for connect requests in a turn, in nanoseconds. One accept takes longer; it is enough for several refusals.
const ANSWERS: u64 = 25_000;
/// Divisor of a long turn's time, for the next turn.
const ANSWERS_OF_TURN: u64 = 16;

/// A connect request: its name, private data, and peer.
pub(super) type Request = (RequestId, Vec<u8>, String);

#[derive(Debug, Default)]
pub(super) struct Lifecycle {
    /// Events of connections that were not taken yet.
    pub(super) notices: Vec<Notice>,
    /// Clients that wait for the answer to their first message.
    pub(super) negotiating: Vec<QpId>,
    /// Connect requests. A turn limits the time for them, as served calls wait meanwhile.
    pub(super) requests: VecDeque<Request>,
    /// Time at which a turn ran out of time for them, in nanoseconds.
    pub(super) interrupted: Option<u64>,
    /// Accepted connections in setup.
    pub(super) arriving: Vec<QpId>,
    /// Connections closed by their peers: they end in the next control-plane run.
    pub(super) disconnected: Vec<(QpId, CloseReason)>,
    /// Connecting and reconnecting have stopped.
    pub(super) draining: bool,
    /// Time of the last eviction for another host, in nanoseconds.
    pub(super) ended_for_others: Option<u64>,
    /// First XID of the next connection. Random at first: a duplicate request cache, also of another shard or process,
    /// takes the same call of the same client with the same XID for a retransmission.
    pub(super) seed: u32,
}

impl Lifecycle {
    pub(super) fn new() -> Self {
        Self { seed: RandomState::new().build_hasher().finish() as u32, ..Self::default() }
    }

    /// First XID of one more connection.
    pub(super) fn next_seed(&mut self) -> u32 {
        self.seed = self.seed.wrapping_mul(0x0019_660D).wrapping_add(0x3C6E_F35F);
        self.seed
    }

    /// Removes a client that negotiated.
    pub(super) fn negotiates_no_more(&mut self, qp: QpId) {
        remove(&mut self.negotiating, qp);
    }

    /// Deadline for requests in a turn that starts with them now, in nanoseconds. If handlers make turns long, it is a
    /// part of the last turn's length: otherwise each request would wait for a turn.
    pub(super) fn answers_until(&mut self, now: u64) -> u64 {
        let turn = self.interrupted.take().map_or(0, |then| now.saturating_sub(then));
        now.saturating_add(ANSWERS.max(turn / ANSWERS_OF_TURN))
    }

    /// Removes one that is set up or closed.
    pub(super) fn arrives_no_more(&mut self, qp: QpId) {
        remove(&mut self.arriving, qp);
    }

    /// Reason of a connection that ends in the next control-plane run, if any.
    pub(super) fn why_disconnected(&self, qp: QpId) -> Option<&CloseReason> {
        self.disconnected.iter().find_map(|(id, reason)| (*id == qp).then_some(reason))
    }
}

/// Removes it; keeps the order of arrival.
fn remove(list: &mut Vec<QpId>, qp: QpId) {
    if let Some(at) = list.iter().position(|&one| one == qp) {
        list.remove(at);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shard::ConnRef;
    use crate::shard::close_reason::LocalClose;

    fn qp(slot: u32) -> QpId {
        QpId { slot, generation: 0 }
    }

    #[test]
    fn shards_of_a_process_have_xids_of_their_own() {
        let xids: std::collections::BTreeSet<_> = (0..8).map(|_| Lifecycle::new().next_seed()).collect();
        assert_eq!(xids.len(), 8);
    }

    #[test]
    fn negotiating_and_arriving_connections_are_known_by_name() {
        let mut life = Lifecycle::new();
        (0..3).for_each(|slot| life.negotiating.push(qp(slot)));
        life.arriving.push(qp(7));
        life.negotiates_no_more(qp(1));
        assert_eq!((&life.negotiating[..], &life.arriving[..]), (&[qp(0), qp(2)][..], &[qp(7)][..]));
        life.negotiates_no_more(qp(1));
        life.arrives_no_more(qp(7));
        assert_eq!((life.negotiating.len(), life.arriving.len()), (2, 0), "who is gone is gone once");
    }

    #[test]
    fn connect_requests_have_a_part_of_a_long_turn_and_else_a_short_time() {
        let mut life = Lifecycle::new();
        assert_eq!(life.answers_until(64_000_000), 64_025_000, "the first");
        life.interrupted = Some(64_100_000);
        assert_eq!(life.answers_until(64_200_000), 64_225_000, "a short turn");
        life.interrupted = Some(64_300_000);
        assert_eq!(life.answers_until(128_300_000), 132_300_000, "a long one");
        assert_eq!(life.answers_until(900_000_000), 900_025_000, "nothing waited");
    }

    #[test]
    fn a_connection_that_ends_has_its_own_reason() {
        let mut life = Lifecycle::new();
        life.disconnected.push((qp(1), LocalClose::Stopped.into()));
        assert!(life.why_disconnected(qp(0)).is_none());
        assert_eq!(life.why_disconnected(qp(1)), Some(&LocalClose::Stopped.into()));
        assert_eq!(std::mem::take(&mut life.disconnected), [(qp(1), LocalClose::Stopped.into())]);
        assert!(life.why_disconnected(qp(1)).is_none());
    }

    #[test]
    fn notices_come_in_order() {
        let mut life = Lifecycle::new();
        life.notices.push(Notice::Open(ConnRef::NONE));
        life.notices.push(Notice::Closed { conn: ConnRef::NONE, reason: LocalClose::Requested.into() });
        assert!(matches!(life.notices[..], [Notice::Open(_), Notice::Closed { .. }]));
    }

    #[test]
    fn no_two_connections_start_at_the_same_xid_and_a_fixed_seed_repeats() {
        let (mut one, mut other) = (Lifecycle::new(), Lifecycle::new());
        one.seed = 1;
        other.seed = 1;
        let seeds: Vec<_> = (0..100).map(|_| one.next_seed()).collect();
        assert!(seeds.iter().all(|&seed| other.next_seed() == seed));
        let distinct: std::collections::HashSet<_> = seeds.iter().collect();
        assert_eq!(distinct.len(), seeds.len());
    }
}
