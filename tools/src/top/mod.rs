//! `rpcrdma top`: a running server's statistics in a terminal.
//!
//! | file | holds |
//! | --- | --- |
//! | `model` | rates between two snapshots |
//! | `tables` | the same, as text of a given width |
//! | `draw` | contents of the screen |
//! | `terminal` | the screen itself, its keys and its end |

mod draw;
mod model;
mod tables;
mod terminal;

use std::io::{self, IsTerminal, Write};
use std::path::PathBuf;
use std::time::Duration;

use rpcrdma_config::print_error;

use crate::command::{CommandError, Ended, Outcome, seconds};
use crate::{feed, units};
use draw::Tab;
use model::{Model, View};
use tables::Table;

/// Width of output that is no terminal.
const WIDE: usize = 200;

/// Most snapshots that [`Args::once`] reads. Two have an interval between them, unless the server restarted.
const SNAPSHOTS: u32 = 10;

/// Watch a running server: its shards, procedures and connections
///
/// Shows rates of the last interval, and the minimum and maximum of each since this program started. Reads them from
/// the server's socket for statistics (`ServerConfig::stats`; `--stats` of rpcperf serve, nfs3d and blockstore).
/// Several programs can watch one server independently. Waits for a server that is gone.
///
/// Keys: s, p, c (or Tab) for shards, procedures, connections; arrows (or j, k) select a row, whose shard is shown in
/// full below; q quits. Without a terminal, or if TERM is "dumb", prints each interval. Honours NO_COLOR.
///
/// Latencies and figures of procedures cover the calls that the server times: one in `debug.sample_latency`.
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = "\
Examples:
  rpcrdma top --stats /run/nfs3d.stats
  rpcrdma top --stats /run/nfs3d.stats --once --json | jq '.shards[] | [.shard, .calls.now, .p99.now]'

Exit status: 0 all well, 1 there is no such server, or its time stands still (with --once), 2 wrong usage.")]
pub struct Args {
    /// The server's socket for statistics
    #[arg(long, value_name = "PATH")]
    pub stats: PathBuf,

    /// Seconds between two snapshots, 0.1 or more
    #[arg(short, long, value_name = "SECONDS", default_value = "1", value_parser = interval)]
    pub interval: Duration,

    /// Print one interval, and exit
    #[arg(long)]
    pub once: bool,

    /// Print one JSON object per interval and line instead
    ///
    /// Keys: pid, uptime, interval, shards, procedures, connections, connections_omitted. Rates are per second, times
    /// in nanoseconds. A figure has now, min and max, or is null without a value, as where no call was timed.
    #[arg(long)]
    pub json: bool,
}

fn interval(text: &str) -> Result<Duration, String> {
    let interval = seconds(text)?;
    // The server takes snapshots no more often.
    if interval < Duration::from_millis(100) { Err("less than 0.1 seconds".to_owned()) } else { Ok(interval) }
}

/// Runs the command.
///
/// # Errors
/// [`Args::stats`] is no socket; with [`Args::once`] there is no such server; or the terminal, or the output, failed.
pub fn run(args: &Args) -> Outcome {
    feed::check(&args.stats).map_err(CommandError::Failed)?;
    let dumb = std::env::var_os("TERM").is_none_or(|term| term.is_empty() || term == "dumb");
    if args.once || args.json || dumb || !io::stdout().is_terminal() {
        return print(args);
    }
    terminal::run(args)
}

/// Prints intervals.
fn print(args: &Args) -> Outcome {
    let mut model = Model::default();
    let mut out = io::stdout().lock();
    let mut told = false;
    let mut snapshots = 0;
    loop {
        match feed::read(&args.stats) {
            Ok(snapshot) => {
                told = false;
                snapshots += 1;
                let view = model.take(snapshot);
                if view.interval > 0 {
                    let text = if args.json {
                        serde_json::to_string(&view).map_err(io::Error::other)? + "\n"
                    } else {
                        text(&view)
                    };
                    // In one system call, so that a signal, which ends the process, leaves whole intervals.
                    out.write_all(text.as_bytes())?;
                    out.flush()?;
                    if args.once {
                        return Ok(Ended::Well);
                    }
                } else if args.once && snapshots == SNAPSHOTS {
                    return Err(CommandError::Failed(format!(
                        "{}: {SNAPSHOTS} snapshots without an interval: `uptime` does not advance (it is {} ns)",
                        args.stats.display(),
                        view.uptime
                    )));
                }
            }
            Err(error) if args.once => return Err(CommandError::Failed(error)),
            // Once per disappearance.
            Err(error) if !std::mem::replace(&mut told, true) => print_error!("rpcrdma: gone: {error}; waiting for it"),
            Err(_) => {}
        }
        std::thread::sleep(args.interval);
    }
}

/// An interval, as text.
fn text(view: &View) -> String {
    let mut text = format!("pid {}  up {}\n", view.pid, units::span(view.uptime));
    for Table { head, lines } in Tab::ALL.map(|tab| tab.of(view, WIDE)) {
        for line in std::iter::once(&head).chain(&lines) {
            text.push_str(line.trim_end());
            text.push('\n');
        }
        text.push('\n');
    }
    text
}
