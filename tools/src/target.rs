//! What `doctor` and `topo` look at: an address of any fabric, and a machine.

use std::net::IpAddr;
use std::path::PathBuf;
use std::str::FromStr;

use rpcrdma::fabric::{FabricAddress, FabricError, host};
use rpcrdma::{Address, AddressError};
use rpcrdma_host::{CoreList, Fabric, Question, Scene, Tree};

use crate::command::CommandError;

/// An address of any fabric, also of one that this build does not drive: files are read in any case.
#[derive(Clone, Debug)]
pub struct Target {
    text: String,
    fabric: Option<Fabric>,
    /// With the host to look up, if there is one.
    address: Address,
}

impl FromStr for Target {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        // Host and port of devices are written as those of TCP.
        let address: Address = match text.strip_prefix("verbs:") {
            Some(rest) => format!("iwarp:{}", rest.split_once('@').map_or(rest, |(_, host)| host)).parse()?,
            None => text.parse()?,
        };
        let scheme = text.split_once(':').map_or(text, |(scheme, _)| scheme);
        let fabric = Fabric::of_scheme(scheme);
        Ok(Self { text: text.to_owned(), fabric, address })
    }
}

impl Target {
    /// As given.
    pub(crate) fn text(&self) -> &str {
        &self.text
    }

    /// The RDMA device that it names.
    fn device(&self) -> Result<Option<String>, CommandError> {
        let Some(rest) = self.text.strip_prefix("verbs:") else { return Ok(None) };
        let (named, _) = host::split_device(&FabricAddress(rest.to_owned())).map_err(failed)?;
        Ok(named.map(|named| named.name))
    }

    fn ip(&self) -> Result<Option<IpAddr>, CommandError> {
        let found = self.address.socket_address().map_err(failed)?;
        Ok(found.map(|at| at.ip()))
    }
}

fn failed(error: FabricError) -> CommandError {
    CommandError::Failed(error.to_string())
}

/// The machine to look at.
#[derive(clap::Args, Clone, Debug)]
pub struct Machine {
    /// A directory with proc, sys and dev to look at instead of this machine's
    #[arg(long, value_name = "DIRECTORY", default_value = "/")]
    root: PathBuf,
}

impl Machine {
    /// It, before this question.
    pub(crate) fn scene(&self, target: Option<&Target>, cores: Option<CoreList>) -> Result<Scene, CommandError> {
        let name = self.root.display().to_string();
        let error = |reason| CommandError::Input { name, reason };
        match self.root.metadata() {
            Err(cause) => return Err(error(cause.to_string())),
            Ok(root) if !root.is_dir() => return Err(error("no directory".to_owned())),
            Ok(_) => {}
        }
        let ip = target.map(Target::ip).transpose()?.flatten();
        let device = target.map(Target::device).transpose()?.flatten();
        let question = Question { fabric: target.and_then(|target| target.fabric), ip, device, cores };
        Ok(Scene::new(Tree::new(&self.root), question))
    }
}
