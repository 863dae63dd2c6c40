//! Runs the program `rpcrdma`.

use std::process::{Command, Stdio};

/// Runs a subcommand to its end. Returns exit status, standard output and standard error.
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

#[test]
fn the_long_version_lists_commit_features_fabrics_and_protocols() {
    let (status, short, _) = rpcrdma("-V", &[]);
    assert_eq!((status, short.lines().collect::<Vec<_>>()), (0, vec![concat!("rpcrdma ", env!("CARGO_PKG_VERSION"))]));
    let (status, long, _) = rpcrdma("--version", &[]);
    let keys: Vec<&str> = long.lines().skip(1).map(|line| line.split(": ").next().unwrap_or_default()).collect();
    assert_eq!((status, keys), (0, vec!["commit", "features", "fabrics", "protocols"]), "{long}");
    assert!(long.starts_with(&short) && long.contains("\nfabrics: soft, iwarp"), "{long}");
}
