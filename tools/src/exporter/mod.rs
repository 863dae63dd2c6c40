//! `rpcrdma exporter`: exports statistics of a server and of RDMA devices to Prometheus.
//!
//! | file | contents |
//! | --- | --- |
//! | `metrics` | encoding of a snapshot as OpenMetrics text |
//! | `tables` | gauges of pools and reasons of refusals |
//! | `devices` | counters of RDMA devices |
//! | `http` | a bounded HTTP server |

mod devices;
mod http;
mod metrics;
mod tables;

use std::io::Write;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};

use crate::command::{CommandError, Outcome};
use crate::stats_socket;
use http::Page;
pub(crate) use tables::REFUSALS;

/// RDMA devices in sysfs.
const DEVICES: &str = "/sys/class/infiniband";

/// Export a running server's counters to Prometheus
///
/// Serves OpenMetrics text at http://ADDR/metrics: counters, gauges and latency histograms by shard and procedure, and
/// the counters of the host's RDMA devices (hw_counters and counters). Each scrape reads one snapshot from the server's
/// statistics socket. While there is no server, rpcrdma_up is 0. tools/grafana.json is a dashboard for Grafana.
///
/// There is no authentication and no encryption: restrict access to the port.
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = "\
Example:
  rpcrdma exporter --stats /run/nfs3d.stats --listen 127.0.0.1:9420

Exit status: 1 bind failed, 2 wrong usage; otherwise it runs until it is killed.")]
pub struct Args {
    /// The server's statistics socket
    #[arg(long, value_name = "PATH")]
    pub stats: PathBuf,

    /// Listening address; port 0 selects a free port, which is printed
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:9420")]
    pub listen: SocketAddr,
}

/// Runs the command.
///
/// # Errors
/// The address cannot be bound.
pub fn run(args: &Args) -> Outcome {
    rpcrdma_host::logger::start();
    let failed = |what: &str, error| {
        CommandError::Failed(format!("{what} {}: {error}; choose another address (--listen)", args.listen))
    };
    let listener = TcpListener::bind(args.listen).map_err(|error| failed("bind", error))?;
    let address = listener.local_addr().map_err(|error| failed("getsockname", error))?;
    let mut out = std::io::stdout();
    writeln!(out, "listening on http://{address}/metrics")?;
    out.flush()?;
    http::serve(&listener, |path| page(path, &args.stats))
}

/// Returns the content of a path.
fn page(path: &str, stats: &Path) -> Option<Page> {
    match path {
        "/metrics" => {
            let snapshot = stats_socket::read(stats).ok();
            let text = metrics::encode_text(snapshot, devices::read(Path::new(DEVICES)));
            Some(Page { kind: "application/openmetrics-text; version=1.0.0; charset=utf-8", text })
        }
        "/" => Some(Page { kind: "text/plain", text: "metrics of an RPC-over-RDMA server: /metrics\n".to_owned() }),
        _ => None,
    }
}
