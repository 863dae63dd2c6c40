//! Description of a machine, and checks for a data plane on it.
//!
//! Everything is read from `/proc`, `/sys` and `/dev` below any root directory, so a test, or a copy of another
//! machine's files, can stand for a machine. The crate writes nothing, runs nothing, and needs no privilege.
//!
//! | file | contents |
//! | --- | --- |
//! | [`tree`] | the files, the only source of information |
//! | [`cores`] | sets of core numbers, in the kernel's notation |
//! | `process` | limits, capabilities and cores of this process |
//! | `cgroup` | control groups of this process, versions 1 and 2 |
//! | [`topology`] | NUMA nodes, cores, their siblings and caches |
//! | [`devices`] | RDMA devices with their ports and GIDs, network cards, NVMe devices |
//! | `route` | the interface on the route to an address |
//! | [`context`] | a machine and a planned server, the input of checks |
//! | [`check`] | checks and their findings |
//! | `fix` | commands that fix findings |
//! | [`checks`] | all checks |
//! | [`plan`] | placement of shards and workers on cores |
//! | [`logger`] | a program's log on standard error |
#![forbid(unsafe_code)]

mod cgroup;
pub mod check;
pub mod checks;
pub mod context;
pub mod cores;
pub mod devices;
mod fix;
pub mod logger;
pub mod plan;
mod process;
mod route;
pub mod topology;
pub mod tree;

pub use check::{Check, Finding, Status};
pub use context::{CheckContext, Fabric, PlannedServer};
pub use cores::CoreList;
pub use topology::Topology;
pub use tree::{ReadError, Tree};
