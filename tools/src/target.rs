//! Arguments of both `doctor` and `topo`: an address and a machine.

use std::error::Error;
use std::net::IpAddr;
use std::path::PathBuf;
use std::str::FromStr;

use rpcrdma::Address;
use rpcrdma::fabric::{FabricAddress, host};
use rpcrdma_host::{CheckContext, CoreList, Fabric, PlannedServer, Tree};

use crate::command::CommandError;

/// An address of any fabric, including fabrics that this build does not support.
#[derive(Clone, Debug)]
pub struct Target {
    text: String,
    fabric: Option<Fabric>,
    /// The RDMA device in the address.
    device: Option<String>,
    /// The address. For verbs, it is an iwarp address with the same host and port.
    address: Address,
}

impl FromStr for Target {
    type Err = Box<dyn Error + Send + Sync>;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (named, address) = match text.strip_prefix("verbs:") {
            Some(rest) => {
                let (named, at) = host::split_device(&FabricAddress(rest.to_owned()))?;
                // Host and port of a verbs address have the syntax of an iwarp address.
                (named, format!("iwarp:{}", at.0).parse()?)
            }
            None => (None, text.parse()?),
        };
        let scheme = text.split_once(':').map_or(text, |(scheme, _)| scheme);
        let fabric = Fabric::from_scheme(scheme);
        Ok(Self { text: text.to_owned(), fabric, device: named.map(|named| named.name), address })
    }
}

impl Target {
    /// The address as it was given.
    pub(crate) fn text(&self) -> &str {
        &self.text
    }

    fn ip(&self) -> Result<Option<IpAddr>, CommandError> {
        let found = self.address.socket_address().map_err(|error| CommandError::Failed(error.to_string()))?;
        Ok(found.map(|at| at.ip()))
    }
}

/// The machine to check.
#[derive(clap::Args, Clone, Debug)]
pub struct Machine {
    /// Directory with proc, sys and dev to read instead of this machine's
    #[arg(long, value_name = "DIRECTORY", default_value = "/")]
    root: PathBuf,
}

impl Machine {
    /// Reads the machine, for checks of a server with this address and these cores.
    pub(crate) fn context(
        &self,
        target: Option<&Target>,
        cores: Option<CoreList>,
    ) -> Result<CheckContext, CommandError> {
        let name = self.root.display().to_string();
        let error = |reason| CommandError::Input { name, reason };
        match self.root.metadata() {
            Err(cause) => return Err(error(cause.to_string())),
            Ok(root) if !root.is_dir() => return Err(error("not a directory".to_owned())),
            Ok(_) => {}
        }
        let ip = target.map(Target::ip).transpose()?.flatten();
        let device = target.and_then(|target| target.device.clone());
        let server = PlannedServer { fabric: target.and_then(|target| target.fabric), ip, device, cores };
        Ok(CheckContext::new(Tree::new(&self.root), server))
    }
}
