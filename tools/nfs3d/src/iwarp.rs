//! iWARP options of `nfs3c` and `nfs3d`.
#![forbid(unsafe_code)]

use anyhow::ensure;
use clap::Args;
use rpcrdma::config::{Crc, FpduSize};
use rpcrdma::{Address, Config};

/// Options for `iwarp:` addresses.
#[derive(Clone, Copy, Debug, Args)]
pub struct IwarpOptions {
    /// iWARP: CRC-32C of each FPDU. With never, peers that require it are refused. [default: if-asked]
    #[arg(long, value_name = "never|if-asked|always")]
    crc: Option<Crc>,
    /// iWARP: length of FPDUs. segment: each fits a TCP segment. longest: as long as the format allows. auto: depends
    /// on the peer. [default: auto]
    #[arg(long, value_name = "auto|segment|longest")]
    fpdu: Option<FpduSize>,
}

impl IwarpOptions {
    /// Configures the iWARP fabric of a program with these addresses.
    ///
    /// # Errors
    /// An option is set, but no address is an `iwarp:` address.
    pub fn configure(self, config: &mut Config, addresses: &[Address]) -> anyhow::Result<()> {
        let is_set = self.crc.is_some() || self.fpdu.is_some();
        ensure!(
            !is_set || addresses.iter().any(|address| matches!(address, Address::Iwarp(_))),
            "--crc and --fpdu need an iwarp: address, not {}",
            addresses.iter().map(Address::to_string).collect::<Vec<_>>().join(", ")
        );
        (config.iwarp.crc, config.debug.fpdu_size) = (self.crc.unwrap_or_default(), self.fpdu.unwrap_or_default());
        Ok(())
    }
}
