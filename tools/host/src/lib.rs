//! Description of a machine, and checks for a data plane on it.
//!
//! Everything is read from `/proc`, `/sys` and `/dev` below any root. So a test, or a copy of another machine's files,
//! can stand for a machine. The crate writes nothing, runs nothing, and needs no privilege.
//!
//! | file | what |
//! | --- | --- |
//! | [`tree`] | the files, the only source of information |
//! | [`cores`] | sets of core numbers, in the kernel's notation |
//! | `process` | this process: its limits, capabilities and cores |
//! | `cgroup` | its control groups, of version 1 and 2 |
//! | [`topology`] | nodes, cores, their siblings and caches |
//! | [`devices`] | RDMA devices with their ports and GIDs, network cards, NVMe devices |
//! | `route` | the interface on the route to an address |
//! | [`scene`] | a question about a machine, and the data for it |
//! | [`check`] | checks and their findings |
//! | `fix` | commands that fix findings |
//! | [`checks`] | all checks |
//! | [`plan`] | shards and workers on cores |
//! | [`logger`] | a program's log on standard error |
#![forbid(unsafe_code)]

mod cgroup;
pub mod check;
pub mod checks;
pub mod cores;
pub mod devices;
mod fix;
pub mod logger;
pub mod plan;
mod process;
mod route;
pub mod scene;
pub mod topology;
pub mod tree;

pub use check::{Check, Finding, Status};
pub use cores::CoreList;
pub use scene::{Fabric, Question, Scene};
pub use topology::Topology;
pub use tree::{Tree, Unseen};
