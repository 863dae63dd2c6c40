//! What a connection is made with.

use super::{Credits, Scheme};
use crate::auth::AuthPolicy;
use crate::wire::private_data::PrivateData;
use crate::wire::properties::ReverseSupport;
use crate::wire::{Revision, Version};

/// What a connection is configured to be, and what is known of its peer when it is made.
#[derive(Clone, Debug)]
pub struct ConnConfig {
    /// The version and credit scheme that this end prefers. [`Scheme::V1`]: version 1 only.
    pub scheme: Scheme,
    /// Goes on in version 1 with a peer that has no version 2.
    pub version_1: bool,
    /// Code points of version 2.
    pub revision: Revision,
    /// This end has accepted the connection: the peer speaks first.
    pub server: bool,
    /// This end answers calls of the peer.
    pub takes_calls: bool,
    /// Receives that are kept for this connection, beside one for a pure grant: the credit limit that it
    /// starts with.
    pub credits: u32,
    /// Receives of version 1 for calls in the reverse direction (client) or for the replies to them
    /// (server).
    pub reverse_credits: u32,
    /// Calls of this end that may be outstanding or queued; 0 for none.
    pub max_calls: usize,
    /// Which calls in the reverse direction this end takes, as a client.
    pub reverse: ReverseSupport,
    /// Pure grants wait for half the credit limit, and for nothing else to carry them; without, each message
    /// is reported at once.
    pub coalesce_grants: bool,
    /// Where XIDs start: differs from connection to connection.
    pub xid_seed: u32,
    /// Bytes of each Receive: what the peer is told as the Receive Buffer Size.
    pub receive_size: usize,
    /// Bytes of the longest Send.
    pub longest_send: usize,
    /// Characteristics may change while connected, if the peer offers that too (version 2).
    pub optional_operations: bool,
    /// Sizes of Receives that the peer may ask for, least and most; the owner then brings them about.
    pub receive_sizes: Option<(usize, usize)>,
    /// Longest segment that this end handles, in bytes.
    pub segment_size: u32,
    /// Most segments in one header that this end handles.
    pub segment_count: u32,
    /// RPC messages up to this length are continued rather than sent as a chunk, in bytes.
    pub continue_up_to: usize,
    /// Longest RPC message that is put together from parts, in bytes.
    pub reassemble_up_to: usize,
    /// Replies may come, and go, as Send With Invalidate.
    pub remote_invalidation: bool,
    /// Messages of no use that the peer may send in a second, and at once.
    pub useless_per_second: u32,
    /// Who the peer may be.
    pub auth: AuthPolicy,
    /// What most messages are is told by their layout; without, each is checked as a whole, which comes to
    /// the same.
    pub decode_by_layout: bool,
    /// What the peer's connect message said (RFC 8797).
    pub private_data: Option<PrivateData>,
}

impl Default for ConnConfig {
    /// A client of version 2 that takes no calls, has up to 32 under way, and gives way to version 1.
    fn default() -> Self {
        Self {
            scheme: Scheme::V2Windowed,
            version_1: true,
            revision: Revision::default(),
            server: false,
            takes_calls: false,
            credits: 32,
            reverse_credits: 0,
            max_calls: 32,
            reverse: ReverseSupport::None,
            coalesce_grants: true,
            xid_seed: 0,
            receive_size: 4096,
            longest_send: 4096,
            optional_operations: false,
            receive_sizes: None,
            segment_size: 1 << 20,
            segment_count: 16,
            continue_up_to: 16 << 10,
            reassemble_up_to: 1 << 20,
            remote_invalidation: true,
            useless_per_second: 1000,
            auth: AuthPolicy::Off,
            decode_by_layout: true,
            private_data: None,
        }
    }
}

impl ConnConfig {
    /// Receives that must be in reserve for such a connection, whatever its version turns out to be.
    pub fn reserve(&self) -> u32 {
        self.credits + 1 + if self.takes_calls && self.max_calls > 0 { self.reverse_credits } else { 0 }
    }

    /// Changes of characteristics are offered. The older revision has no continuation, without which a
    /// message that waits could not get through when the peer's Receives shrink.
    pub(super) fn optional(&self) -> bool {
        self.optional_operations && self.scheme != Scheme::V1 && self.revision == Revision::Ietf00
    }

    pub(super) fn new_credits(&self, version: Version) -> Credits {
        let (taken, made) =
            if self.server { (self.credits, self.reverse_credits) } else { (self.reverse_credits, self.credits) };
        match version {
            Version::V1 => {
                Credits::version_1(if self.takes_calls { taken } else { 0 }, if self.max_calls > 0 { made } else { 0 })
            }
            // Windowed only when both ends have said so.
            Version::V2 => Credits::new(Scheme::V2Incremental, self.server, self.credits, self.coalesce_grants),
        }
    }
}
