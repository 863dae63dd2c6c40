//! `rpcrdma` as users run it.

use std::process::{Command, Stdio};

/// Runs a command of it to its end. Returns exit status, standard output, standard error.
pub(crate) fn rpcrdma(command: &str, arguments: &[&str]) -> (i32, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_rpcrdma"))
        .arg(command)
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .expect("the binary runs");
    let text = |bytes| String::from_utf8(bytes).expect("text");
    (output.status.code().expect("no signal"), text(output.stdout), text(output.stderr))
}
