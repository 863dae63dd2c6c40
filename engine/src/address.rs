//! Addresses of servers: a fabric, and an address of that fabric.

use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;

use crate::config::Config;
use crate::fabric::any::{AnyFabric, AnyListener};
use crate::fabric::host::{self, NamedDevice};
use crate::fabric::iwarp::IwarpFabric;
use crate::fabric::software::SoftwareFabric;
#[cfg(feature = "verbs")]
use crate::fabric::verbs::{VerbsConfig, VerbsFabric};
use crate::fabric::{Fabric, FabricAddress, FabricError, FabricErrorKind};

/// A server's address: `soft:NAME`, `iwarp:HOST[:PORT]` or `verbs:HOST[:PORT]`.
///
/// The default port is 20049. Do not serve at port 0: nothing reports the port that the system chooses. `verbs:` needs
/// the feature `verbs`.
///
/// ```
/// let address: rpcrdma::Address = "iwarp:127.0.0.1:20049".parse()?;
/// assert_eq!(address.scheme(), "iwarp");
/// # Ok::<(), rpcrdma::AddressError>(())
/// ```
///
/// # Devices
/// A server at a `verbs:` address uses the device that has the IP address. A client uses the device on the route to the
/// address. The GID is the one of that IP address. `verbs:DEVICE@HOST:PORT` and `verbs:DEVICE/GID@HOST:PORT` name the
/// device, and the index of its GID. This is needed
///
/// - on InfiniBand with several devices, because their GIDs are not IP addresses,
/// - where several devices have routes to the server,
/// - for servers that listen at all addresses (`0.0.0.0`).
///
/// [`device.name`](crate::config::DeviceConfig::name) and [`device.gid_index`](crate::config::DeviceConfig::gid_index)
/// choose them for all addresses; opening an address that names another device fails. Each address of a
/// [`Server`](crate::Server) may name its own device, because a shard uses the device of the address that it serves.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Address {
    /// The software fabric: processes of one host.
    #[doc(hidden)]
    Soft(FabricAddress),
    /// RDMA over plain TCP: `HOST`, `HOST:PORT`, `[IPV6]:PORT`. The port is 20049 unless it is given.
    #[doc(hidden)]
    Iwarp(FabricAddress),
    /// RDMA devices: `HOST`, `HOST:PORT`, `[IPV6]:PORT`, with an optional `DEVICE@` or `DEVICE/GID@` in front. The port
    /// is 20049 unless it is given.
    #[cfg(feature = "verbs")]
    #[doc(hidden)]
    Verbs(FabricAddress),
}

/// Forms of addresses that this build accepts.
const FORMS: &str = if cfg!(feature = "verbs") {
    "soft:NAME, soft:/path/to/socket, iwarp:HOST:PORT, iwarp:[IPV6]:PORT, verbs:HOST:PORT, verbs:[IPV6]:PORT or \
     verbs:DEVICE/GID@HOST:PORT"
} else {
    "soft:NAME, soft:/path/to/socket, iwarp:HOST:PORT or iwarp:[IPV6]:PORT"
};

/// A text is not a valid [`Address`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid address `{}`: {detail}; expected {FORMS}", .text.escape_debug())]
#[non_exhaustive]
pub struct AddressError {
    /// The invalid text.
    pub text: String,
    /// Its defect.
    pub detail: &'static str,
}

