//! iWARP options of `nfs3c` and `nfs3d`.
#![forbid(unsafe_code)]

use anyhow::ensure;
use clap::Args;
use rpcrdma::config::{Crc, FpduSize};
use rpcrdma::{Address, Config};

/// Options for `iwarp:` addresses; errors without one.
#[derive(Clone, Copy, Debug, Args)]
pub struct IwarpOptions {
    /// iWARP: CRC-32C of each FPDU. never: refuse peers that require it. [default: if-asked]
    #[arg(long, value_name = "never|if-asked|always")]
    crc: Option<Crc>,
    /// iWARP: length of FPDUs. segment: within a TCP segment. longest: as long as the format allows. [default: auto, by
    /// the peer]
    #[arg(long, value_name = "auto|segment|longest")]
    fpdu: Option<FpduSize>,
}

impl IwarpOptions {
    /// Configures the fabric at `addresses`.
    ///
    /// # Errors
    /// There are options, and no `iwarp:` address.
    pub fn configure(self, config: &mut Config, addresses: &[Address]) -> anyhow::Result<()> {
        let told = self.crc.is_some() || self.fpdu.is_some();
        ensure!(
            !told || addresses.iter().any(|address| matches!(address, Address::Iwarp(_))),
            "--crc and --fpdu are about iwarp: addresses, and {} is none",
            addresses.iter().map(Address::to_string).collect::<Vec<_>>().join(", ")
        );
        (config.iwarp.crc, config.debug.fpdu_size) = (self.crc.unwrap_or_default(), self.fpdu.unwrap_or_default());
        Ok(())
    }
}
