//! `rpcrdma top`: what a running server does, seen from its socket for statistics.
//!
//! | file | holds |
//! | --- | --- |
//! | `model` | what two snapshots say of the time between them |
//! | `tables` | that, as text of a given width |
//! | `draw` | what is on the screen |
//! | `terminal` | the screen itself, its keys and its end |

mod draw;
mod model;
mod tables;
mod terminal;

use std::io::{self, IsTerminal, Write};
use std::path::PathBuf;
use std::time::Duration;

use crate::command::{CommandError, Ended, Outcome, seconds};
use crate::{feed, units};
use model::{Model, View};
use tables::Table;

/// Width of what goes to no terminal.
const WIDE: usize = 200;

/// Watch a server: its shards, procedures and connections
///
/// Shows rates of the last interval, and of each the least and the most since this began, as the server tells them at
/// the socket of its option for statistics (`ServerConfig::stats`; `--stats` of rpcperf serve, nfs3d and blockstore).
/// Watching changes nothing that others see. A server that is gone is waited for.
///
/// Keys: s, p, c (or Tab) for shards, procedures, connections; arrows (or j, k) for another row, whose shard is told in
/// full below; q ends. Where there is no terminal, or TERM is "dumb", each interval is printed. NO_COLOR is heeded.
///
/// Latencies and what is told of procedures are of the calls that the server times: one of `poll.sample_latency`.
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = "\
Examples:
  rpcrdma top --stats /run/nfs3d.stats
  rpcrdma top --stats /run/nfs3d.stats --once --json | jq '.shards[] | [.shard, .calls.now, .p99.now]'

Exit status: 0 all well, 1 there is no such server (with --once), 2 wrong usage.")]
pub struct Args {
    /// The server's socket for statistics
    #[arg(long, value_name = "PATH")]
    pub stats: PathBuf,

    /// Seconds between two snapshots, 0.1 or more
    #[arg(short, long, value_name = "SECONDS", default_value = "1", value_parser = interval)]
    pub interval: Duration,

    /// Prints one interval, and ends
    #[arg(long)]
    pub once: bool,

    /// Prints one JSON object for each interval, a line each, instead
    ///
    /// Keys: pid, uptime, interval, shards, procedures, connections, connections_omitted. Rates are of a second, times
    /// in nanoseconds; a figure has now, min and max, or is null while there is none, as where no call was timed.
    #[arg(long)]
    pub json: bool,
}

fn interval(text: &str) -> Result<Duration, String> {
    let interval = seconds(text)?;
    // The server takes no snapshots that are closer.
    if interval < Duration::from_millis(100) { Err("less than 0.1 seconds".to_owned()) } else { Ok(interval) }
}

/// Runs the command.
///
/// # Errors
/// What [`Args::stats`] names is no socket; with [`Args::once`] there is no such server; or the terminal, or the output,
/// failed.
pub fn run(args: &Args) -> Outcome {
    feed::check(&args.stats).map_err(|error| CommandError::Failed(error.to_string()))?;
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
    loop {
        match feed::read(&args.stats) {
            Ok(snapshot) => {
                told = false;
                let view = model.take(snapshot);
                if view.interval > 0 {
                    if args.json {
                        let json = serde_json::to_string(&view).map_err(io::Error::other)?;
                        writeln!(out, "{json}")?;
                    } else {
                        out.write_all(text(&view).as_bytes())?;
                    }
                    out.flush()?;
                    if args.once {
                        return Ok(Ended::Well);
                    }
                }
            }
            Err(error) if args.once => return Err(CommandError::Failed(error.to_string())),
            // Once for each time that it goes.
            Err(error) if !std::mem::replace(&mut told, true) => eprintln!("rpcrdma: gone: {error}; waiting for it"),
            Err(_) => {}
        }
        std::thread::sleep(args.interval);
    }
}

/// An interval, as text.
fn text(view: &View) -> String {
    let shards = tables::shards(view, WIDE);
    let mut text = format!("pid {}  up {}\n", view.pid, units::span(view.uptime));
    for Table { head, lines } in [shards, tables::procedures(view, WIDE), tables::connections(view, WIDE)] {
        for line in std::iter::once(&head).chain(&lines) {
            text.push_str(line.trim_end());
            text.push('\n');
        }
        text.push('\n');
    }
    text
}
