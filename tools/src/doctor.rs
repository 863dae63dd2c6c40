//! `rpcrdma doctor`: checks a machine for a server, and prints commands that fix it.

use std::fmt::Write as _;
use std::io::{self, Write as _};

use rpcrdma_host::check::Area;
use rpcrdma_host::{CoreList, Finding, Status};
use serde_json::json;

use crate::command::{ExitStatus, Outcome};
use crate::target::{Machine, Target};

/// Check this host for problems that slow or stop a server
///
/// Each check prints the observed and the wanted state, the reason, and a command that fixes it. The doctor changes
/// nothing and needs no privilege: a state that it cannot read is "unknown", which is not a failure.
///
/// Without an address, the checks apply to any server: cores, memory, containers, the installed C library. An address
/// adds the checks of its fabric. For verbs: the RDMA device that has the address or is on the route to it. For iwarp:
/// interface and sockets. For soft: file descriptors. A disturbance of a core is a warning if --cores names the core,
/// and otherwise a note.
///
/// Most commands change the host until the next boot; `ulimit`, `taskset` and `prlimit` change only the shell that runs
/// them. Lines that start with # describe manual work. Statuses, best first: ok, unknown, note (may not matter here),
/// warning (slower, or fewer connections), error (will not work).
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = "\
Examples:
  rpcrdma doctor                                   # this machine, for any server
  rpcrdma doctor verbs:10.0.0.1 --cores 2-5        # for shards on four cores, at an RDMA device
  rpcrdma doctor iwarp:0.0.0.0 --json | jq '.checks[] | select(.status == \"warning\") | .fix'

Exit status: 0 fine (ok, unknown and note), 1 warnings, 2 errors, 3 wrong usage or unreadable --root.")]
pub struct Args {
    /// Address of the server: soft:NAME, iwarp:HOST, verbs:HOST
    pub address: Option<Target>,

    /// Cores reserved for the server, e.g. 2,4-7
    #[arg(long, value_name = "LIST", value_parser = parse_cores)]
    pub cores: Option<CoreList>,

    /// Print wanted state and reason also for ok and unknown checks
    #[arg(short, long)]
    pub all: bool,

    /// Print one JSON object and nothing else
    ///
    /// Keys: address, cores, status (the worst), checks: name, status (ok, unknown, note, warning, error), observed,
    /// wanted, why, fix (lines for a shell, or null).
    #[arg(long)]
    pub json: bool,

    /// The machine to check
    #[command(flatten)]
    pub machine: Machine,
}

fn parse_cores(text: &str) -> Result<CoreList, String> {
    let cores: CoreList = text.parse()?;
    if cores.is_empty() { Err("expected at least one core".to_owned()) } else { Ok(cores) }
}

/// Runs the command.
pub fn run(args: &Args) -> Outcome {
    let context = args.machine.context(args.address.as_ref(), args.cores.clone())?;
    let findings = context.run_checks();
    let text = if args.json { as_json(args, &findings) } else { as_text(args, &findings) };
    match io::stdout().lock().write_all(text.as_bytes()) {
        // A reader that exits early still needs the exit status.
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => return Err(error.into()),
        _ => {}
    }
    Ok(match worst(&findings) {
        Status::Error => ExitStatus::Errors,
        Status::Warning => ExitStatus::Failures,
        Status::Ok | Status::Unknown | Status::Note => ExitStatus::Success,
    })
}

fn worst(findings: &[Finding]) -> Status {
    findings.iter().map(|finding| finding.status).max().unwrap_or(Status::Ok)
}

fn as_json(args: &Args, findings: &[Finding]) -> String {
    let address = args.address.as_ref().map(Target::text);
    let report = json!({"address": address, "cores": args.cores, "status": worst(findings), "checks": findings});
    format!("{report:#}\n")
}

fn as_text(args: &Args, findings: &[Finding]) -> String {
    let mut text = String::new();
    let mut area: Option<Area> = None;
    for Finding { name, status, observed, wanted, why, fix, area: of_finding } in findings {
        if area.replace(*of_finding) != Some(*of_finding) {
            let _ = writeln!(text, "{of_finding}");
        }
        let _ = writeln!(text, "  {status:<7}  {name}: {observed}");
        if args.all || *status > Status::Unknown {
            let _ = writeln!(text, "           wanted: {wanted}\n           why: {why}");
        }
        for (at, line) in fix.iter().flat_map(|fix| fix.lines().enumerate()) {
            let head = if at == 0 { "fix: " } else { "     " };
            let _ = writeln!(text, "           {head}{line}");
        }
    }
    let statuses = [Status::Ok, Status::Unknown, Status::Note, Status::Warning, Status::Error];
    let count = |status| findings.iter().filter(|finding| finding.status == status).count();
    let counts: Vec<String> = statuses.into_iter().map(|status| format!("{status} {}", count(status))).collect();
    let _ = writeln!(text, "{} checks: {}", findings.len(), counts.join(", "));
    if args.address.is_none() {
        text.push_str("An address (soft:NAME, iwarp:HOST, verbs:HOST) adds the checks of its fabric.\n");
    }
    text
}
