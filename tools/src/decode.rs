//! `rpcrdma decode`: decodes messages of a capture or in hex.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufRead, BufReader, BufWriter, Read, Write};
use std::path::PathBuf;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use rpcrdma::wire::rpc::{Flavor, ProgramNumber};
use rpcrdma::wire::{Revision, View};
use rpcrdma_config::print_error;

use crate::body::Bodies;
use crate::capture::{self, CaptureError};
use crate::command::{CommandError, ExitStatus, Outcome};
use crate::iwarp::{self, CaptureEvent};
use crate::json;
use crate::message::Message;
use crate::network::{self, Datagram};
use crate::payload::{Rpc, RpcHeader};
use crate::roce;

/// Length of the first read, in bytes.
///
/// It suffices to identify the input. The parser needs the first block of a capture in one read, even from a pipe that
/// delivers less at a time.
const HEAD: u64 = 4096;

/// Longest line of hex text, in bytes.
///
/// No endpoint of this engine receives a message of more than 1 MiB (`debug.max_receive_size`), which leaves 6
/// characters for each byte, such as `0x00: `.
const MAX_LINE: usize = 6 << 20;

/// Decode RPC-over-RDMA messages from a capture or from hex
///
/// FILE is a capture (pcap or pcapng) or hex text, identified by its first bytes. A capture holds RoCEv2, whose Sends
/// are reassembled per queue pair, or iWARP over TCP, reassembled per connection. Hex text has one message per line of
/// up to 6 MiB: digits with any blanks, `:` or `0x` between them. Lines that are empty or start with `#` are skipped.
///
/// An iWARP connection may use any port, but the capture must contain its start. A Terminate message, which reports an
/// error of the other end, is printed on standard error.
///
/// Each message is printed as one line. For a message that cannot be decoded, the line has the error, and the exit
/// status is 1.
///
/// Standard error reports which parts of a capture were skipped, and why: packets that are missing, cut short or
/// malformed, IP fragments, messages that the end of the capture cuts. The exit status is then also 1, except for
/// retransmitted packets.
///
/// Arguments and results are printed by field name, if their program is known: NFS version 3, MOUNT, rpcbind, and the
/// programs of --xdr. A reply belongs to the last call with its XID between the same addresses, so the capture must
/// contain the call. Long data is shortened: `bytes` is its length, `more` the number of further elements. Data in a
/// chunk is shown by its length.
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = "\
Examples:
  rpcrdma decode nfs.pcap
  rpcrdma decode --json nfs.pcap | jq 'select(.error != null)'
  echo 00000001 00000001 00000020 00000000 00000000 00000000 00000000 | rpcrdma decode

Exit status: 0 every message was decoded; 1 some were not, parts were skipped or cut short, or the input is unreadable;
2 wrong usage.")]
pub struct Args {
    /// Capture or hex text; `-` is standard input
    #[arg(default_value = "-", value_name = "FILE")]
    pub file: String,

    /// Write one JSON object per message and line
    ///
    /// Keys: vers, xid, credit, received, htype, flags, inv_handle, reads, writes, reply, error, props, payload_offset,
    /// rpc, body; `optional` for optional operations; frame, source, destination, queue_pair (of iWARP: ports),
    /// invalidate and immediate for messages of a capture. A message that cannot be decoded has error_kind and detail
    /// instead. A body has procedure, arguments or results, and error.
    #[arg(long)]
    pub json: bool,

    /// Definitions of a program in RPC language (RFC 5531), such as prot.x
    ///
    /// A file prot.placement.toml beside it names the results that travel in Write chunks. May be repeated; the first
    /// file that defines a program is used.
    #[arg(long, value_name = "FILE")]
    pub xdr: Vec<PathBuf>,

    /// Draft that defines the code points of version 2 headers
    ///
    /// ietf00 is draft-ietf-nfsv4-rpcrdma-version-two-00, cel09 is draft-cel-nfsv4-rpcrdma-version-two-09.
    #[arg(long, default_value = Revision::Ietf00.name(), value_parser = revision_parser())]
    pub revision: Revision,
}