impl Address {
    /// Name of the fabric: the part before the colon.
    pub fn scheme(&self) -> &'static str {
        self.parts().0
    }

    /// Address within the fabric: the part after the colon.
    #[doc(hidden)]
    pub fn fabric_address(&self) -> &FabricAddress {
        self.parts().1
    }

    /// Name of the fabric, and the address within it.
    fn parts(&self) -> (&'static str, &FabricAddress) {
        match self {
            Self::Soft(at) => (SoftwareFabric::SCHEME, at),
            Self::Iwarp(at) => (IwarpFabric::SCHEME, at),
            #[cfg(feature = "verbs")]
            Self::Verbs(at) => (VerbsFabric::SCHEME, at),
        }
    }

    /// Address within the fabric, for a device of this scheme, or of any scheme if it is empty.
    ///
    /// # Errors
    /// The address is of another fabric than the device.
    pub(crate) fn fabric_address_for(&self, scheme: &str) -> Result<&FabricAddress, FabricError> {
        if scheme.is_empty() || scheme == self.scheme() {
            return Ok(self.fabric_address());
        }
        Err(FabricError::new(
            FabricErrorKind::Address,
            format_args!("invalid address `{self}`: expected `{scheme}:…`, the fabric of the client's device"),
        ))
    }

    /// Device that the address names, if any.
    ///
    /// # Errors
    /// The text before the `@` is neither `DEVICE` nor `DEVICE/GID`.
    #[doc(hidden)]
    pub fn named_device(&self) -> Result<Option<NamedDevice>, FabricError> {
        match self {
            Self::Soft(_) => Ok(None),
            _ => Ok(host::split_device(self.fabric_address())?.0),
        }
    }

    /// Host and port; blocks while it resolves the host's name.
    ///
    /// Returns `None` for a fabric that is not a network.
    ///
    /// # Errors
    /// The host name is unknown, or the text after the colon is not a host and port.
    pub fn socket_address(&self) -> Result<Option<SocketAddr>, FabricError> {
        match self {
            Self::Soft(_) => Ok(None),
            _ => host::resolve(&host::split_device(self.fabric_address())?.1).map(Some),
        }
    }

    /// Replaces host and port; fabric and device stay.
    ///
    /// The address is unchanged if its fabric is not a network.
    #[must_use]
    pub fn with_socket_address(&self, at: SocketAddr) -> Self {
        match self {
            Self::Soft(_) => self.clone(),
            Self::Iwarp(_) => Self::Iwarp(FabricAddress(at.to_string())),
            #[cfg(feature = "verbs")]
            Self::Verbs(FabricAddress(text)) => {
                let device = text.split_once('@').map_or(String::new(), |(device, _)| format!("{device}@"));
                Self::Verbs(FabricAddress(format!("{device}{at}")))
            }
        }
    }

    /// Opens a device for this address; takes milliseconds and allocates.
    ///
    /// # Errors
    /// The failed call, its limit and the remedy; or a knob that belongs to another fabric.
    #[doc(hidden)]
    pub fn open(&self, config: &Config) -> Result<AnyFabric, FabricError> {
        config.device.path().check(self.scheme())?;
        match self {
            Self::Soft(_) => Ok(AnyFabric::Software(SoftwareFabric::new(config.software())?)),
            Self::Iwarp(_) => Ok(AnyFabric::Iwarp(IwarpFabric::new(config.iwarp())?)),
            #[cfg(feature = "verbs")]
            Self::Verbs(address) => {
                let config = VerbsConfig { address: Some(address.clone()), ..config.verbs() };
                Ok(AnyFabric::Verbs(VerbsFabric::new(config)?))
            }
        }
    }

    /// NUMA node of the device that a shard opens for this address, if the kernel knows it.
    pub(crate) fn node(&self, config: &Config) -> Option<u32> {
        #[cfg(feature = "verbs")]
        if let Self::Verbs(address) = self {
            let config = VerbsConfig { address: Some(address.clone()), ..config.verbs() };
            return crate::fabric::verbs::numa_node(&config);
        }
        let _ = config;
        None
    }

    /// Binds the address; a shard then listens at it.
    ///
    /// # Errors
    /// Those of [`Fabric::bind`].
    #[doc(hidden)]
    pub fn bind(&self) -> Result<AnyListener, FabricError> {
        AnyFabric::bind(&FabricAddress(self.to_string()))
    }
}

/// A list of one address.
impl AsRef<[Self]> for Address {
    fn as_ref(&self) -> &[Self] {
        std::slice::from_ref(self)
    }
}

