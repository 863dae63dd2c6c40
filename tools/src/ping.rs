//! `rpcrdma ping`: makes NULL calls to a server and measures round-trip times.

mod report;

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rpcrdma::client::{ClientCall, ClientConfig};
use rpcrdma::config::{ConnectConfig, Crc, DebugConfig, FpduSize, IwarpConfig, LimitsConfig, MemoryConfig, WireConfig};
use rpcrdma::mempool::PagePolicy;
use rpcrdma::{Address, CallError, Config, CreditMode, LocalClient};
use rpcrdma_config::{HOST_KEY_ID, HostKeyArgs};
use rpcrdma_rpcbind::{self as rpcbind, Transport};
use signal_hook::consts::{SIGINT, SIGTERM};

use crate::command::{CommandError, ExitStatus, Outcome, parse_seconds, parse_time_limit};
use report::Report;

/// Default program and version: NFS version 3.
const NFS: (u32, u32) = (100_003, 3);
/// Procedure 0 of every program, without arguments and results (RFC 5531 §12.1).
const NULL: u32 = 0;
/// Expected length of results, in bytes, for which a call offers a Reply chunk in either protocol version.
const LONG_REPLY: usize = 16 << 10;
/// Longest sleep between two checks for signals.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);
/// Time for which a call polls for its reply before it sleeps.
const SPIN: Duration = Duration::from_micros(100);

/// Call a server's NULL procedure and print its protocol version, credits and round-trip times
///
/// Makes one call after another on one connection. Each call is timed from before its encoding until its reply has been
/// read. The first call is not timed: it offers a Reply chunk, which shows whether the server uses the chunk and
/// invalidates its handle.
///
/// A lost connection is reopened. Without a count, calls continue until SIGINT (Ctrl-C) or SIGTERM.
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = "\
Examples:
  rpcrdma ping verbs:10.0.0.1                     # NFS version 3, at port 20049
  rpcrdma ping -c 1000 -i 0 -q verbs:10.0.0.1     # round trips, back to back
  rpcrdma ping --rpcbind verbs:10.0.0.1 100003 3
  rpcrdma ping -c 3 soft:demo 0x20000001 1
  rpcrdma ping -c 3 --crc always iwarp:10.0.0.1   # over plain TCP, each FPDU with a CRC

Exit status: 0 every call was answered, 1 some were not or there was no connection, 2 wrong usage.")]
pub struct Args {
    /// Address of the server: soft:NAME, iwarp:HOST:PORT, or verbs:HOST:PORT (feature verbs); the port is optional
    pub address: Address,

    /// Program number, decimal or 0x…
    #[arg(default_value_t = NFS.0, value_parser = parse_number, value_name = "PROGRAM")]
    pub program: u32,

    /// Program version
    #[arg(default_value_t = NFS.1, value_parser = parse_number, value_name = "VERSION")]
    pub program_version: u32,

    /// Get the port from rpcbind on the server's host instead of ADDRESS
    #[arg(long)]
    pub rpcbind: bool,

    /// Number of calls [default: until interrupted]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub count: Option<u64>,

    /// Seconds from the start of one call to the start of the next; 0 for calls without pauses
    #[arg(short, long, value_name = "SECONDS", default_value = "1", value_parser = parse_seconds)]
    pub interval: Duration,

    /// Seconds to wait for a connection, and for each reply
    #[arg(short = 'W', long, value_name = "SECONDS", default_value = "5", value_parser = parse_time_limit)]
    pub timeout: Duration,

    /// Initial RPC-over-RDMA version; from 2, falls back to 1 if the server does not support it
    #[arg(long, value_name = "1|2", default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=2))]
    pub rdma_version: u8,

    /// Do not let the server invalidate handles (Send With Invalidate)
    #[arg(long)]
    pub no_invalidate: bool,

    /// Omit the first call, which offers a Reply chunk
    #[arg(long)]
    pub no_chunk: bool,

    /// iWARP: CRC-32C of each FPDU: never, if the server requests it, or always (default: if-asked)
    #[arg(long, value_name = "never|if-asked|always")]
    pub crc: Option<Crc>,