fn revision_parser() -> impl TypedValueParser<Value = Revision> {
    PossibleValuesParser::new(Revision::ALL.iter().map(|revision| revision.name()))
        .try_map(|name| Revision::from_name(&name).ok_or("unknown revision"))
}

/// Runs the command.
pub fn run(args: &Args) -> Outcome {
    let bodies = Bodies::new(&args.xdr).map_err(|(name, reason)| CommandError::Input { name, reason })?;
    let name = if args.file == "-" { "standard input" } else { args.file.as_str() };
    let input_error = |reason: String| CommandError::Input { name: name.to_owned(), reason };
    let mut source: Box<dyn Read + Send> = match args.file.as_str() {
        "-" => Box::new(io::stdin()),
        file => Box::new(File::open(file).map_err(|error| input_error(error.to_string()))?),
    };
    let mut head = Vec::new();
    source.by_ref().take(HEAD).read_to_end(&mut head).map_err(|error| input_error(error.to_string()))?;
    if let Some(reason) = undecodable_input(&head) {
        return Err(input_error(reason));
    }
    let is_capture = capture::is_capture(&head);
    let source = io::Cursor::new(head).chain(source);
    let mut decoder = Decoder::new(args, bodies, BufWriter::new(io::stdout().lock()));
    let result = if is_capture { decoder.decode_capture(source) } else { decoder.decode_lines(BufReader::new(source)) };
    match result {
        Err(CommandError::Failed(reason)) => {
            decoder.output.flush()?;
            return Err(input_error(reason));
        }
        result => result?,
    }
    decoder.output.flush()?;
    Ok(if decoder.failures == 0 { ExitStatus::Success } else { ExitStatus::Failures })
}

/// Returns why an input that starts with `head` cannot be decoded: it is empty, compressed, or ends too early.
fn undecodable_input(head: &[u8]) -> Option<String> {
    const COMPRESSED: [(&[u8], &str); 4] =
        [(b"\x1f\x8b", "gzip"), (b"BZh", "bzip2"), (b"\xfd7zXZ\0", "xz"), (b"\x28\xb5\x2f\xfd", "zstd")];
    let advice = "check that the capture has run and was closed";
    if head.is_empty() {
        return Some(format!("empty input: {advice}"));
    }
    // A head shorter than `HEAD` is the whole input.
    if (head.len() as u64) < HEAD && capture::is_capture(head) && capture::ends_in_header(head) {
        return Some(format!("the capture ends within its header: {advice}"));
    }
    let (_, program) = COMPRESSED.iter().find(|(magic, _)| head.starts_with(magic))?;
    Some(format!("compressed by {program}: use `{program} -dc FILE | rpcrdma decode`"))
}

impl From<CaptureError> for CommandError {
    fn from(error: CaptureError) -> Self {
        Self::Failed(error.to_string())
    }
}

/// Decodes messages and prints them. Errors of the input are [`CommandError::Failed`].
struct Decoder<'a, W> {
    args: &'a Args,
    bodies: Bodies,
    output: W,
    failures: u64,
}

impl<'a, W: Write> Decoder<'a, W> {
    fn new(args: &'a Args, bodies: Bodies, output: W) -> Self {
        Decoder { args, bodies, output, failures: 0 }
    }

