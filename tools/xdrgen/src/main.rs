//! The program `xdrgen`, which compiles XDR and RPC language to Rust.
#![warn(clippy::print_stderr)]

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use clap::error::ErrorKind;
use clap::{CommandFactory, Parser};
use signal_hook::consts::SIGXFSZ;
use xdrgen::{CompileError, Options, generate, load, write};

/// Compiles XDR and RPC language (RFC 4506, RFC 5531) to Rust.
#[derive(Parser)]
#[command(name = "xdrgen", version)]
struct Args {
    /// Specification, `NAME.x`.
    file: PathBuf,
    /// Placement file; default: `NAME.placement.toml` beside the specification, if it exists.
    #[arg(long, value_name = "FILE")]
    placement: Option<PathBuf>,
    /// Output; default: standard output.
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Defines a name for `#ifdef` and as a constant. VALUE is a number; default: 1.
    #[arg(short = 'D', value_name = "NAME[=VALUE]")]
    define: Vec<String>,
    /// Generates types without programs, so that the code depends on `rpcrdma-xdr` only.
    #[arg(long)]
    types_only: bool,
}

fn main() -> ExitCode {
    // With a handler, a write beyond RLIMIT_FSIZE fails with EFBIG. Without one, SIGXFSZ would end the process
    // silently.
    let _ = signal_hook::flag::register(SIGXFSZ, Arc::default());
    match run(Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(CompileError::Define { define, reason }) => {
            let message = format!("invalid value '{define}' for '-D <NAME[=VALUE]>': {reason}");
            Args::command().error(ErrorKind::ValueValidation, message).exit()
        }
        Err(error) => {
            let _ = writeln!(io::stderr(), "{error}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: Args) -> Result<(), CompileError> {
    let options = if args.types_only { Options::types_only() } else { Options::default() };
    let options = args.define.iter().fold(options, |options, define| options.define(define));
    let schema = load(&args.file, args.placement.as_deref(), &options)?;
    for warning in &schema.warnings {
        let _ = writeln!(io::stderr(), "warning: {warning}");
    }
    let text = generate(&schema, &options);
    if let Some(path) = args.output {
        return write(&path, &text);
    }
    let written = io::stdout().write_all(text.as_bytes()).and_then(|()| io::stdout().flush());
    written.map_err(|source| CompileError::File { path: "standard output".into(), source })
}
