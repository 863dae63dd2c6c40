//! Addresses, and the fabrics behind them.
#![forbid(unsafe_code)]

use rpcrdma::fabric::FabricAddress;
use rpcrdma::fabric::software::{SoftwareConfig, SoftwareFabric};

use crate::cli::Idle;
use crate::failure::Failure;

/// An address with the fabric that it belongs to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Address {
    /// `soft:NAME`: another process of this host.
    Software(FabricAddress),
}

impl Address {
    /// Reads `soft:NAME`.
    pub(crate) fn parse(text: &str) -> Result<Self, Failure> {
        match text.split_once(':') {
            Some(("soft", name)) if !name.is_empty() => Ok(Self::Software(FabricAddress(name.to_owned()))),
            _ => Err(Failure::Usage(format!("address {text:?}: wanted soft:NAME"))),
        }
    }

    /// Where the raw tests of a server are, that serves calls at this address.
    pub(crate) fn raw(&self) -> Self {
        match self {
            Self::Software(FabricAddress(name)) => Self::Software(FabricAddress(format!("{name}.raw"))),
        }
    }
}

/// Opens the software fabric as its defaults are, but told whether this side ever sleeps.
pub(crate) fn software(idle: Idle) -> Result<SoftwareFabric, Failure> {
    let config = SoftwareConfig { may_sleep: idle != Idle::Poll, ..SoftwareConfig::default() };
    SoftwareFabric::new(config).map_err(|e| Failure::run("software fabric", e))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forms() {
        let address = Address::parse("soft:a:b").unwrap();
        assert_eq!(address, Address::Software(FabricAddress("a:b".into())));
        assert_eq!(address.raw(), Address::Software(FabricAddress("a:b.raw".into())));
        for wrong in ["", "soft:", "a", "tcp:a"] {
            assert!(matches!(Address::parse(wrong), Err(Failure::Usage(_))), "{wrong}");
        }
    }
}
