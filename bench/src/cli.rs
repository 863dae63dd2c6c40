//! Command line, with perftest's option letters where they exist.
#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::time::Duration;

use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Args, Parser, Subcommand, ValueEnum};
use rpcrdma::Address;
use rpcrdma::config::{Crc, FpduSize, IwarpConfig};
use rpcrdma::fabric::path::PathConfig;
use rpcrdma_config::program::VERSION;
pub(crate) use rpcrdma_config::{Idle, Named};

use crate::fabrics;
use crate::failure::Failure;
use crate::limits::Limits;
use crate::pin::Cores;
use crate::process::ServerProcess;
use crate::target::Length;

mod calls;
#[cfg(test)]
mod readme_tests;
mod values;

pub(crate) use calls::{BwArgs, CallArgs, Defer, Direction, EngineArgs, Form, LatArgs, RateArgs, RpcOp};
pub(crate) use values::{parse_mtu, parse_not_negative, parse_positive, parse_size};

/// Listening address of a server without `--listen`.
pub(crate) const DEFAULT_ADDRESS: &str = "soft:rpcperf";
/// Largest size of `-a`, in bytes.
const LARGEST_OF_ALL: usize = 1 << 23;

#[cfg(feature = "verbs")]
macro_rules! fabrics {
    () => {
        "soft:NAME (shared memory), iwarp:HOST:PORT (plain TCP; port 20049), verbs:HOST:PORT (RDMA devices; port 20049)"
    };
}
#[cfg(not(feature = "verbs"))]
macro_rules! fabrics {
    () => {
        "soft:NAME (shared memory), iwarp:HOST:PORT (plain TCP; port 20049); RDMA devices with the feature `verbs` of the build"
    };
}

const EXIT_CODES: &str = concat!(
    "Addresses: ",
    fabrics!(),
    "\n\
Latencies are full round trips, of every test and operation.
Exit codes: 0 done, 1 failed, 2 usage, 3 a limit was missed."
);

/// Measures RPC calls and the bare fabric between two processes
#[derive(Debug, Parser)]
#[command(name = "rpcperf", version, long_version = VERSION.as_str(), about, after_help = EXIT_CODES)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Serve all tests until killed
    Serve(ServeArgs),
    /// Round trips of calls
    Lat(LatArgs),
    /// Calls per second
    Rate(RateArgs),
    /// Bandwidth of calls with bulk payloads
    Bw(BwArgs),
    /// Round trips of the bare fabric, without calls
    RawLat(RawLatArgs),
    /// Bandwidth and message rate of the bare fabric, without calls
    RawBw(RawBwArgs),
}

#[derive(Debug, Args)]
pub(crate) struct ServeArgs {
    /// Listening addresses, separated by commas; several (calls only) get at least one shard each, on any devices or
    /// fabrics
    #[arg(long, value_name = "ADDRESS[,ADDRESS…]", value_delimiter = ',', default_value = DEFAULT_ADDRESS)]
    pub(crate) listen: Vec<String>,
    /// Cores of the shards, then of the workers (default: the second allowed core, then the remaining ones)
    #[arg(long, value_name = "CORE[,CORE…]", value_delimiter = ',')]
    pub(crate) cores: Vec<usize>,
    /// Core of the client; the server avoids it
    #[arg(long, hide = true, value_name = "CORE")]
    pub(crate) client_core: Option<usize>,
    /// Idle policy
    #[arg(long, value_enum, default_value_t = Idle::Adaptive)]
    pub(crate) idle: Idle,
    /// Serve one kind of test only; if both are served, two threads share one core, so one of them must sleep
    #[arg(long, value_enum)]
    pub(crate) only: Option<TestKind>,
    /// Largest payload of read and write, in bytes; sizes the memory
    #[arg(short, long, value_name = "BYTES", default_value = "8M", value_parser = parse_size)]
    pub(crate) size: usize,
    /// Outstanding calls per connection; sizes the memory. For --reverse and --both, twice the client's -t
    #[arg(short = 't', long, value_name = "N", default_value_t = 16, value_parser = calls::outstanding())]
    pub(crate) outstanding: u32,
    /// Connections; sizes the memory
    #[arg(short = 'q', long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=16384))]
    pub(crate) qp: u32,
    /// Allocate memory for payloads in RPC messages, as --form continued and long require; the server's own calls use
    /// the same form
    #[arg(long, value_enum)]
    pub(crate) form: Option<Form>,
    /// Post and ring the doorbell for each work request separately
    #[arg(long)]
    pub(crate) no_batch: bool,
    /// Serve call statistics on this Unix socket, for `rpcrdma top` and `rpcrdma exporter`
    #[arg(long, value_name = "PATH")]
    pub(crate) stats: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) device: DeviceArgs,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
    /// Root of the file system that describes the machine, for tests
    #[arg(long, hide = true, value_name = "DIRECTORY")]
    pub(crate) root: Option<PathBuf>,
    /// Exit when this process exits; answer its requests for counters
    #[arg(long, hide = true, value_name = "PID")]
    pub(crate) parent: Option<u32>,
}

