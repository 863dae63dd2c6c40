//! Configuration of a connection.

use super::{CreditMode, Credits};
use crate::auth::AuthPolicy;
use crate::wire::private_data::PrivateData;
use crate::wire::properties::ReverseSupport;
use crate::wire::{Revision, Version};

with_defaults! {
    /// Configuration of a connection, and initial knowledge of its peer.
    ///
    /// Default: a version 2 client with fallback, 32 calls, and no calls served.
    #[derive(Clone, Debug)]
    pub struct ConnConfig {
        /// The version and credit mode that this end prefers. [`CreditMode::V1`]: version 1 only.
        pub credit_mode: CreditMode = CreditMode::V2Windowed,
        /// Whether to fall back to version 1 with a peer that lacks version 2.
        pub version_1: bool = true,
        /// Code points of version 2.
        pub revision: Revision = Revision::default(),
        /// Whether this end accepted the connection, so that the peer sends first.
        pub server: bool = false,
        /// Whether this end answers calls of the peer.
        pub accepts_calls: bool = false,
        /// The initial credit limit, in Receives. The Receive for a pure grant is not counted.
        pub credits: u32 = 32,
        /// Version 1 Receives for reverse-direction calls (client) or their replies (server).
        pub reverse_credits: u32 = 0,
        /// Maximum outstanding or queued calls of this end; 0 for none.
        pub max_calls: usize = 32,
        /// Calls in the reverse direction that this client accepts.
        pub reverse: ReverseSupport = ReverseSupport::None,
        /// Whether a pure grant waits until received messages have used half the credit limit since the last grant.
        /// Another message may carry the credits meanwhile. If false, each received message is reported immediately.
        pub coalesce_grants: bool = true,
        /// Start of the XIDs. It should differ from connection to connection.
        pub xid_seed: u32 = 0,
        /// Bytes of each Receive, announced as the Receive Buffer Size.
        pub receive_size: usize = 4096,
        /// Bytes of the longest Send.
        pub longest_send: usize = 4096,
        /// Whether characteristics may change while connected (version 2), if the peer agrees.
        pub optional_operations: bool = false,
        /// Receive sizes that the peer may request, minimum and maximum. The connection's owner then resizes the
        /// Receives.
        pub receive_sizes: Option<(usize, usize)> = None,
        /// Longest segment that this end handles, in bytes.
        pub segment_size: u32 = 1 << 20,
        /// Maximum segments in one header that this end handles.
        pub segment_count: u32 = 16,
        /// Longest RPC message to continue instead of using a chunk, in bytes.
        pub continue_up_to: usize = 16 << 10,
        /// Longest RPC message to reassemble from parts, in bytes.
        pub reassemble_up_to: usize = 1 << 20,
        /// Whether replies may use Send With Invalidate, in both directions.
        pub remote_invalidation: bool = true,
        /// Unsolicited messages allowed to the peer, per second and as a burst.
        pub unsolicited_per_second: u32 = 1000,
        /// Authentication of the peer.
        pub auth: AuthPolicy = AuthPolicy::Off,
        /// Whether most messages are decoded by fixed layout. Otherwise each is parsed as a whole, with equal results.
        pub decode_by_layout: bool = true,
        /// Private data of the peer's connect message (RFC 8797).
        pub private_data: Option<PrivateData> = None,
    }
}

impl ConnConfig {
    /// Receives to reserve for a connection with this configuration, in either version.
    pub fn reserve(&self) -> u32 {
        self.credits + 1 + if self.accepts_calls && self.max_calls > 0 { self.reverse_credits } else { 0 }
    }

    /// Whether changes of characteristics are offered. They are not offered in the older revision, because it has no
    /// continuation, so a queued message might not fit after the peer reduced its Receive size.
    pub(super) fn offers_changes(&self) -> bool {
        self.optional_operations && self.credit_mode != CreditMode::V1 && self.revision == Revision::Ietf00
    }

    /// The lowest and the highest version of this end.
    pub(super) fn versions(&self) -> (Version, Version) {
        let low = if self.version_1 { Version::V1 } else { Version::V2 };
        match self.credit_mode {
            CreditMode::V1 => (Version::V1, Version::V1),
            CreditMode::V2Windowed | CreditMode::V2Incremental => (low, Version::V2),
        }
    }

    pub(super) fn new_credits(&self, version: Version) -> Credits {
        let (inbound, outbound) =
            if self.server { (self.credits, self.reverse_credits) } else { (self.reverse_credits, self.credits) };
        match version {
            Version::V1 => Credits::version_1(
                if self.accepts_calls { inbound } else { 0 },
                if self.max_calls > 0 { outbound } else { 0 },
            ),
            // The windowed mode starts only after both ends have offered it.
            Version::V2 => Credits::new(CreditMode::V2Incremental, self.server, self.credits, self.coalesce_grants),
        }
    }
}
