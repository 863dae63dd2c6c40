//! Faults of the installed library.

use rpcrdma_host::Status::Warning;

use super::{Fault, unfixable};
use crate::machines::Machine;

const DIRECTORY: &str = "/usr/local/lib";

pub(super) const FAULTS: &[Fault] = &[
    unfixable(
        "library",
        None,
        "1-3",
        |m| {
            install(m, "0.0.9");
            m.file("/etc/ld.so.cache", format!("ld.so-1.7.0\0librpcrdma.so.0\0{DIRECTORY}/librpcrdma.so.0\0"));
        },
        Warning,
        "apt-get install librpcrdma0",
    ),
    unfixable(
        "library",
        None,
        "1-3",
        |m| {
            install(m, "0.1.0");
            m.file("/etc/ld.so.cache", "ld.so-1.7.0\0libc.so.6\0/lib/libc.so.6\0");
        },
        Warning,
        "ldconfig",
    ),
];

/// Installs a version of the library.
fn install(machine: &Machine, version: &str) {
    let file = format!("librpcrdma.so.{version}");
    machine.file(&format!("{DIRECTORY}/{file}"), "").link(&format!("{DIRECTORY}/librpcrdma.so.0"), &file);
}
