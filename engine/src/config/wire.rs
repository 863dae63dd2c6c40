//! Wire protocol.

use super::{ConfigError, check};
use crate::auth::AuthPolicy;
use crate::proto::CreditMode;
use crate::wire::Revision;
use crate::wire::properties::ReverseSupport;

/// Protocol version, form of messages, and authentication of hosts.
///
/// Both ends must agree on `revision`; versions, credits and thresholds are negotiated.
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
    /// Preferred protocol version and credit accounting. Default: version 2, windowed.
    pub credit_mode: CreditMode,
    /// Accepts peers that speak only version 1. Default true.
    pub version_1: bool,
    /// Code points of version 2. Default: draft-ietf-nfsv4-rpcrdma-version-two-00.
    pub revision: Revision,
    /// Bytes of each receive, and of the longest Send. Default 4096.
    ///
    /// 1024 to 1048576, a multiple of 4; at least 4096 in version 2. The inline thresholds are the smaller of both
    /// ends'.
    #[cfg_attr(feature = "serde", serde(with = "crate::fabric::units::bytes"))]
    #[doc(alias = "inline threshold")]
    pub receive_size: usize,
    /// Upper bound of [`receive_size`](Self::receive_size) while connected, bytes. Default 0.
    ///
    /// See [`LocalClient::change_receive_size`](crate::LocalClient::change_receive_size). It also bounds Sends to a
    /// peer with larger receives. Less than `receive_size` counts as `receive_size`.
    #[cfg_attr(feature = "serde", serde(with = "crate::fabric::units::bytes"))]
    pub max_receive_size: usize,
    /// Lets either end change its characteristics while connected. Default true.
    ///
    /// Version 2 only.
    pub optional_operations: bool,
    /// Resizes receives when a peer asks for it. Default false.
    ///
    /// Within 4096 and [`max_receive_size`](Self::max_receive_size). For trusted peers: the size is the same for all of
    /// them.
    pub resize_on_request: bool,
    /// Continues messages up to this length instead of using chunks, bytes.
    ///
    /// Version 2 only. Default 8192, which takes two or three messages; longer ones are cheaper as a chunk
    /// (`tuning.md`).
    #[cfg_attr(feature = "serde", serde(with = "crate::fabric::units::bytes"))]
    #[doc(alias = "message continuation")]
    pub continue_up_to: usize,
    /// Longest RPC message assembled, fetched, or sent in parts, bytes.
    ///
    /// Sending in parts is for calls without chunks. At most 1 GiB. Default 1 MiB.
    #[cfg_attr(feature = "serde", serde(with = "crate::fabric::units::bytes"))]
    pub reassemble_up_to: usize,
    /// Reverse-direction calls that a client with services takes. Default any.
    pub reverse: ReverseSupport,
    /// Host authentication, in version 2. Default off.
    ///
    /// A shard's connections in both roles follow it. Not in configuration files: it has keys.
    #[cfg_attr(feature = "serde", serde(skip))]
    pub host_auth: AuthPolicy,
    /// Send With Invalidate: clients offer a handle, servers use it. Default true.
    #[doc(alias = "send with invalidate")]
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

    /// Longest message sent or received, bytes.
    pub(crate) fn longest_message(&self) -> usize {
        self.receive_size.max(self.max_receive_size)
    }
}
