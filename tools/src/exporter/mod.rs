//! `rpcrdma exporter`: statistics of a server, and of the host's RDMA devices, for Prometheus.
//!
//! | file | holds |
//! | --- | --- |
//! | `metrics` | a snapshot in OpenMetrics text |
//! | `tables` | which counters and gauges there are, by what names |
//! | `devices` | counters of RDMA devices |
//! | `http` | who asks for them, within bounds |

mod devices;
mod http;
mod metrics;
mod tables;

use std::io::Write;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};

use crate::command::{CommandError, Ended, Outcome};
use crate::feed;
use http::Page;

/// Where the kernel tells of RDMA devices.
const DEVICES: &str = "/sys/class/infiniband";

/// Tell Prometheus what a server does
///
/// Serves OpenMetrics text at http://ADDR/metrics: counters, gauges and latency histograms by shard and procedure, and
/// the counters of the host's RDMA devices (hw_counters and counters). Each scrape reads one snapshot from the socket
/// of the server's option for statistics; while there is no server rpcrdma_up is 0. A dashboard for Grafana is
/// tools/grafana.json.
///
/// There is no authentication and no encryption: let those connect who may know.
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = "\
Example:
  rpcrdma exporter --stats /run/nfs3d.stats --listen 127.0.0.1:9420

Exit status: 1 the address cannot be had, 2 wrong usage; without either it goes on until it is killed.")]
pub struct Args {
    /// The server's socket for statistics
    #[arg(long, value_name = "PATH")]
    pub stats: PathBuf,

    /// Where to serve; port 0 for any that is free, which is printed
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:9420")]
    pub listen: SocketAddr,
}

/// Runs the command.
///
/// # Errors
/// The address cannot be had.
pub fn run(args: &Args) -> Outcome {
    let failed =
        |what: &str, error| CommandError::Failed(format!("{what} {}: {error}; --listen names another", args.listen));
    let listener = TcpListener::bind(args.listen).map_err(|error| failed("bind", error))?;
    let address = listener.local_addr().map_err(|error| failed("getsockname", error))?;
    let mut out = std::io::stdout();
    writeln!(out, "listening on http://{address}/metrics")?;
    out.flush()?;
    http::serve(&listener, |path| page(path, &args.stats))?;
    Ok(Ended::Well)
}

/// What there is at a path.
fn page(path: &str, stats: &Path) -> Option<Page> {
    match path {
        "/metrics" => {
            let snapshot = feed::read(stats).ok();
            let text = metrics::text(snapshot, devices::read(Path::new(DEVICES)));
            Some(Page { kind: "application/openmetrics-text; version=1.0.0; charset=utf-8", text })
        }
        "/" => Some(Page { kind: "text/plain", text: "metrics of an RPC-over-RDMA server: /metrics\n".to_owned() }),
        _ => None,
    }
}
