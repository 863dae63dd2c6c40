//! The RDMA device, and the marks of its packets.

use super::{ConfigError, check};
use crate::fabric::path::{OutOfRange, PathConfig};

/// The RDMA device, and the marks of its packets.
///
/// | wrong | effect |
/// |---|---|
/// | `name`, `gid_index` | the start fails, or no peer is reached: an address of another network |
/// | `tos`, `service_level` that the switches do not know | packets travel in the lossy class: retransmissions under load |
/// | `path_mtu` too small | less throughput of large chunks |
/// | `path_mtu` larger than a switch passes | connections are made, and the first large message is lost |
#[derive(Clone, Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(default, deny_unknown_fields))]
pub struct DeviceConfig {
    /// Name of the RDMA device, such as `mlx5_0`. Other fabrics ignore it.
    ///
    /// Default: the one that the [address](crate::Address#devices) names, else the one that has the address, or the
    /// route to it.
    pub name: Option<String>,
    /// GID index of this side. Other fabrics ignore it.
    ///
    /// Default: the one that the address names, else that of the route.
    pub gid_index: Option<u32>,
    /// Type of service or traffic class of packets, 0 to 255.
    ///
    /// For IPv4, IPv6 and RoCE; the DSCP is the upper six bits. Verbs and iWARP; other fabrics refuse it. Default: a
    /// RoCE server takes the client's, all others the system's.
    #[doc(alias("dscp", "traffic class"))]
    pub tos: Option<u8>,
    /// InfiniBand service level, or VLAN priority of RoCE, 0 to 15.
    ///
    /// Verbs only; other fabrics refuse it. Default: that of the path.
    pub service_level: Option<u8>,
    /// Path MTU: 256, 512, 1024, 2048 or 4096 bytes.
    ///
    /// At most the port's MTU. A client connects with it; a server refuses clients that ask for more. Verbs only,
    /// clients on RoCE only; other fabrics refuse it. Default: that of the path.
    pub path_mtu: Option<u32>,
}

impl DeviceConfig {
    /// Marks of the packets of such a shard.
    #[doc(hidden)]
    pub fn path(&self) -> PathConfig {
        PathConfig { tos: self.tos, service_level: self.service_level, path_mtu: self.path_mtu }
    }

    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        check(self.name.as_deref() != Some(""), "device.name", "empty", "the name of a device, or unset")?;
        self.path().out_of_range().map_or(Ok(()), |OutOfRange { knob, value, wanted }| {
            let knob = if knob == "path_mtu" { "device.path_mtu" } else { "device.service_level" };
            Err(ConfigError::new(knob, value, wanted))
        })
    }
}
