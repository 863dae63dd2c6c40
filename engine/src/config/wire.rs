//! Wire protocol.

use super::{ConfigError, check};
use crate::auth::AuthPolicy;
use crate::proto::CreditMode;

knobs! {
    /// Protocol version, form of messages, and authentication of hosts.
    ///
    /// Both ends negotiate versions, credits and thresholds.
    ///
    /// | wrong | effect |
    /// |---|---|
    /// | `credit_mode` `V1`, or `version_1` off, at one end alone | peers without a version in common do not connect |
    /// | `receive_size` too small | longer messages go as chunks, which cost a round trip or more |
    /// | `receive_size` too large | `memory.receives` and `memory.message_buffers` times as many bytes |
    /// | `reassemble_up_to` too small | longer calls are answered with SYSTEM_ERR |
    pub struct WireConfig, "wire";

    /// Preferred protocol version and credit accounting. Default: version 2, windowed.
    pub credit_mode: CreditMode = CreditMode::V2Windowed;
    /// Accepts peers that speak only version 1. Default true, as `credit_mode` `V1` needs.
    pub version_1: bool = true;
    /// Bytes of each receive, and of the longest Send. Default 4096.
    ///
    /// 1024 to 1048576, a multiple of 4; at least 4096 in version 2. The inline thresholds are the smaller of both
    /// ends'.
    #[cfg_attr(feature = "serde", serde(with = "crate::fabric::units::bytes"))]
    #[doc(alias = "inline threshold")]
    pub receive_size: usize = 4096;
    /// Longest RPC message assembled, fetched, or sent in parts, bytes.
    ///
    /// Sending in parts is for calls without chunks. At most 1 GiB. Default 1 MiB.
    #[cfg_attr(feature = "serde", serde(with = "crate::fabric::units::bytes"))]
    pub reassemble_up_to: usize = 1 << 20, |knob, bytes| check(bytes <= 1 << 30, knob, bytes, "at most 1073741824 bytes");
    /// Host authentication, in version 2. Default off.
    ///
    /// A shard's connections in both roles follow it. Where it is required, `credit_mode` is one of version 2. Not in
    /// configuration files: it has keys.
    #[cfg_attr(feature = "serde", serde(skip))]
    pub host_auth: AuthPolicy = AuthPolicy::Off;
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
        let of_version_2 = "4096 to 1048576 bytes in version 2 (draft-ietf-nfsv4-rpcrdma-version-two-00 §4.3.2), or \
                            wire.credit_mode v1";
        check(!version_2 || size >= 4096, "wire.receive_size", size, of_version_2)
    }
}
