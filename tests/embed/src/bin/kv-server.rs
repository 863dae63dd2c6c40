//! Serves a directory until end of standard input: `kv-server ADDRESS DIRECTORY`.
//!
//! Exits with status 77 if io_uring is not available.

use std::error::Error;
use std::io::Read;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

/// Number of shards. Each has one thread and one log.
const SHARDS: usize = 2;
/// Exit status for a missing kernel feature.
const SKIPPED: u8 = 77;

fn main() -> Result<ExitCode, Box<dyn Error + Send + Sync>> {
    let arguments: Vec<_> = std::env::args().collect();
    let [_, address, directory] = &arguments[..] else { return Err("usage: kv-server ADDRESS DIRECTORY".into()) };
    if let Err(error) = rpcrdma_embed::server::probe() {
        eprintln!("kv-server: io_uring is not available ({error}): see `sysctl kernel.io_uring_disabled`, and seccomp");
        return Ok(SKIPPED.into());
    }
    let server = rpcrdma_embed::server::start(&address.parse()?, Path::new(directory), SHARDS)?;
    println!("ready");
    std::io::stdin().read_to_end(&mut Vec::new())?;
    server.drain(Duration::from_secs(10))?;
    Ok(ExitCode::SUCCESS)
}