impl ServeArgs {
    pub(crate) fn addresses(&self) -> Result<Vec<Address>, Failure> {
        self.listen.iter().map(|text| fabrics::parse(text)).collect()
    }

    pub(crate) fn shards(&self) -> usize {
        self.listen.len().max(self.engine.shards as usize)
    }

    /// Arguments of the server as which a test without an address runs.
    ///
    /// It serves only this kind of test, with the test's options where `serve` has them, and defaults otherwise.
    pub(crate) fn of_test(common: &CommonArgs, kind: TestKind, call: Option<&CallArgs>) -> Result<Self, Failure> {
        if common.json.is_some() {
            return Err(Failure::Usage(
                "--json: without ADDRESS and --loopback this side is a server, which has no results".to_owned(),
            ));
        }
        let nothing_given = Cli::try_parse_from(["rpcperf", "serve"]).map(|cli| cli.command);
        let Ok(Command::Serve(mut args)) = nothing_given else { unreachable!("`rpcperf serve` needs no arguments") };
        args.cores = common.cores.map(|cores| cores.server.unwrap_or(cores.client)).into_iter().collect();
        args.client_core = common.cores.filter(|cores| cores.server.is_some()).map(|cores| cores.client);
        args.idle = common.idle;
        args.root.clone_from(&common.root);
        args.device = common.device.clone();
        args.only = Some(kind);
        args.no_batch = common.no_batch;
        args.size = args.size.max(common.size.unwrap_or(0));
        args.qp = args.qp.max(common.qp);
        if let Some(call) = call {
            (args.engine, args.form) = (call.engine.clone(), call.wire_form.form);
        }
        Ok(args)
    }
}

/// Kind of test that a server serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum TestKind {
    /// Calls: lat, rate, bw
    Calls,
    /// The bare fabric: raw-lat, raw-bw
    Raw,
}

#[derive(Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub(crate) struct RawLatArgs {
    /// The operation: the peer echoes `send`; `write` is a Write followed by a Send, answered by a Send
    #[arg(long, value_enum, default_value_t = RawOp::Send)]
    pub(crate) op: RawOp,
    #[command(flatten)]
    pub(crate) common: CommonArgs,
    #[command(flatten)]
    pub(crate) latency: LatencyArgs,
    /// Outstanding operations per connection
    #[arg(short = 't', long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub(crate) tx_depth: u32,
}

impl RawLatArgs {
    /// Payload without `-s`, in bytes.
    pub(crate) const USUAL_SIZE: usize = 2;
}

#[derive(Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub(crate) struct RawBwArgs {
    /// The operation
    #[arg(long, value_enum, default_value_t = RawOp::Send)]
    pub(crate) op: RawOp,
    #[command(flatten)]
    pub(crate) common: CommonArgs,
    /// Outstanding work requests per connection
    #[arg(short = 't', long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub(crate) tx_depth: u32,
    /// One completion per N work requests
    #[arg(short = 'Q', long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub(crate) cq_mod: u32,
    #[command(flatten)]
    pub(crate) throughput: ThroughputArgs,
}

impl RawBwArgs {
    /// Payload without `-s`, in bytes.
    pub(crate) const USUAL_SIZE: usize = 65536;
}