    /// iWARP: FPDUs that fit a TCP segment, or as long as the format allows (default: auto, by the server)
    #[arg(long, value_name = "auto|segment|longest")]
    pub fpdu: Option<FpduSize>,

    /// Host key, if the server requires one
    #[command(flatten)]
    pub host_key: HostKeyArgs,

    /// Do not print a line per call
    #[arg(short, long)]
    pub quiet: bool,

    /// Print one JSON object, at the end, and nothing else
    ///
    /// Keys: address, program, version, rdma_version, inline_send, inline_receive (bytes), credits, credits_at_start,
    /// connections, reply_chunk (used, inline, failed or none), invalidated_by_server, invalidated_here, calls,
    /// answered, failed, errors; rtt_us: min, mean, p50, p90, p99, p99.9, max (microseconds).
    #[arg(long)]
    pub json: bool,
}

fn parse_number(text: &str) -> Result<u32, String> {
    match text.strip_prefix("0x") {
        Some(hex) => u32::from_str_radix(hex, 16),
        None => text.parse(),
    }
    .map_err(|error| error.to_string())
}

/// Runs the command.
pub fn run(args: &Args) -> Outcome {
    if (args.crc.is_some() || args.fpdu.is_some()) && !matches!(args.address, Address::Iwarp(_)) {
        let text = format!("--crc and --fpdu need an iwarp: address, not {}", args.address);
        return Err(CommandError::Usage(text));
    }
    let address = locate(args)?;
    let mut config = config(args);
    let policy = args.host_key.policy(HOST_KEY_ID);
    config.shard.wire.host_auth = policy.map_err(|error| CommandError::Failed(format!("{error:#}")))?;
    let mut client = LocalClient::connect(&address, config).map_err(failed)?;
    // Until here, a signal ends the process. From here on, it ends the calls, and the results are printed.
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(&stop))?;
    }
    let mut report = Report::new(args, &address);
    report.record_terms(&client);
    if !args.no_chunk
        && let Some(used) = offer_chunk(&mut client, args, &stop)
    {
        report.record_chunk(used);
    }
    report.record_terms(&client);
    let mut out = io::stdout().lock();
    let prints_calls = !args.json && !args.quiet;
    if !args.json {
        writeln!(out, "{}", report.head())?;
    }
    while args.count.is_none_or(|count| report.calls < count) && !stop.load(Ordering::Relaxed) {
        let begun = Instant::now();
        let Some(outcome) = call(&mut client, args, None, &stop) else { break };
        let outcome = outcome.map(|()| begun.elapsed());
        report.record_terms(&client);
        report.record_call(&outcome);
        if prints_calls {
            writeln!(out, "{}", report.line(&outcome))?;
        }
        // The client does not reconnect, for example because the restarted server now requires a host key.
        if client.close_reason(client.first()).is_some() {
            break;
        }
        if args.count.is_none_or(|count| report.calls < count) {
            wait_until(&mut client, begun + args.interval, &stop);
        }
    }
    report.stats = Some(client.stats());
    if args.json {
        writeln!(out, "{}", report.json())?;
    } else {
        write!(out, "{}", report.summary())?;
    }
    Ok(if report.has_all_answers() { ExitStatus::Success } else { ExitStatus::Failures })
}

fn failed(error: impl std::error::Error) -> CommandError {
    CommandError::Failed(error.to_string())
}

/// Returns the server's address, with the port from rpcbind if requested.
fn locate(args: &Args) -> Result<Address, CommandError> {
    let Args { address, program, program_version, timeout, .. } = args;
    if !args.rpcbind {
        return Ok(address.clone());
    }
    let Some(host) = address.socket_address().map_err(failed)? else {
        return Err(CommandError::Failed(format!("--rpcbind applies only to network addresses, not to {address}")));
    };
    rpcbind::locate(host.ip(), Transport::Rdma, *program, *program_version, *timeout)
        .map(|found| address.with_socket_address(found))
        .map_err(failed)
}

