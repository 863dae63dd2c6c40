//! Counters of a connection.

use super::Rejected;

/// Counters of a connection; summed over connections by the shard.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(default))]
#[non_exhaustive]
pub struct Counters {
    /// Messages received.
    #[cfg_attr(feature = "serde", serde(rename = "messages_received"))]
    pub received: u64,
    /// Messages that granted credits beside their payload.
    pub grants_piggybacked: u64,
    /// Pure grants.
    pub grants_pure: u64,
    /// Messages sent.
    #[cfg_attr(feature = "serde", serde(rename = "messages_sent"))]
    pub sent: u64,
    /// Messages received with MORE: not the last part of a message.
    #[cfg_attr(feature = "serde", serde(rename = "continued_messages_received"))]
    pub continued_received: u64,
    /// Messages sent with MORE: not the last part of a message.
    #[cfg_attr(feature = "serde", serde(rename = "continued_messages_sent"))]
    pub continued_sent: u64,
    /// Calls and replies received that have chunk lists beside their RPC message.
    #[cfg_attr(feature = "serde", serde(rename = "chunked_messages_received"))]
    pub chunked_received: u64,
    /// Calls and replies sent that have chunk lists beside their RPC message.
    #[cfg_attr(feature = "serde", serde(rename = "chunked_messages_sent"))]
    pub chunked_sent: u64,
    /// Calls and replies received whose RPC message is in a chunk.
    #[cfg_attr(feature = "serde", serde(rename = "long_messages_received"))]
    pub long_received: u64,
    /// Calls and replies sent whose RPC message is in a chunk.
    #[cfg_attr(feature = "serde", serde(rename = "long_messages_sent"))]
    pub long_sent: u64,
    /// Messages shorter than a fixed header.
    #[cfg_attr(feature = "serde", serde(rename = "messages_rejected_short"))]
    pub rejected_short: u64,
    /// Messages answered with a transport error.
    #[cfg_attr(feature = "serde", serde(rename = "messages_rejected_answered"))]
    pub rejected_answered: u64,
    /// Malformed messages to a requester.
    #[cfg_attr(feature = "serde", serde(rename = "messages_rejected_dropped"))]
    pub rejected_dropped: u64,
    /// Replies to calls that had ended.
    #[cfg_attr(feature = "serde", serde(rename = "messages_rejected_late"))]
    pub rejected_late: u64,
    /// Replies to unknown calls.
    #[cfg_attr(feature = "serde", serde(rename = "messages_rejected_unknown_xid"))]
    pub rejected_unknown_xid: u64,
    /// Messages that are invalid in their direction.
    #[cfg_attr(feature = "serde", serde(rename = "messages_rejected_unexpected"))]
    pub rejected_unexpected: u64,
}

impl Counters {
    pub(super) fn reject(&mut self, why: &Rejected) {
        *match why {
            Rejected::TooShort => &mut self.rejected_short,
            Rejected::Answered(_) => &mut self.rejected_answered,
            Rejected::Dropped(_) => &mut self.rejected_dropped,
            Rejected::Late => &mut self.rejected_late,
            Rejected::UnknownXid => &mut self.rejected_unknown_xid,
            Rejected::Unexpected => &mut self.rejected_unexpected,
        } += 1;
    }

    /// All messages that were dropped or answered with a transport error.
    pub fn rejected(&self) -> u64 {
        self.rejected_short
            + self.rejected_answered
            + self.rejected_dropped
            + self.rejected_late
            + self.rejected_unknown_xid
            + self.rejected_unexpected
    }

    /// Adds another connection's counts.
    pub fn add(&mut self, other: &Self) {
        self.received += other.received;
        self.sent += other.sent;
        self.grants_piggybacked += other.grants_piggybacked;
        self.grants_pure += other.grants_pure;
        self.continued_received += other.continued_received;
        self.continued_sent += other.continued_sent;
        self.chunked_received += other.chunked_received;
        self.chunked_sent += other.chunked_sent;
        self.long_received += other.long_received;
        self.long_sent += other.long_sent;
        self.rejected_short += other.rejected_short;
        self.rejected_answered += other.rejected_answered;
        self.rejected_dropped += other.rejected_dropped;
        self.rejected_late += other.rejected_late;
        self.rejected_unknown_xid += other.rejected_unknown_xid;
        self.rejected_unexpected += other.rejected_unexpected;
    }
}