/// Arguments of every client.
#[derive(Debug, Args)]
pub(crate) struct CommonArgs {
    /// Server to call; without an address, serve at soft:rpcperf
    #[arg(value_name = "ADDRESS")]
    pub(crate) address: Option<String>,
    /// Start a server in another process on another core, at this address or at an address of the software fabric
    #[arg(
        long,
        value_name = "ADDRESS",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "",
        conflicts_with = "address"
    )]
    pub(crate) loopback: Option<String>,
    #[command(flatten)]
    pub(crate) device: DeviceArgs,
    /// Cores (default: the first two allowed)
    #[arg(long, value_name = "CLIENT[,SERVER]")]
    pub(crate) cores: Option<Cores>,
    /// Idle policy
    #[arg(long, value_enum, default_value_t = Idle::Poll)]
    pub(crate) idle: Idle,
    /// Payload in bytes; K and M are 1024 and 1024² (default: of calls 64, raw 2, for bandwidth 65536)
    #[arg(short, long, value_name = "BYTES", value_parser = parse_size)]
    pub(crate) size: Option<usize>,
    /// All powers of two from 2 bytes to 8 MiB, within the operation's limits
    #[arg(short, long, conflicts_with = "size")]
    pub(crate) all: bool,
    /// Operations to count (default: 10000, for bandwidth 5000, for rates 1000000)
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) iters: Option<u64>,
    /// Warm-up operations before the counted ones (default: a tenth of -n)
    #[arg(long, value_name = "N")]
    pub(crate) warmup: Option<u64>,
    /// Measure for this time instead of a number of operations
    #[arg(short = 'D', long, value_name = "SECONDS", value_parser = parse_positive, conflicts_with_all = ["iters", "warmup"])]
    pub(crate) duration: Option<f64>,
    /// Uncounted margin at each end of -D (default: 2, at most a tenth of -D)
    #[arg(short = 'f', long, value_name = "SECONDS", value_parser = parse_not_negative, requires = "duration")]
    pub(crate) margin: Option<f64>,
    /// Connections
    #[arg(short = 'q', long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=16384))]
    pub(crate) qp: u32,
    /// Post and ring the doorbell for each work request separately
    #[arg(long)]
    pub(crate) no_batch: bool,
    /// Ignored, for compatibility with perftest: the clock does not depend on the processor's frequency
    #[arg(short = 'F', long = "CPU-freq")]
    pub(crate) _cpu_freq: bool,
    /// Root of the file system that describes the machine, for tests
    #[arg(long, hide = true, value_name = "DIRECTORY")]
    pub(crate) root: Option<PathBuf>,
    /// Write the results as JSON; - is standard output, which then holds nothing else
    #[arg(long, value_name = "FILE|-")]
    pub(crate) json: Option<PathBuf>,
}

/// RDMA device and packet options, with perftest's letters.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct DeviceArgs {
    /// RDMA device of this side (default: the one that reaches the address)
    #[arg(short = 'd', long, value_name = "DEVICE")]
    pub(crate) ib_dev: Option<String>,
    /// GID index of the device (default: the one that reaches the address)
    #[arg(short = 'x', long, value_name = "INDEX")]
    pub(crate) gid_index: Option<u32>,
    /// Service level of this side's packets, 0 to 15 (default: the path's)
    #[arg(short = 'S', long, value_name = "LEVEL", value_parser = clap::value_parser!(u8).range(..=15))]
    pub(crate) sl: Option<u8>,
    /// Type of service or traffic class of this side's packets on verbs and iwarp, 0 to 255 (default: the path's)
    #[arg(short = 'T', long, value_name = "TOS")]
    pub(crate) tos: Option<u8>,
    /// Path MTU in bytes; a server uses at most this (default: the path's)
    #[arg(short, long, value_name = "BYTES", value_parser = parse_mtu)]
    pub(crate) mtu: Option<u32>,
    /// iWARP: CRC-32C of each FPDU (default: if-asked)
    #[arg(long, value_name = "never|if-asked|always", help_heading = "iWARP")]
    pub(crate) crc: Option<Crc>,
    /// iWARP: FPDUs as long as the format allows, or within a TCP segment (default: auto, which depends on the peer)
    #[arg(long, value_name = "auto|segment|longest", help_heading = "iWARP")]
    pub(crate) fpdu: Option<FpduSize>,
    /// iWARP: SO_SNDBUF in bytes (default: the kernel's choice)
    #[arg(long, value_name = "BYTES", value_parser = parse_size, help_heading = "iWARP")]
    pub(crate) sndbuf: Option<usize>,
    /// iWARP: SO_RCVBUF in bytes (default: the kernel's choice)
    #[arg(long, value_name = "BYTES", value_parser = parse_size, help_heading = "iWARP")]
    pub(crate) rcvbuf: Option<usize>,
    /// iWARP: SO_BUSY_POLL in microseconds (default: net.core.busy_read)
    #[arg(long, value_name = "USEC", help_heading = "iWARP")]
    pub(crate) busy_poll: Option<u32>,
}

