//! Packet options of connections: traffic class, service level and path MTU, with their ranges and the fabrics that
//! support them.

#![forbid(unsafe_code)]

use crate::FabricError;
use crate::iwarp::IwarpFabric;

/// The path MTUs of InfiniBand and RoCE, in bytes (InfiniBand Architecture 1.2.1 §9.7.3).
const MTUS: [u32; 5] = [256, 512, 1024, 2048, 4096];
/// The scheme of RDMA device addresses, also in builds without RDMA.
pub(crate) const VERBS: &str = "verbs";

/// Packet options of connections. `None` leaves the choice to the system or the peer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PathConfig {
    /// Type of service (IPv4) or traffic class (IPv6, GRH), 0 to 255. The upper six bits are the DSCP (RFC 2474 §3),
    /// the lower two ECN.
    pub tos: Option<u8>,
    /// Service level (InfiniBand) or priority (RoCE over VLANs, lower three bits). The range is 0 to 15.
    pub service_level: Option<u8>,
    /// Maximum payload bytes of a packet: 256, 512, 1024, 2048 or 4096.
    pub path_mtu: Option<u32>,
}

/// A value that no fabric supports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutOfRange {
    /// The field.
    pub knob: &'static str,
    /// Its value.
    pub value: u32,
    /// The allowed values.
    pub expected: &'static str,
}

impl PathConfig {
    /// The first value that is out of its range.
    pub fn out_of_range(&self) -> Option<OutOfRange> {
        let level = self.service_level.filter(|&level| level > 15);
        let mtu = self.path_mtu.filter(|mtu| !MTUS.contains(mtu));
        let level = level.map(|level| OutOfRange { knob: "service_level", value: level.into(), expected: "0 to 15" });
        let mtu =
            mtu.map(|value| OutOfRange { knob: "path_mtu", value, expected: "256, 512, 1024, 2048 or 4096 bytes" });
        level.or(mtu)
    }

    /// Checks that the fabric of this address scheme supports the options.
    ///
    /// # Errors
    /// Names the knob that the fabric does not support, or that is out of its range.
    pub fn check(&self, scheme: &str) -> Result<(), FabricError> {
        if let Some(OutOfRange { knob, value, expected }) = self.out_of_range() {
            return Err(FabricError::misuse(format!("{knob} = {value}: {expected}")));
        }
        let has_ip = scheme == VERBS || scheme == IwarpFabric::SCHEME;
        for (knob, value, is_supported, by) in [
            ("tos", self.tos.map(u32::from), has_ip, "verbs: and iwarp:"),
            ("service_level", self.service_level.map(u32::from), scheme == VERBS, "verbs:"),
            ("path_mtu", self.path_mtu, scheme == VERBS, "verbs:"),
        ] {
            if let Some(value) = value.filter(|_| !is_supported) {
                let detail = format!("{knob} = {value}: not supported by {scheme}: addresses, only by {by}");
                return Err(FabricError::misuse(detail));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: PathConfig = PathConfig { tos: None, service_level: None, path_mtu: None };

    #[test]
    fn options_of_other_fabrics_are_refused_by_name() {
        let tos = PathConfig { tos: Some(0), ..NONE };
        let level = PathConfig { service_level: Some(15), ..NONE };
        let mtu = PathConfig { path_mtu: Some(4096), ..NONE };
        for (path, knob, refused_by) in [
            (tos, "tos", &["soft"][..]),
            (level, "service_level", &["soft", "iwarp"]),
            (mtu, "path_mtu", &["soft", "iwarp"]),
        ] {
            for scheme in ["soft", "iwarp", "verbs"] {
                let result = path.check(scheme).map_err(|error| error.to_string());
                assert_eq!(result.is_err(), refused_by.contains(&scheme), "{knob} {scheme}: {result:?}");
                assert!(result.err().is_none_or(|result| result.contains(knob)), "{knob} {scheme}");
            }
        }
        assert_eq!(NONE.check("soft"), Ok(()));
    }

    #[test]
    fn impossible_options_are_refused_by_name() {
        for (path, knob) in [
            (PathConfig { service_level: Some(16), ..NONE }, "service_level = 16"),
            (PathConfig { path_mtu: Some(0), ..NONE }, "path_mtu = 0"),
            (PathConfig { path_mtu: Some(1500), ..NONE }, "path_mtu = 1500"),
            (PathConfig { path_mtu: Some(8192), ..NONE }, "path_mtu = 8192"),
        ] {
            let result = path.check(VERBS).map_err(|error| error.to_string());
            assert!(result.as_ref().is_err_and(|result| result.contains(knob)), "{result:?}");
        }
        for mtu in MTUS {
            assert_eq!(
                PathConfig { path_mtu: Some(mtu), tos: Some(255), service_level: Some(15) }.check(VERBS),
                Ok(())
            );
        }
    }
}
