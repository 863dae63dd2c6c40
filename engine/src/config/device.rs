//! The device, and what its packets are marked with.

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
    /// The RDMA device, such as `mlx5_0`, of all addresses; of no meaning to the other fabrics. Default: the one that
    /// the [address](crate::Address#devices) names, or the one that has it or is on the way there.
    pub name: Option<String>,
    /// Index of the device's GID that connections go out from, and a server listens at; of no meaning to the other
    /// fabrics. Default: the one that the address names, or the one of the way there.
    pub gid_index: Option<u32>,
    /// Type of service of IPv4, traffic class of IPv6 and of RoCE, of this side's packets: the DSCP in the upper six
    /// bits. 0 to 255. Verbs and iWARP; other fabrics refuse it. Default: of RoCE what the client asked for, else the
    /// system's.
    pub tos: Option<u8>,
    /// Service level of InfiniBand, priority of RoCE over VLANs, of this side's packets. 0 to 15. Verbs alone; other
    /// fabrics refuse it. Default: the one of the path.
    pub service_level: Option<u8>,
    /// Path MTU: 256, 512, 1024, 2048 or 4096 bytes, at most what the port has. A client connects with it; a server
    /// refuses clients that ask for more. Verbs alone, and of clients RoCE alone; other fabrics refuse it. Default:
    /// the one of the path.
    pub path_mtu: Option<u32>,
}

impl DeviceConfig {
    /// What the packets of a shard like this are to have.
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