/// Returns the configuration of a small shard for one call at a time.
fn config(args: &Args) -> ClientConfig {
    let shard = Config {
        wire: WireConfig {
            credit_mode: if args.rdma_version == 1 { CreditMode::V1 } else { CreditMode::V2Windowed },
            ..WireConfig::default()
        },
        memory: MemoryConfig {
            // These suffice for 128 credits, so that they do not limit the server's grant.
            receives: 1280,
            small_buffers: 64,
            message_buffers: 64,
            bulk_buffers: vec![(2 * LONG_REPLY, 2)],
            long_buffers: Vec::new(),
            pages: PagePolicy::Small,
            ..MemoryConfig::default()
        },
        limits: LimitsConfig { credits: 128, max_credits: 128, ..LimitsConfig::default() },
        iwarp: IwarpConfig { crc: args.crc.unwrap_or_default(), ..IwarpConfig::default() },
        debug: DebugConfig {
            fpdu_size: args.fpdu.unwrap_or_default(),
            remote_invalidate: !args.no_invalidate,
            ..DebugConfig::default()
        },
        ..Config::default()
    };
    let config = ClientConfig::new(args.program, args.program_version);
    // The client reconnects to a restarted server.
    let connect = ConnectConfig { timeout: args.timeout, reconnect_attempts: u32::MAX, ..ConnectConfig::default() };
    ClientConfig { shard, connect, ..config }
}

/// Makes a NULL call that expects a reply of up to `longest_reply` bytes. Returns `None` if a signal ends the wait.
fn call(
    client: &mut LocalClient,
    args: &Args,
    longest_reply: Option<usize>,
    stop: &AtomicBool,
) -> Option<Result<(), CallError>> {
    let call = match client.prepare(NULL, 0) {
        Ok(call) => call.timeout(args.timeout),
        Err(error) => return Some(Err(error)),
    };
    let call = longest_reply.into_iter().fold(call, ClientCall::expect_reply);
    let begun = Instant::now();
    client.start(client.first(), call, 0);
    let mut outcome = None;
    while !stop.load(Ordering::Relaxed) {
        client.poll(|done| outcome = Some(done.result.map(drop).map_err(CallError::from)));
        if outcome.is_some() {
            return outcome;
        }
        if begun.elapsed() >= SPIN {
            client.wait(CHECK_INTERVAL);
        }
    }
    None
}

/// Makes a NULL call that offers a Reply chunk. Returns whether the server used it.
fn offer_chunk(client: &mut LocalClient, args: &Args, stop: &AtomicBool) -> Option<Result<bool, CallError>> {
    let before = client.stats().messages.long_received;
    let outcome = call(client, args, Some(LONG_REPLY), stop)?;
    Some(outcome.map(|()| client.stats().messages.long_received > before))
}

/// Waits until `until` or a signal, while it polls the connection.
fn wait_until(client: &mut LocalClient, until: Instant, stop: &AtomicBool) {
    while !stop.load(Ordering::Relaxed) {
        let remaining = until.saturating_duration_since(Instant::now());
        client.poll(|_| ());
        if remaining.is_zero() {
            return;
        }
        client.wait(remaining.min(CHECK_INTERVAL));
    }
}

#[cfg(test)]
mod tests {
    use clap::{Command, FromArgMatches};

    use super::*;

    /// Returns the fabric's CRC and FPDU settings for these options.
    fn iwarp_settings(options: &[&str]) -> (Crc, FpduSize) {
        let command = <Args as clap::Args>::augment_args(Command::new("ping"));
        let matches = command.get_matches_from([&["ping", "iwarp:x"], options].concat());
        let fabric = config(&Args::from_arg_matches(&matches).expect("all of them")).shard.iwarp();
        (fabric.crc, fabric.fpdu_size)
    }

    /// The messages of ping fit any FPDU, so its packets do not show the option.
    #[test]
    fn iwarp_options_configure_the_fabric() {
        assert_eq!(iwarp_settings(&[]), (Crc::IfAsked, FpduSize::Auto));
        assert_eq!(iwarp_settings(&["--crc", "never", "--fpdu", "segment"]), (Crc::Never, FpduSize::Segment));
    }
}
