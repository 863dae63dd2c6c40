//! `serve`: the other side of all tests.
#![forbid(unsafe_code)]

use rpcrdma::fabric::{Fabric, FabricAddress};

use crate::cli::ServeArgs;
use crate::fabrics::{self, Address};
use crate::failure::Failure;
use crate::idle::Idler;
use crate::pin::{self, Placement};
use crate::process;
use crate::raw::{RawServer, ServerInfo};

/// Serves until killed.
pub(crate) fn run(args: &ServeArgs) -> Result<(), Failure> {
    if let Some(parent) = args.parent {
        process::follow(parent)?;
    }
    let address = Address::parse(&args.listen)?;
    let placement = Placement::decide(args.cores)?;
    let core = args.cores.map_or(placement.server, |cores| cores.server.unwrap_or(cores.client));
    pin::pin(core)?;
    let idler = Idler::new(args.idle, placement.shared);
    let note = format!("core {core}, idle policy {}", args.idle.name());
    match address.raw() {
        Address::Software(raw) => {
            let fabric = listening(fabrics::software(args.idle)?, &raw)?;
            process::announce(&args.listen, &note);
            let says = ServerInfo { core: core as u32, idle: args.idle };
            RawServer::new(fabric, says, idler).run()
        }
    }
}

fn listening<F: Fabric>(mut fabric: F, address: &FabricAddress) -> Result<F, Failure> {
    let listener = F::bind(address).map_err(|e| Failure::run("listen", e))?;
    fabric.listen(&listener).map_err(|e| Failure::run("listen", e))?;
    Ok(fabric)
}
