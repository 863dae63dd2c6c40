//! What a machine is, and what of it stands in a data plane's way: read from `/proc`, `/sys` and `/dev` below any
//! root, so that a test, or a copy of another machine's files, can stand for a machine. Nothing is written, nothing
//! is run, and no privilege is asked for.
//!
//! | file | what |
//! | --- | --- |
//! | [`tree`] | the files: all that is known of a machine comes from there |
//! | [`cores`] | sets of core numbers, as the kernel writes them |
//! | `process` | this process: its limits, capabilities and cores |
//! | `cgroup` | the control groups that it is in, of version 1 and 2 |
//! | [`topology`] | nodes, cores, their siblings and caches |
//! | [`devices`] | RDMA devices with their ports and GIDs, network cards, NVMe devices |
//! | `route` | the interface on the way to an address |
//! | [`scene`] | what is asked of a machine, and what was read of it once |
//! | [`check`] | what a check is, and what it finds |
//! | `fix` | the commands that mend what was found |
//! | [`checks`] | all checks |
//! | [`plan`] | shards and workers on cores |
//! | [`logger`] | the log of a program, on standard error |
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
