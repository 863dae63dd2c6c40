//! Counters of a connection.

use super::RejectReason;

/// Declares the counters, one row per counter with its name in statistics.
macro_rules! counters {
    ($( $(#[$doc:meta])* $field:ident = $name:literal; )+) => {
        /// Counters of a connection; summed over connections by the shard.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(default))]
        #[non_exhaustive]
        pub struct Counters {
            $( $(#[$doc])* #[cfg_attr(feature = "serde", serde(rename = $name))] pub $field: u64, )+
        }

        impl Counters {
            /// Adds another connection's counts.
            pub fn add(&mut self, other: &Self) {
                $( self.$field += other.$field; )+
            }
        }
    };
}

counters! {
    /// Messages received.
    received = "messages_received";
    /// Messages that granted credits in addition to their payload.
    grants_piggybacked = "grants_piggybacked";
    /// Pure grants.
    grants_pure = "grants_pure";
    /// Messages sent.
    sent = "messages_sent";
    /// Messages received with MORE: not the last part of a message.
    continued_received = "continued_messages_received";
    /// Messages sent with MORE: not the last part of a message.
    continued_sent = "continued_messages_sent";
    /// Calls and replies received that have chunk lists beside their RPC message.
    chunked_received = "chunked_messages_received";
    /// Calls and replies sent that have chunk lists beside their RPC message.
    chunked_sent = "chunked_messages_sent";
    /// Calls and replies received whose RPC message is in a chunk.
    long_received = "long_messages_received";
    /// Calls and replies sent whose RPC message is in a chunk.
    long_sent = "long_messages_sent";
    /// Messages shorter than a fixed header.
    rejected_short = "messages_rejected_short";
    /// Messages answered with a transport error.
    rejected_answered = "messages_rejected_answered";
    /// Unusable messages without an answer: errors, and messages from a responder.
    rejected_dropped = "messages_rejected_dropped";
    /// Replies to calls that had ended.
    rejected_late = "messages_rejected_late";
    /// Replies to unknown calls.
    rejected_unknown_xid = "messages_rejected_unknown_xid";
    /// Messages that are invalid in their direction.
    rejected_unexpected = "messages_rejected_unexpected";
}

impl Counters {
    pub(super) fn count_rejection(&mut self, why: &RejectReason) {
        *match why {
            RejectReason::TooShort => &mut self.rejected_short,
            RejectReason::Answered(_) => &mut self.rejected_answered,
            RejectReason::Dropped(_) => &mut self.rejected_dropped,
            RejectReason::Late => &mut self.rejected_late,
            RejectReason::UnknownXid => &mut self.rejected_unknown_xid,
            RejectReason::Unexpected => &mut self.rejected_unexpected,
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
}