impl DeviceArgs {
    pub(crate) fn iwarp(&self) -> IwarpConfig {
        IwarpConfig {
            crc: self.crc.unwrap_or_default(),
            send_buffer: self.sndbuf,
            receive_buffer: self.rcvbuf,
            busy_poll: self.busy_poll.map(|usec| Duration::from_micros(usec.into())),
            ..IwarpConfig::default()
        }
    }

    pub(crate) fn path(&self) -> PathConfig {
        PathConfig { tos: self.tos, service_level: self.sl, path_mtu: self.mtu }
    }

    /// Rejects options that the fabric of `address` does not have.
    pub(crate) fn check(&self, address: &Address) -> Result<(), Failure> {
        let is_device = !matches!(address, Address::Soft(_) | Address::Iwarp(_));
        if !is_device && (self.ib_dev.is_some() || self.gid_index.is_some()) {
            return Err(Failure::Usage(format!("-d and -x select an RDMA device, which {address} does not use")));
        }
        self.path().check(address.scheme()).map_err(|error| Failure::Usage(format!("-S, -T or -m: {error}")))?;
        let socket = self.sndbuf.is_some() || self.rcvbuf.is_some() || self.busy_poll.is_some();
        if !matches!(address, Address::Iwarp(_)) && (socket || self.crc.is_some() || self.fpdu.is_some()) {
            let options = "--crc, --fpdu, --sndbuf, --rcvbuf and --busy-poll";
            return Err(Failure::Usage(format!("{options} need an iwarp: address, not {address}")));
        }
        Ok(())
    }
}

/// Arguments of the latency tests.
#[derive(Debug, Args)]
pub(crate) struct LatencyArgs {
    /// Open loop: start this many operations per second, each timed from its due time
    #[arg(long, value_name = "PER-SECOND", value_parser = parse_positive)]
    pub(crate) rate: Option<f64>,
    /// Write the percentile distribution (.hgrm); with -a one file per size: out.hgrm becomes out.64.hgrm
    #[arg(long, value_name = "FILE")]
    pub(crate) hgrm: Option<PathBuf>,
    /// Exit with 3 if the median is longer
    #[arg(long, value_name = "USEC", value_parser = parse_positive)]
    pub(crate) limit_p50: Option<f64>,
    /// Exit with 3 if the 99th percentile is longer
    #[arg(long, value_name = "USEC", value_parser = parse_positive)]
    pub(crate) limit_p99: Option<f64>,
}

impl LatencyArgs {
    pub(crate) fn limits(&self) -> Limits {
        Limits { p50_us: self.limit_p50, p99_us: self.limit_p99, ..Limits::default() }
    }
}

/// Arguments of the rate and bandwidth tests.
#[derive(Debug, Args)]
pub(crate) struct ThroughputArgs {
    /// Exit with 3 if the rate is lower
    #[arg(long, value_name = "PER-SECOND", value_parser = parse_positive)]
    pub(crate) limit_rate: Option<f64>,
    /// Exit with 3 if the average bandwidth is lower
    #[arg(short = 'w', long, value_name = "MIB-PER-SECOND", value_parser = parse_positive)]
    pub(crate) limit_bw: Option<f64>,
}

impl ThroughputArgs {
    pub(crate) fn limits(&self) -> Limits {
        Limits { rate: self.limit_rate, bw_mib: self.limit_bw, ..Limits::default() }
    }
}

/// Operations of the bare fabric.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum RawOp {
    /// Send and Receive
    Send,
    /// RDMA Read of the server's memory
    Read,
    /// RDMA Write to the server's memory
    Write,
}

