//! Common arguments of `doctor` and `topo`: an address and a machine.

use std::error::Error;
use std::net::IpAddr;
use std::path::PathBuf;
use std::str::FromStr;

use rpcrdma::Address;
use rpcrdma::fabric::{FabricAddress, host};
use rpcrdma_host::{CoreList, Fabric, Question, Scene, Tree};

use crate::command::CommandError;

/// An address of any fabric, including those that this build does not drive.
#[derive(Clone, Debug)]
pub struct Target {
    text: String,
    fabric: Option<Fabric>,
    /// The RDMA device in the address.
    device: Option<String>,
    /// With the host to look up, if there is one.
    address: Address,
}

impl FromStr for Target {
    type Err = Box<dyn Error + Send + Sync>;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (named, address) = match text.strip_prefix("verbs:") {
            Some(rest) => {
                let (named, at) = host::split_device(&FabricAddress(rest.to_owned()))?;
                // Host and port of devices have the syntax of TCP's.
                (named, format!("iwarp:{}", at.0).parse()?)
            }
            None => (None, text.parse()?),
        };
        let scheme = text.split_once(':').map_or(text, |(scheme, _)| scheme);
        let fabric = Fabric::of_scheme(scheme);
        Ok(Self { text: text.to_owned(), fabric, device: named.map(|named| named.name), address })
    }
}

impl Target {
    /// As given.
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
    /// A directory with proc, sys and dev to read instead of this machine's
    #[arg(long, value_name = "DIRECTORY", default_value = "/")]
    root: PathBuf,
}

impl Machine {
    /// The machine, seen from this address and these cores.
    pub(crate) fn scene(&self, target: Option<&Target>, cores: Option<CoreList>) -> Result<Scene, CommandError> {
        let name = self.root.display().to_string();
        let error = |reason| CommandError::Input { name, reason };
        match self.root.metadata() {
            Err(cause) => return Err(error(cause.to_string())),
            Ok(root) if !root.is_dir() => return Err(error("no directory".to_owned())),
            Ok(_) => {}
        }
        let ip = target.map(Target::ip).transpose()?.flatten();
        let device = target.and_then(|target| target.device.clone());
        let question = Question { fabric: target.and_then(|target| target.fabric), ip, device, cores };
        Ok(Scene::new(Tree::new(&self.root), question))
    }
}