    fn decode_capture(&mut self, source: impl Read + Send) -> Result<(), CommandError> {
        let mut roce = roce::Reassembler::default();
        let mut iwarp = iwarp::Reassembler::default();
        let (mut sends, mut cut_short, mut fragments): (u64, u64, u64) = (0, 0, 0);
        let mut unsupported: BTreeMap<(String, String), u64> = BTreeMap::new();
        let packets = capture::read(source, |packet| {
            if let Some(link) = network::unsupported_link(packet.link) {
                *unsupported.entry((packet.interface.to_owned(), link)).or_default() += 1;
            }
            let datagram = Datagram::parse(&packet);
            fragments += u64::from(datagram.is_some_and(|datagram| datagram.is_fragment));
            let is_cut_short = packet.is_cut_short() || datagram.is_some_and(|datagram| datagram.is_cut_short);
            let truncated_before = roce.truncated();
            let roce_send = roce.read_packet(&packet).map(CaptureEvent::Send);
            cut_short += u64::from(is_cut_short || roce.truncated() > truncated_before);
            for event in roce_send.into_iter().chain(iwarp.read_packet(&packet)) {
                match event {
                    CaptureEvent::Send(send) => {
                        sends += 1;
                        self.print_message(&send.bytes, Some(&send))?;
                    }
                    CaptureEvent::Terminate { frame, direction, terminate } => {
                        print_error!("rpcrdma: frame {frame}: {direction}: Terminate: {terminate}");
                    }
                    CaptureEvent::Unreadable { frame, direction, reason } => {
                        self.failures += 1;
                        print_error!(
                            "rpcrdma: frame {frame}: {direction}: {reason}; the rest of this direction is skipped"
                        );
                    }
                }
            }
            Ok::<_, CommandError>(())
        })?;
        if cut_short > 0 {
            print_error!("rpcrdma: {cut_short} packets are cut short: capture whole packets (tcpdump -s 0)");
        }
        if fragments > 0 {
            print_error!("rpcrdma: {fragments} IP fragments skipped, because datagrams are not reassembled");
        }
        if roce.retransmitted() > 0 {
            print_error!("rpcrdma: {} retransmitted packets skipped", roce.retransmitted());
        }
        if roce.unfinished() > 0 {
            let count = roce.unfinished();
            print_error!("rpcrdma: {count} Sends are incomplete, because the capture misses packets");
        }
        if roce.unplaced() > 0 {
            let count = roce.unplaced();
            print_error!("rpcrdma: {count} packets of Sends skipped, because the capture misses packets before them");
        }
        if roce.malformed() > 0 {
            print_error!("rpcrdma: {} RoCEv2 packets skipped: too short for their headers", roce.malformed());
        }
        if iwarp.with_gaps() > 0 {
            let count = iwarp.with_gaps();
            print_error!(
                "rpcrdma: {count} directions of iWARP connections have bytes that the capture misses, so the rest is \
                 skipped: capture whole packets (tcpdump -s 0 -B 65536)"
            );
        }
        if iwarp.unfinished() > 0 {
            let count = iwarp.unfinished();
            print_error!(
                "rpcrdma: {count} directions of iWARP connections have messages or segments without their end, because \
                 the capture or the connection ended before it"
            );
        }
        for ((interface, link), count) in &unsupported {
            let source = if interface.is_empty() { String::new() } else { format!(" of {interface}") };
            print_error!(
                "rpcrdma: {count} packets{source} skipped: link type {link}; capture at an interface with Ethernet, \
                 Linux cooked or raw IP packets"
            );
        }
        let roce_skips = roce.unfinished() + roce.unplaced() + roce.malformed();
        let iwarp_skips = iwarp.with_gaps() + iwarp.unfinished();
        let skipped = cut_short + fragments + roce_skips + iwarp_skips + unsupported.values().sum::<u64>();
        if skipped > 0 {
            self.failures += skipped;
            print_error!(
                "rpcrdma: the decoded messages are incomplete: parts of the capture were cut short or skipped"
            );
        }
        match sends {
            0 => Err(CommandError::Failed(format!(
                "no RoCEv2 Send and no iWARP connection with its start in {packets} packets"
            ))),
            _ => Ok(()),
        }
    }