impl FromStr for Address {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        let error = |detail| AddressError { text: text.into(), detail };
        let (fabric, rest) = text.split_once(':').ok_or_else(|| error("the fabric is missing"))?;
        if rest.is_empty() {
            return Err(error("the part after the colon is empty"));
        }
        let begins_another = |part: &str| ["soft:", "iwarp:", "verbs:"].iter().any(|scheme| part.starts_with(scheme));
        if rest.split(',').skip(1).any(|part| begins_another(part.trim_start())) {
            return Err(error("several addresses, which only a server accepts"));
        }
        let at_host = |devices| host::check(rest, devices).map_err(error).map(|()| FabricAddress(rest.into()));
        match fabric {
            "soft" => Ok(Self::Soft(FabricAddress(rest.into()))),
            "iwarp" => at_host(false).map(Self::Iwarp),
            #[cfg(feature = "verbs")]
            "verbs" => at_host(true).map(Self::Verbs),
            #[cfg(not(feature = "verbs"))]
            "verbs" => Err(error("the verbs fabric is not in this build: build with `--features verbs`")),
            _ => Err(error("unknown fabric")),
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (scheme, at) = self.parts();
        write!(f, "{scheme}:{}", at.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_displayed_address_equals_the_parsed_text() {
        let address: Address = "soft:a,b".parse().unwrap();
        assert_eq!(address.to_string(), "soft:a,b", "a name may have a comma");
        let address: Address = "soft:a/b".parse().unwrap();
        assert_eq!(address, Address::Soft(FabricAddress("a/b".into())));
        assert_eq!(address.to_string(), "soft:a/b");
        assert_eq!(address.socket_address().unwrap(), None);
        assert_eq!(address.with_socket_address("10.0.0.1:7".parse().unwrap()), address);
    }

    #[test]
    #[cfg(feature = "verbs")]
    fn a_displayed_verbs_address_equals_the_parsed_text() {
        for text in ["verbs:10.0.0.1:20049", "verbs:[fd00::1]:7", "verbs:storage1", "verbs:mlx5_0/3@[fd00::1]:7"] {
            let address: Address = text.parse().unwrap();
            assert_eq!((address.scheme(), address.to_string().as_str()), ("verbs", text));
        }
        let at = "[fd00::1]:7".parse().unwrap();
        let moved = "verbs:10.0.0.1".parse::<Address>().unwrap().with_socket_address(at);
        assert_eq!((moved.to_string().as_str(), moved.socket_address().unwrap()), ("verbs:[fd00::1]:7", Some(at)));
        let on = |device: &str| format!("verbs:{device}@10.0.0.1:7").parse::<Address>().unwrap();
        assert_eq!(on("mlx5_0/3").named_device().unwrap().map(|named| named.to_string()), Some("mlx5_0/3".into()));
        assert_eq!(on("mlx5_0").socket_address().unwrap(), Some("10.0.0.1:7".parse().unwrap()));
        assert_eq!(on("mlx5_0/3").with_socket_address(at).to_string(), "verbs:mlx5_0/3@[fd00::1]:7");
        let mut config = Config::default();
        config.device.name = Some("rxe0".into());
        let error = on("mlx5_0").open(&config).err().map(|error| error.to_string()).unwrap_or_default();
        assert!(error.contains("names mlx5_0, but `device` is rxe0"), "{error}");
        let soft = SoftwareFabric::new(Config::default().software()).unwrap();
        let error =
            "verbs:storage1".parse::<Address>().unwrap().fabric_address_for(soft.capabilities().scheme).unwrap_err();
        assert!(error.to_string().starts_with("invalid address `verbs:storage1`: expected `soft:…`"), "{error}");
    }

    #[test]
    fn knobs_of_other_fabrics_are_refused_at_open() {
        let opened = |text: &str, config: Config| text.parse::<Address>().unwrap().open(&config).err();
        let names =
            |error: Option<FabricError>, knob: &str| error.is_some_and(|error| error.to_string().contains(knob));
        let (mut tos, mut mtu) = (Config::default(), Config::default());
        tos.device.tos = Some(8);
        mtu.device.path_mtu = Some(512);
        assert!(names(opened("soft:knobs", tos.clone()), "tos = 8"));
        assert_eq!(opened("iwarp:127.0.0.1:0", tos), None);
        assert!(names(opened("iwarp:127.0.0.1:0", mtu), "path_mtu = 512"));
    }

    #[test]
    fn errors_of_invalid_addresses_name_the_cause() {
        for (text, why) in [
            ("", "fabric is missing"),
            ("soft", "fabric is missing"),
            ("soft:", "is empty"),
            ("tcp:h:1", "unknown fabric"),
            ("iwarp:h:65536", "port"),
            ("iwarp:h:", "port"),
            ("iwarp:h:+1", "port"),
            ("iwarp:[fd00::1]:65536", "port"),
            ("iwarp: h:1", "space"),
            ("iwarp:fd00::1", "brackets"),
            ("iwarp:d@h:1", "only verbs: addresses"),
            ("soft:a,soft:b", "only a server"),
            ("iwarp:h:1, iwarp:h:2", "only a server"),
            #[cfg(feature = "verbs")]
            ("verbs:d/1@h:65536", "port"),
            #[cfg(not(feature = "verbs"))]
            ("verbs:h:1", "not in this build"),
        ] {
            let error = text.parse::<Address>().unwrap_err().to_string();
            assert!(error.contains(why) && error.contains("soft:NAME"), "{error}");
        }
    }
}
