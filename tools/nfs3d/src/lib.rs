//! The NFS server `nfs3d`.
//!
//! The types of NFS and MOUNT version 3 (RFC 1813) are generated from `.x` files. `nfs3c` and tests use them, too.
//!
//! | file | holds |
//! |---|---|
//! | `nfs` | procedures and their threads |
//! | `pool`, `shares` | worker threads, and each client's share of them |
//! | `attribute_procedures`, `dirs`, `create`, `remove`, `links`, `read_write` | implementations of procedures |
//! | `mount`, `connections` | MOUNT version 3, on TCP |
//! | `export` | files by handle and by name |
//! | `handles`, `names`, `sys` | file handles that survive a restart; `sys` has the only unsafe code |
//! | `node`, `cache` | open files |
//! | `descriptors` | shares of the process's descriptors |
//! | `identity` | user and groups of a call |
//! | `daemon`, `main` | the program `nfs3d` |
//! | `bin` | `nfs3c`, a client without a mount |
//! | `iwarp` | iWARP options of `nfs3c` and `nfs3d` |
//! | `attr`, `status` | conversion of attributes and errors |
//! | `lines`, `lock` | rate-limited log lines, locks |
#![deny(unsafe_code)]
#![warn(clippy::print_stderr)]
#![expect(clippy::result_large_err, reason = "failures carry attributes, as results do")]

mod attr;
mod attribute_procedures;
mod cache;
mod connections;
mod create;
pub mod daemon;
mod descriptors;
mod dirs;
mod export;
mod handles;
mod identity;
mod iwarp;
mod lines;
mod links;
mod lock;
pub mod mount;
mod names;
pub mod nfs;
mod node;
mod pool;
mod read_write;
mod remove;
mod shares;
mod status;
mod sys;

pub use export::{Export, Options};
pub use handles::{HandleSource, Key};
pub use identity::{Policy, Squash};
pub use iwarp::IwarpOptions;
pub use pool::Pool;

/// NFS version 3.
pub mod nfs3 {
    include!(concat!(env!("OUT_DIR"), "/nfs3.rs"));
}

/// MOUNT version 3.
pub mod mount3 {
    include!(concat!(env!("OUT_DIR"), "/mount.rs"));
}

use nfs3::{Sattr3, SetAtime, TimeHow};

/// Attributes of a SETATTR that sets none.
pub const UNCHANGED: Sattr3 = Sattr3 {
    mode: None,
    uid: None,
    gid: None,
    size: None,
    atime: SetAtime::Default(TimeHow::DontChange),
    mtime: SetAtime::Default(TimeHow::DontChange),
};
