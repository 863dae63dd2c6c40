//! An NFS version 4.1 client that answers callbacks of its server.
//!
//! It opens a file, obtains a delegation, and waits until the server recalls the delegation. The recall is a call in
//! the reverse direction on the client's connection (RFC 8167). Then the client returns the delegation.
//!
//! ```text
//! cargo run --release -p rpcrdma-tests --features verbs --bin nfs41c -- verbs:10.0.0.1 file
//! ```
//!
//! | module | contents |
//! |---|---|
//! | `session` | a session with a back channel, and its operations |
//! | `callback` | the callback program |
//! | `protocol` | types of `nfs41.x` |
#![forbid(unsafe_code)]

mod callback;
mod session;

#[expect(unreachable_pub, dead_code, reason = "generated for any module")]
mod protocol {
    include!(concat!(env!("OUT_DIR"), "/nfs41.rs"));
}

use std::io::Write;
use std::process::ExitCode;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure};
use clap::Parser;
use rpcrdma::client::{ClientConfig, Credential};
use rpcrdma::config::{DebugConfig, WireConfig};
use rpcrdma::{Address, Config, CreditMode, LocalClient};

use callback::CallbackEvent;
use protocol::nfs_v4;
use session::Session;

/// Opens a file of an NFS 4.1 server for reading, and holds its delegation until the server recalls it
#[derive(Debug, Parser)]
#[command(name = "nfs41c")]
struct Cli {
    /// Server: verbs:HOST[:PORT], iwarp:HOST[:PORT], soft:NAME
    server: Address,
    /// Path of the file, from the server's root
    path: String,
    /// First RPC-over-RDMA version; with 2, the client falls back to version 1 if the server requires it
    #[arg(long, value_name = "1|2", default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=2))]
    rdma_version: u8,
    /// Seconds to wait for the recall
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    wait: u64,
}

fn main() -> ExitCode {
    match run(&Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("nfs41c: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Cli) -> anyhow::Result<()> {
    let (sender, events) = mpsc::channel();
    let (uid, gid) = (rustix::process::getuid(), rustix::process::getgid());
    let mut config = ClientConfig::new(nfs_v4::PROGRAM, nfs_v4::VERSION);
    config.shard = Config {
        wire: WireConfig {
            credit_mode: if options.rdma_version == 1 { CreditMode::V1 } else { CreditMode::V2Windowed },
            ..config.shard.wire
        },
        debug: DebugConfig {
            // Each outstanding call of the server takes a slot of the session and a credit.
            reverse_credits: session::BACK_SLOTS,
            ..config.shard.debug
        },
        ..config.shard
    };
    config.credential = Credential::sys("nfs41c", uid.as_raw(), gid.as_raw(), &[])
        .map_err(|_| anyhow::anyhow!("the credential is too long"))?;
    config.services = Some(callback::services(sender));
    let client = LocalClient::connect(&options.server, config)?;
    let mut session = Session::create(client, uid.as_raw(), gid.as_raw())?;
    print_line(&format!("session of RPC-over-RDMA version {}, with a back channel", session.rdma_version()));
    let file = session.open(&options.path)?;
    let Some(delegation) = file.delegation else { bail!("{} was opened without a delegation", options.path) };
    print_line(&format!("delegated {}", options.path));

    let end = Instant::now() + Duration::from_secs(options.wait);
    loop {
        session.poll();
        match events.try_recv() {
            Ok(CallbackEvent::Sequence { slot, sequence }) => {
                print_line(&format!("CB_SEQUENCE {sequence} of slot {slot}"))
            }
            Ok(CallbackEvent::Recall(stateid)) => {
                print_line("CB_RECALL");
                ensure!(stateid == delegation, "the server recalls a delegation that this client does not hold");
                break;
            }
            Ok(CallbackEvent::Other(operation)) => {
                print_line(&format!("callback operation {operation} is not supported"))
            }
            Err(_) => {}
        }
        ensure!(Instant::now() < end, "no recall within {} s", options.wait);
    }
    session.return_delegation(&file.handle, delegation)?;
    print_line("returned the delegation");
    session.close(&file)?;
    let (calls, rejected) = session.end()?;
    print_line(&format!("{calls} calls made and served, {rejected} messages rejected"));
    Ok(())
}

/// Prints a line on standard output, and flushes it.
fn print_line(line: &str) {
    let mut out = std::io::stdout();
    // A closed pipe must not stop the client.
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}