/// The options of `A` on this command line, as arguments of a server.
///
/// The options of [`rpcrdma_config::ConfigArgs`] are left out.
pub(crate) fn given_options<A: Args>(matches: &ArgMatches) -> Vec<String> {
    let words = |arg: &Arg| -> Vec<String> {
        let (id, name) = (arg.get_id().as_str(), arg.get_long().unwrap_or_default());
        if matches.value_source(id) != Some(ValueSource::CommandLine) || ["config", "set", "print_config"].contains(&id)
        {
            return Vec::new();
        }
        if matches!(arg.get_action(), ArgAction::SetTrue) {
            return vec![format!("--{name}")];
        }
        let values = matches.get_raw(id).into_iter().flatten();
        values.map(|value| format!("--{name}={}", value.to_string_lossy())).collect()
    };
    A::augment_args(clap::Command::new("")).get_arguments().flat_map(words).collect()
}

impl CommonArgs {
    /// True if this side measures; false if it serves.
    pub(crate) fn is_client(&self) -> bool {
        self.loopback.is_some() || self.address.is_some()
    }

    /// Address of the server, running or yet to be started.
    pub(crate) fn server_address(&self) -> String {
        let own = || self.loopback.clone().filter(|address| !address.is_empty());
        self.address.clone().or_else(own).unwrap_or_else(ServerProcess::own_address)
    }

    /// Sizes to measure, in bytes.
    pub(crate) fn sizes(&self, default: usize) -> Vec<usize> {
        if !self.all {
            return vec![self.size.unwrap_or(default)];
        }
        (1..).map(|power| 1usize << power).take_while(|&size| size <= LARGEST_OF_ALL).collect()
    }

    /// Length of the measurement.
    pub(crate) fn length(&self, default_iters: u64) -> Result<Length, Failure> {
        self.length_or(default_iters, None)
    }