    fn decode_lines(&mut self, mut source: impl BufRead) -> Result<(), CommandError> {
        let failed = |error: io::Error| CommandError::Failed(error.to_string());
        let mut line = Vec::new();
        while source.by_ref().take(MAX_LINE as u64 + 1).read_until(b'\n', &mut line).map_err(failed)? > 0 {
            let is_too_long = line.len() > MAX_LINE && line.last() != Some(&b'\n');
            if is_too_long {
                source.skip_until(b'\n').map_err(failed)?;
            }
            let text = line.trim_ascii();
            if text.starts_with(b"#") {
                // A comment may have any length.
            } else if is_too_long {
                let detail = format!("line exceeds {MAX_LINE} bytes: hex text has one message per line");
                self.print_failure("bad_hex", &detail, None)?;
            } else if !text.is_empty() {
                match parse_hex(text) {
                    Ok(message) => self.print_message(&message, None),
                    Err(detail) => self.print_failure("bad_hex", &detail, None),
                }?;
            }
            line.clear();
        }
        Ok(())
    }

    fn print_message(&mut self, bytes: &[u8], send: Option<&Message>) -> io::Result<()> {
        let view = match View::check(bytes, self.args.revision) {
            Ok(view) => view,
            Err(error) => return self.print_failure(error.kind.name(), &error.to_string(), send),
        };
        let rpc = Rpc::parse(&view);
        let body = self.bodies.decode(&view, rpc.as_ref(), send.map(|send| &send.flow));
        self.failures += u64::from(body.as_ref().is_some_and(|body| body.is_malformed));
        if self.args.json {
            return self.print_object(json::message(&view, rpc.as_ref(), body), send);
        }
        self.print_location(send)?;
        write!(self.output, "{view}")?;
        if let Some(rpc) = rpc {
            write!(self.output, " | {}", rpc_text(&rpc.header))?;
        }
        if let Some(body) = body {
            write!(self.output, " | {body}")?;
        }
        writeln!(self.output)
    }

    fn print_failure(&mut self, kind: &str, detail: &str, send: Option<&Message>) -> io::Result<()> {
        self.failures += 1;
        if self.args.json {
            return self.print_object(json::failure(kind, detail), send);
        }
        self.print_location(send)?;
        writeln!(self.output, "error {kind}: {detail}")
    }

    fn print_object(
        &mut self,
        mut object: serde_json::Map<String, serde_json::Value>,
        send: Option<&Message>,
    ) -> io::Result<()> {
        if let Some(send) = send {
            json::add_send(&mut object, send);
        }
        serde_json::to_writer(&mut self.output, &object)?;
        writeln!(self.output)
    }

    /// Prints the location of a message.
    fn print_location(&mut self, send: Option<&Message>) -> io::Result<()> {
        let Some(send) = send else { return Ok(()) };
        write!(self.output, "{} {}", send.frame, send.flow)?;
        if let Some(handle) = send.invalidate {
            write!(self.output, " invalidates {handle:#x}")?;
        }
        write!(self.output, ": ")
    }
}

/// Returns a summary of an RPC header.
fn rpc_text(header: &RpcHeader<'_>) -> String {
    match header {
        RpcHeader::Call(call) => {
            let (program, version, procedure) = (ProgramNumber(call.program), call.version, call.procedure);
            let flavor = match Flavor::from_code(call.credential.flavor) {
                Some(flavor) => flavor.name().to_owned(),
                None => format!("flavor {}", call.credential.flavor),
            };
            format!("CALL program={program} version={version} procedure={procedure} {flavor}")
        }
        RpcHeader::Reply(reply) => format!("REPLY {}", reply.body),
    }
}

/// Parses a line of hex digits. Blanks and `:` separate groups, which may start with `0x`.
fn parse_hex(line: &[u8]) -> Result<Vec<u8>, String> {
    let mut digits = Vec::with_capacity(line.len());
    for group in line.split(|byte| byte.is_ascii_whitespace() || *byte == b':') {
        let group = group.strip_prefix(b"0x").unwrap_or(group);
        for byte in group {
            let digit = char::from(*byte).to_digit(16);
            digits.push(digit.ok_or_else(|| format!("`{}` is not a hex digit", byte.escape_ascii()))? as u8);
        }
    }
    match digits.as_chunks() {
        (pairs, []) => Ok(pairs.iter().map(|[high, low]| high << 4 | low).collect()),
        _ => Err(format!("expected an even number of hex digits, found {}", digits.len())),
    }
}
