//! Version, output and end of programs, alike in all of them.

use std::fmt::Display;
use std::io::Write;
use std::process::ExitCode;
use std::sync::LazyLock;
use std::time::Duration;

use anyhow::Context;
use rpcrdma::server::ServerConfig;
use rpcrdma::{Address, Server};

/// First word on standard output once clients may connect.
pub const READY: &str = "listening";
/// Time limit of a drain.
const DRAIN: Duration = Duration::from_secs(10);

/// Text of `--version`, without the program's name: version, commit, features, fabrics, protocols.
pub static VERSION: LazyLock<String> = LazyLock::new(|| {
    let (version, commit) = (env!("CARGO_PKG_VERSION"), env!("RPCRDMA_COMMIT"));
    let (features, verbs) = if "verbs:host".parse::<Address>().is_ok() { ("verbs", ", verbs") } else { ("none", "") };
    format!(
        "{version}\ncommit: {commit}\nfeatures: {features}\nfabrics: soft, iwarp{verbs}\nprotocols: RPC-over-RDMA 1, 2"
    )
});

/// Prints a line, even without a reader.
pub fn say(line: &str) {
    let mut out = std::io::stdout();
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}

/// Exit code of a program. Prints its error on standard error, behind `prefix`.
pub fn exit(prefix: &str, outcome: Result<(), impl Display>) -> ExitCode {
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{prefix}: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// First address of a server, and its shards: one per core, or per address without `cores`.
///
/// # Errors
/// No address, or an address without a core.
pub fn shards<'a>(listen: &'a [Address], cores: &[usize]) -> anyhow::Result<(&'a Address, ServerConfig)> {
    let (first, others) = listen.split_first().context("--listen: no address")?;
    let (count, addresses) = (cores.len(), listen.len());
    let few = format!("--cores: {count} cores for the {addresses} addresses of --listen");
    anyhow::ensure!(count == 0 || count >= addresses, few);
    let shards = if count == 0 { addresses } else { count };
    let (cores, more_addresses) = ((count > 0).then(|| cores.to_vec()), others.to_vec());
    Ok((first, ServerConfig { shards, cores, more_addresses, ..ServerConfig::default() }))
}

/// Drains a server for at most 10 seconds. Returns a line about its calls.
pub fn drain(server: Server) -> String {
    let before = server.stats();
    let (drained, stats) = match server.drain(DRAIN) {
        Ok(stats) => ("drained".to_owned(), stats),
        Err(left) => (left.to_string(), before),
    };
    let sum = |name| stats.iter().filter_map(|shard| shard.get(name)).sum::<u64>();
    let (calls, failed, put_off) = (sum("calls"), sum("calls_failed"), sum("calls_shed"));
    format!("{drained}; {calls} calls served, {failed} refused, {put_off} left to be sent again")
}