    /// Length of the measurement, which is `seconds` by default instead of a number of operations.
    pub(crate) fn length_or(&self, default_iters: u64, seconds: Option<f64>) -> Result<Length, Failure> {
        let Some(seconds) = self.duration.or(seconds) else {
            let counted = self.iters.unwrap_or(default_iters);
            return Ok(Length::Operations { counted, warm_up: self.warmup.unwrap_or(counted / 10) });
        };
        let margin = self.margin.unwrap_or_else(|| (seconds / 10.0).min(2.0));
        if margin * 2.0 >= seconds {
            return Err(Failure::Usage(format!("-f {margin}: the margin must be less than half of -D {seconds}")));
        }
        Ok(Length::Time { total: (seconds * 1e9) as u64, margin: (margin * 1e9) as u64 })
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn raw_lat(arguments: &[&str]) -> Result<RawLatArgs, clap::Error> {
        let all = ["rpcperf", "raw-lat"].iter().chain(arguments);
        match Cli::try_parse_from(all)?.command {
            Command::RawLat(args) => Ok(args),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_command_line_definition_is_valid() {
        Cli::command().debug_assert();
    }

    #[test]
    fn sizes_have_units_and_limits() {
        assert_eq!(parse_size("64"), Ok(64));
        assert_eq!(parse_size("64K"), Ok(65536));
        assert_eq!(parse_size("2M"), Ok(2 << 20));
        for wrong in ["", "K", "0", "-1", "1G", "1025M", "99999999999999999999K", "1.5K"] {
            assert!(parse_size(wrong).is_err(), "{wrong}");
        }
        let all = raw_lat(&["soft:x", "-a"]).unwrap().common.sizes(7);
        assert_eq!((all.first(), all.last(), all.len()), (Some(&2), Some(&(8 << 20)), 23));
        assert_eq!(raw_lat(&["soft:x"]).unwrap().common.sizes(7), [7]);
    }

    /// Formats operation, sizes and depth of a test.
    fn describe_test(arguments: &[&str]) -> String {
        let all = ["rpcperf"].iter().chain(arguments);
        match Cli::try_parse_from(all).unwrap().command {
            Command::Lat(LatArgs { call, .. }) | Command::Rate(RateArgs { call, .. }) => {
                format!("{:?} {:?} {}", call.op, call.common.sizes(call.wire_form.usual_size(64)), call.outstanding)
            }
            Command::Bw(a) => {
                format!("{:?} {:?} {}", a.call.op, a.call.common.sizes(a.usual_size()), a.call.outstanding)
            }
            Command::RawLat(a) => {
                format!("{:?} {:?} {}", a.op, a.common.sizes(RawLatArgs::USUAL_SIZE), a.tx_depth)
            }
            Command::RawBw(a) => {
                let size = a.common.sizes(RawBwArgs::USUAL_SIZE);
                format!("{:?} {size:?} {} {}", a.op, a.tx_depth, a.cq_mod)
            }
            Command::Serve(_) => panic!("`serve` measures nothing"),
        }
    }

    #[test]
    fn the_readme_states_the_defaults() {
        let readme = include_str!("../README.md");
        let table = readme.split("| test | one operation | defaults |").nth(1).unwrap();
        let mut tests = Vec::new();
        for row in table.lines().skip(2).take_while(|line| line.starts_with('|')) {
            let cells: Vec<&str> = row.trim_matches('|').split(" | ").map(str::trim).collect();
            let words = |cell: &'static str| -> Vec<&str> {
                cell.trim_matches('`').split(' ').filter(|word| !word.is_empty()).collect()
            };
            let (test, options) = (words(cells[0]), words(cells[2].trim_matches('|').trim()));
            if !options.is_empty() {
                let stated: Vec<&str> = test.iter().chain(&options).copied().collect();
                assert_eq!(describe_test(&stated), describe_test(&test[..1]), "{row}");
                tests.push(test[0]);
            }
        }
        assert_eq!(tests, ["lat", "rate", "bw", "raw-lat", "raw-bw"]);
    }

    #[test]
    fn packet_options_have_perftests_letters_and_reach_the_server() {
        let device = |arguments: &[&str]| raw_lat(arguments).unwrap().common.device;
        let all = ["-S", "3", "-T", "104", "-m", "1024"];
        let path = PathConfig { tos: Some(104), service_level: Some(3), path_mtu: Some(1024) };
        assert_eq!(device(&all).path(), path);
        let matches = Cli::command().get_matches_from(["rpcperf", "raw-lat"].iter().chain(&all));
        let handed = given_options::<DeviceArgs>(matches.subcommand().unwrap().1);
        assert_eq!(device(&handed.iter().map(String::as_str).collect::<Vec<_>>()).path(), path);
        assert_eq!(device(&[]).path(), PathConfig::default());
        let refused = |arguments: &[&str], address: &str| device(arguments).check(&address.parse().unwrap()).err();
        for (arguments, address, knob) in [
            (&["-T", "8"][..], "soft:x", Some("tos = 8")),
            (&["-T", "8"], "iwarp:h", None),
            (&["-S", "1"], "iwarp:h", Some("service_level = 1")),
            (&["-m", "256"], "iwarp:h", Some("path_mtu = 256")),
        ] {
            let error = refused(arguments, address).map(|failure| format!("{failure:?}"));
            assert_eq!(error.is_some(), knob.is_some(), "{error:?}");
            assert!(knob.is_none_or(|knob| error.as_ref().is_some_and(|error| error.contains(knob))), "{error:?}");
        }
    }

    #[test]
    fn lengths_are_operations_or_a_time() {
        let length = |arguments: &[&str]| raw_lat(arguments).unwrap().common.length(1000);
        assert_eq!(length(&["-n", "500"]).unwrap(), Length::Operations { counted: 500, warm_up: 50 });
        assert_eq!(length(&["--warmup", "3"]).unwrap(), Length::Operations { counted: 1000, warm_up: 3 });
        let second = 1_000_000_000;
        assert_eq!(length(&["-D", "40"]).unwrap(), Length::Time { total: 40 * second, margin: 2 * second });
        assert_eq!(length(&["-D", "1"]).unwrap(), Length::Time { total: second, margin: second / 10 });
        assert!(matches!(length(&["-D", "4", "-f", "2"]), Err(Failure::Usage(_))));
    }

    #[test]
    fn invalid_arguments_are_refused() {
        for wrong in [
            &["-n", "5", "-n", "6"][..],
            &["-F", "-F"],
            &["-a", "-s", "4"],
            &["-n", "5", "-D", "1"],
            &["-f", "1"],
            &["-m", "1500"],
            &["-D", "4", "-m", "1"],
            &["-S", "16"],
            &["-T", "256"],
            &["-t", "0"],
            &["--loopback", "soft:x"],
            &["--rate", "nan"],
            &["--op", "atomic"],
            &["soft:x", "soft:y"],
        ] {
            assert!(raw_lat(wrong).is_err(), "{wrong:?}");
        }
        assert!(raw_lat(&["-F", "-s", "1K", "-t", "3", "-q", "2", "-D", "1", "-f", "0", "--cores", "0,1"]).is_ok());
    }
}
