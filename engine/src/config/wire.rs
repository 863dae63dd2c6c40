//! Wire protocol.

use super::{ConfigError, check};
use crate::auth::AuthPolicy;
use crate::proto::CreditMode;
use crate::wire::Revision;
use crate::wire::properties::ReverseSupport;

knobs! {
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
    pub struct WireConfig, "wire";

    /// Preferred protocol version and credit accounting. Default: version 2, windowed.
    pub credit_mode: CreditMode = CreditMode::V2Windowed;
    /// Accepts peers that speak only version 1. Default true, as `credit_mode` `V1` needs.
    pub version_1: bool = true;
    /// Code points of version 2. Default: draft-ietf-nfsv4-rpcrdma-version-two-00.
    pub revision: Revision = Revision::Ietf00;
    /// Bytes of each receive, and of the longest Send. Default 4096.
    ///
    /// 1024 to 1048576, a multiple of 4; at least 4096 in version 2. The inline thresholds are the smaller of both
    /// ends'.
    #[cfg_attr(feature = "serde", serde(with = "crate::fabric::units::bytes"))]
    #[doc(alias = "inline threshold")]
    pub receive_size: usize = 4096;
    /// Upper bound of [`receive_size`](Self::receive_size) while connected, bytes. Default 0.
    ///
    /// See [`LocalClient::change_receive_size`](crate::LocalClient::change_receive_size). It also bounds Sends to a
    /// peer with larger receives. 0 counts as `receive_size`, which it must not be less than otherwise.
    #[cfg_attr(feature = "serde", serde(with = "crate::fabric::units::bytes"))]
    pub max_receive_size: usize = 0, |knob, bytes| {
        let possible = bytes <= 1 << 20 && bytes.is_multiple_of(4);
        check(possible, knob, bytes, "0 to 1048576 bytes, a multiple of 4")
    };
    /// Lets either end change its characteristics while connected. Default true.
    ///
    /// Version 2 only.
    pub optional_operations: bool = true;
    /// Resizes receives when a peer asks for it. Default false.
    ///
    /// Within 4096 and [`max_receive_size`](Self::max_receive_size). For trusted peers: the size is the same for all of
    /// them. Needs `optional_operations`, and a `credit_mode` of version 2.
    pub resize_on_request: bool = false;
    /// Continues messages up to this length instead of using chunks, bytes.
    ///
    /// Version 2 only. Default 8192, which takes two or three messages; longer ones are cheaper as a chunk
    /// (`tuning.md`).
    #[cfg_attr(feature = "serde", serde(with = "crate::fabric::units::bytes"))]
    #[doc(alias = "message continuation")]
    pub continue_up_to: usize = 8 << 10;
    /// Longest RPC message assembled, fetched, or sent in parts, bytes.
    ///
    /// Sending in parts is for calls without chunks. At most 1 GiB. Default 1 MiB.
    #[cfg_attr(feature = "serde", serde(with = "crate::fabric::units::bytes"))]
    pub reassemble_up_to: usize = 1 << 20, |knob, bytes| check(bytes <= 1 << 30, knob, bytes, "at most 1073741824 bytes");
    /// Reverse-direction calls that a client with services takes. Default any.
    pub reverse: ReverseSupport = ReverseSupport::General;
    /// Host authentication, in version 2. Default off.
    ///
    /// A shard's connections in both roles follow it. Where it is required, `credit_mode` is one of version 2. Not in
    /// configuration files: it has keys.
    #[cfg_attr(feature = "serde", serde(skip))]
    pub host_auth: AuthPolicy = AuthPolicy::Off;
    /// Send With Invalidate: clients offer a handle, servers use it. Default true.
    #[doc(alias = "send with invalidate")]
    pub remote_invalidate: bool = true;
}

impl WireConfig {
    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        self.check_each()?;
        let size = self.receive_size;
        let possible = (1024..=1 << 20).contains(&size) && size.is_multiple_of(4);
        check(possible, "wire.receive_size", size, "1024 to 1048576 bytes, a multiple of 4")?;
        let version_2 = self.credit_mode != CreditMode::V1;
        let no_version = "a mode of version 2, or wire.version_1 true, which is false: no version is left";
        check(version_2 || self.version_1, "wire.credit_mode", "v1", no_version)?;
        let no_authentication = "a mode of version 2, as wire.host_auth is required, and version 1 has no \
                                 authentication of hosts; or host authentication that is off or optional";
        let required = matches!(self.host_auth, AuthPolicy::Required(_));
        check(version_2 || !required, "wire.credit_mode", "v1", no_authentication)?;
        if self.max_receive_size != 0 && self.max_receive_size < size {
            let wanted = format!("0, or at least wire.receive_size, which is {size}");
            return Err(ConfigError::new("wire.max_receive_size", self.max_receive_size, wanted));
        }
        let resizes = "false, or wire.optional_operations true, which is false: a peer asks by such an operation";
        check(!self.resize_on_request || self.optional_operations, "wire.resize_on_request", true, resizes)?;
        let resizes = "false, as wire.credit_mode is v1: only a peer of version 2 asks for another size";
        check(!self.resize_on_request || version_2, "wire.resize_on_request", true, resizes)?;
        let of_version_2 = "4096 to 1048576 bytes in version 2 (draft-ietf-nfsv4-rpcrdma-version-two-00 §4.3.2), or \
                            wire.credit_mode v1";
        check(!version_2 || size >= 4096, "wire.receive_size", size, of_version_2)
    }

    /// Longest message sent or received, bytes.
    pub(crate) fn longest_message(&self) -> usize {
        self.receive_size.max(self.max_receive_size)
    }
}
