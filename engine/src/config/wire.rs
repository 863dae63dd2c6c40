//! What goes over the wire, and in which form.

use super::{ConfigError, check};
use crate::auth::AuthPolicy;
use crate::proto::CreditMode;
use crate::wire::Revision;
use crate::wire::properties::ReverseSupport;

/// Protocol version, form of messages, and authentication of hosts. Both ends must agree on `revision`; versions,
/// credits and thresholds are negotiated.
///
/// | wrong | effect |
/// |---|---|
/// | `revision` differs between the ends | messages of version 2 are malformed to the peer |
/// | `credit_mode` `V1`, or `version_1` off, at one end alone | peers without a version in common do not connect |
/// | `receive_size` too small | longer messages go as chunks, which cost a round trip or more |
/// | `receive_size` too large | `memory.receives` and `memory.message_buffers` times as many bytes |
/// | `reassemble_up_to` too small | longer calls are answered with SYSTEM_ERR |
/// | `resize_on_request` with peers that are not trusted | one of them changes the memory that all get |
#[derive(Clone, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(default, deny_unknown_fields))]
pub struct WireConfig {
    /// Protocol version and credit accounting that this end prefers. Default: version 2, windowed.
    pub credit_mode: CreditMode,
    /// Goes on in version 1 with a peer that does not speak version 2; a server also takes peers that start in it.
    /// Default true.
    pub version_1: bool,
    /// Code points of version 2. Default: draft-ietf-nfsv4-rpcrdma-version-two-00.
    pub revision: Revision,
    /// Size of each receive, and the longest Send, in bytes; the inline thresholds are the least of both ends. 1024 to
    /// 1048576, a multiple of 4; at least 4096 in version 2. Default 4096.
    #[cfg_attr(feature = "serde", serde(with = "crate::fabric::units::bytes"))]
    pub receive_size: usize,
    /// The most that [`receive_size`](Self::receive_size) may be changed to while connected
    /// ([`LocalClient::change_receive_size`](crate::LocalClient::change_receive_size)), and the longest Send to a peer
    /// that takes so much; bytes. Less than `receive_size` counts as `receive_size`. Default 0.
    #[cfg_attr(feature = "serde", serde(with = "crate::fabric::units::bytes"))]
    pub max_receive_size: usize,
    /// Offers to peers that either end may change its characteristics while connected, in version 2. Default true.
    pub optional_operations: bool,
    /// Changes the size of the shard's receives when a peer asks for it, within 4096 and
    /// [`max_receive_size`](Self::max_receive_size): for trusted peers, because it is the same for all of them. Default
    /// false.
    pub resize_on_request: bool,
    /// RPC messages up to this length are continued in several messages rather than sent as a chunk, where the peer has
    /// version 2; bytes. Default 8192, which two or three messages hold; from there on a chunk is cheaper
    /// (`tuning.md`).
    #[cfg_attr(feature = "serde", serde(with = "crate::fabric::units::bytes"))]
    pub continue_up_to: usize,
    /// Longest RPC message that is assembled from parts, or fetched as a long call, and longest call that is sent in
    /// parts because it may have no chunks; bytes, at most 1 GiB. Default 1 MiB.
    #[cfg_attr(feature = "serde", serde(with = "crate::fabric::units::bytes"))]
    pub reassemble_up_to: usize,
    /// Calls in the reverse direction that a client with services takes: inline ones only, or any. Default any.
    pub reverse: ReverseSupport,
    /// Whether peers must authenticate, in version 2. Default off. A shard's connections in both roles follow it. No
    /// part of configuration files: it has keys.
    #[cfg_attr(feature = "serde", serde(skip))]
    pub host_auth: AuthPolicy,
    /// A client offers one handle of a call for Send With Invalidate, a server uses what is offered. Default true.
    pub remote_invalidate: bool,
}

impl Default for WireConfig {
    fn default() -> Self {
        Self {
            credit_mode: CreditMode::V2Windowed,
            version_1: true,
            revision: Revision::Ietf00,
            receive_size: 4096,
            max_receive_size: 0,
            optional_operations: true,
            resize_on_request: false,
            continue_up_to: 8 << 10,
            reassemble_up_to: 1 << 20,
            reverse: ReverseSupport::General,
            host_auth: AuthPolicy::Off,
            remote_invalidate: true,
        }
    }
}

impl WireConfig {
    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        let size = self.receive_size;
        let possible = (1024..=1 << 20).contains(&size) && size.is_multiple_of(4);
        check(possible, "wire.receive_size", size, "1024 to 1048576 bytes, a multiple of 4")?;
        let of_version_2 = "4096 to 1048576 bytes in version 2 (draft-ietf-nfsv4-rpcrdma-version-two-00 §4.3.2), or \
                            wire.credit_mode v1";
        check(self.credit_mode == CreditMode::V1 || size >= 4096, "wire.receive_size", size, of_version_2)?;
        let most = self.max_receive_size;
        let possible = most <= 1 << 20 && most.is_multiple_of(4);
        check(possible, "wire.max_receive_size", most, "0 to 1048576 bytes, a multiple of 4")?;
        check(
            self.reassemble_up_to <= 1 << 30,
            "wire.reassemble_up_to",
            self.reassemble_up_to,
            "at most 1073741824 bytes",
        )
    }

    /// Longest message that is ever sent or received, bytes.
    pub(crate) fn longest_message(&self) -> usize {
        self.receive_size.max(self.max_receive_size)
    }
}
