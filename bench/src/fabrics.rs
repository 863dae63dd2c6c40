//! Addresses and their fabrics.
#![forbid(unsafe_code)]

use rpcrdma::fabric::any::AnyFabric;
use rpcrdma::fabric::host::DEFAULT_PORT;
use rpcrdma::fabric::iwarp::{IwarpFabric, IwarpFabricConfig};
use rpcrdma::fabric::software::{SoftwareConfig, SoftwareFabric};
#[cfg(feature = "verbs")]
use rpcrdma::fabric::verbs::{VerbsConfig, VerbsFabric};
use rpcrdma::fabric::{Capabilities, FabricAddress, FabricError};
use rpcrdma::{Address, Config};

use crate::cli::{DeviceArgs, Idle};
use crate::failure::Failure;

/// Parses an address.
pub(crate) fn parse(text: &str) -> Result<Address, Failure> {
    text.parse().map_err(|error| Failure::Usage(format!("{error}")))
}

/// Address of the raw tests at a server that serves calls at `address`.
pub(crate) fn raw_address(address: &Address) -> Result<Address, Failure> {
    match address {
        Address::Soft(FabricAddress(name)) => Ok(Address::Soft(FabricAddress(format!("{name}.raw")))),
        Address::Iwarp(FabricAddress(text)) => Ok(Address::Iwarp(FabricAddress(next_port(text)?))),
        #[cfg(feature = "verbs")]
        Address::Verbs(FabricAddress(text)) => Ok(Address::Verbs(FabricAddress(next_port(text)?))),
        other => Err(Failure::Usage(format!("{other}: rpcperf has no tests for this fabric"))),
    }
}

/// The address with the next port of its host.
fn next_port(text: &str) -> Result<String, Failure> {
    let (host, port) = match text.rsplit_once(':') {
        Some((host, port)) if !port.ends_with(']') => (host, port.parse().ok()),
        _ => (text, Some(DEFAULT_PORT)),
    };
    let next = port.and_then(|port: u16| port.checked_add(1));
    let wrong =
        || Failure::Usage(format!("{text}: expected a port from 1 to 65534, because raw tests use the next one"));
    Ok(format!("{host}:{}", next.ok_or_else(wrong)?))
}

/// Opens the fabric of an address on the selected device, with defaults except for sleeping.
pub(crate) fn open(address: &Address, idle: Idle, device: &DeviceArgs) -> Result<AnyFabric, Failure> {
    device.check(address)?;
    let opened: Result<AnyFabric, FabricError> = match address {
        Address::Soft(_) => {
            let config = SoftwareConfig { may_sleep: idle != Idle::Poll, ..SoftwareConfig::default() };
            SoftwareFabric::new(config).map(AnyFabric::Software)
        }
        Address::Iwarp(_) => {
            let (mut config, defaults) = (Config::default(), IwarpFabricConfig::default());
            config.iwarp = device.iwarp();
            (config.debug.fpdu_size, config.device.tos) = (device.fpdu.unwrap_or_default(), device.tos);
            let config = IwarpFabricConfig { max_message: defaults.max_message, ..config.iwarp() };
            IwarpFabric::new(config).map(AnyFabric::Iwarp)
        }
        #[cfg(feature = "verbs")]
        Address::Verbs(to) => {
            let config = VerbsConfig {
                address: Some(to.clone()),
                device: device.ib_dev.clone(),
                gid_index: device.gid_index,
                path: device.path(),
                ..VerbsConfig::default()
            };
            VerbsFabric::new(config).map(AnyFabric::Verbs)
        }
        other => return Err(Failure::Usage(format!("{other}: rpcperf has no tests for this fabric"))),
    };
    opened.map_err(|e| Failure::run(name(address), e))
}

/// Device limits for people.
pub(crate) fn describe_limits(capabilities: &Capabilities) -> String {
    let describe =
        |is_supported: bool, what: &str| if is_supported { format!(", {what}") } else { format!(", no {what}") };
    format!(
        "inline data {}, send queue {}, receive queue {}, reads {}{}{}",
        capabilities.max_inline_data,
        capabilities.max_send_wr,
        capabilities.max_recv_wr,
        capabilities.max_read_depth,
        describe(capabilities.remote_invalidate, "remote invalidation"),
        describe(capabilities.checks_window_bounds, "check of a window's bounds"),
    )
}

/// Fabric name for people.
pub(crate) fn name(address: &Address) -> &'static str {
    match address {
        Address::Soft(_) => "software",
        _ => address.scheme(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_addresses_are_usage_errors() {
        let address = parse("soft:a:b").unwrap();
        assert_eq!(address, Address::Soft(FabricAddress("a:b".into())));
        assert_eq!(raw_address(&address).unwrap().to_string(), "soft:a:b.raw");
        for wrong in ["", "soft:", "a", "tcp:a"] {
            assert!(matches!(parse(wrong), Err(Failure::Usage(_))), "{wrong}");
        }
    }

    #[test]
    #[cfg(feature = "verbs")]
    fn raw_tests_use_the_next_port() {
        for (calls, tests) in [
            ("verbs:host", "verbs:host:20050"),
            ("verbs:host:7", "verbs:host:8"),
            ("verbs:[fd00::1]", "verbs:[fd00::1]:20050"),
            ("verbs:[fd00::1]:7", "verbs:[fd00::1]:8"),
        ] {
            assert_eq!(raw_address(&parse(calls).unwrap()).unwrap().to_string(), tests);
        }
        assert!(raw_address(&parse("verbs:host:65535").unwrap()).is_err(), "there is no next port");
    }
}
