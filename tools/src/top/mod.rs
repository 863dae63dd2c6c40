//! `rpcrdma top`: shows a running server's statistics in a terminal.
//!
//! | file | contents |
//! | --- | --- |
//! | `model` | rates between two snapshots |
//! | `tables` | rates as text of a given width |
//! | `draw` | drawing of the screen |
//! | `terminal` | keys, size and end of the screen |

mod draw;
mod model;
mod tables;
mod terminal;

use std::io::{self, IsTerminal, Write};
use std::path::PathBuf;
use std::time::Duration;

use rpcrdma_config::print_error;

use crate::command::{CommandError, ExitStatus, Outcome, parse_seconds};
use crate::{stats_socket, units};
use draw::Tab;
use model::{Model, View};
use tables::Table;

/// Width of output other than a terminal.
const PLAIN_WIDTH: usize = 200;

/// Maximum snapshots that [`Args::once`] reads. Two suffice, unless the server restarts.
const MAX_SNAPSHOTS: u32 = 10;

/// Watch a running server: its shards, procedures and connections
///
/// Shows rates of the last interval, and the minimum and maximum of each since this program started. Reads them from
/// the server's statistics socket (`ServerConfig::stats`; `--stats` of rpcperf serve, nfs3d and blockstore). Several
/// programs can watch one server independently. While the server is unreachable, the program retries.
///
/// Keys: s, p, c (or Tab) for shards, procedures, connections; arrows (or j, k) select a row, whose shard is shown in
/// full below; q quits. Without a terminal, or if TERM is "dumb", prints each interval. Honours NO_COLOR.
///
/// Latencies and figures of procedures cover only timed calls, which are one in `debug.sample_latency` calls.
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = "\
Examples:
  rpcrdma top --stats /run/nfs3d.stats
  rpcrdma top --stats /run/nfs3d.stats --once --json | jq '.shards[] | [.shard, .calls.now, .p99.now]'

Exit status: 0 success; 1 no server answers, or its uptime does not advance (with --once); 2 wrong usage.")]
pub struct Args {
    /// The server's statistics socket
    #[arg(long, value_name = "PATH")]
    pub stats: PathBuf,

    /// Seconds between two snapshots, 0.1 or more
    #[arg(short, long, value_name = "SECONDS", default_value = "1", value_parser = parse_interval)]
    pub interval: Duration,

    /// Print one interval, and exit
    #[arg(long)]
    pub once: bool,

    /// Print one JSON object per interval and line instead
    ///
    /// Keys: pid, uptime, interval, shards, procedures, connections, connections_omitted. Rates are per second, times
    /// in nanoseconds. A figure has now, min and max, or is null if there is no value, for example without timed calls.
    #[arg(long)]
    pub json: bool,
}

fn parse_interval(text: &str) -> Result<Duration, String> {
    let interval = parse_seconds(text)?;
    // The server takes snapshots at most this often.
    if interval < Duration::from_millis(100) { Err("expected at least 0.1 seconds".to_owned()) } else { Ok(interval) }
}

/// Runs the command.
///
/// # Errors
/// [`Args::stats`] is not a socket, with [`Args::once`] no server answers, or the terminal or the output failed.
pub fn run(args: &Args) -> Outcome {
    stats_socket::check(&args.stats).map_err(CommandError::Failed)?;
    let is_dumb = std::env::var_os("TERM").is_none_or(|term| term.is_empty() || term == "dumb");
    if args.once || args.json || is_dumb || !io::stdout().is_terminal() {
        return print(args);
    }
    terminal::run(args)
}

/// Prints intervals as text or JSON.
fn print(args: &Args) -> Outcome {
    let mut model = Model::default();
    let mut out = io::stdout().lock();
    let mut is_reported = false;
    let mut snapshots = 0;
    loop {
        match stats_socket::read(&args.stats) {
            Ok(snapshot) => {
                is_reported = false;
                snapshots += 1;
                let view = model.update(snapshot);
                if view.interval > 0 {
                    let text = if args.json {
                        serde_json::to_string(&view).map_err(io::Error::other)? + "\n"
                    } else {
                        format_view(&view)
                    };
                    // One system call writes the whole interval, because a signal may end the process at any time.
                    out.write_all(text.as_bytes())?;
                    out.flush()?;
                    if args.once {
                        return Ok(ExitStatus::Success);
                    }
                } else if args.once && snapshots == MAX_SNAPSHOTS {
                    return Err(CommandError::Failed(format!(
                        "{}: {MAX_SNAPSHOTS} snapshots without an interval: `uptime` does not advance (it is {} ns)",
                        args.stats.display(),
                        view.uptime
                    )));
                }
            }
            Err(error) if args.once => return Err(CommandError::Failed(error)),
            // A server that disappears is reported once.
            Err(error) if !std::mem::replace(&mut is_reported, true) => {
                print_error!("rpcrdma: no snapshot: {error}; retrying");
            }
            Err(_) => {}
        }
        std::thread::sleep(args.interval);
    }
}

/// Returns an interval as text.
fn format_view(view: &View) -> String {
    let mut text = format!("pid {}  up {}\n", view.pid, units::format_span(view.uptime));
    for Table { head, lines } in Tab::ALL.map(|tab| tab.table(view, PLAIN_WIDTH)) {
        for line in std::iter::once(&head).chain(&lines) {
            text.push_str(line.trim_end());
            text.push('\n');
        }
        text.push('\n');
    }
    text
}
