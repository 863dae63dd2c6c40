//! The RPC program of `serve`.
#![forbid(unsafe_code)]

use std::sync::Arc;

use rpcrdma::mempool::{Arena, ArenaConfig, Class, Frozen, Pool, PoolConfig};
use rpcrdma::wire::xdr::padded;
use rpcrdma::{CreditMode, Procedure, Refusal, ServerCall, Services};

use super::config::Load;
use super::place::Place;
use super::reverse::Reverser;
use crate::cli::{Defer, Form, Idle};
use crate::failure::Failure;

/// In the user-defined range (RFC 5531 §14.3).
pub(crate) const PROGRAM: u32 = 0x2052_5046;
/// Sides with different versions refuse each other.
pub(crate) const VERSION: u32 = 4;

/// No arguments, no results.
pub(crate) const NULL: u32 = 0;
/// Returns the arguments as results, up to [`SMALL`] bytes.
pub(crate) const ECHO_SMALL: u32 = 1;
/// As [`ECHO_SMALL`], up to the message length.
pub(crate) const ECHO: u32 = 2;
/// Fills one Write chunk with [`pattern`]. Results: its length.
pub(crate) const READ: u32 = 3;
/// Arguments: the length of one opaque in a Read chunk at position 4. Results: that length, and the [`tail`] of the
/// received bytes.
pub(crate) const WRITE: u32 = 4;
/// Results: [`Info`].
pub(crate) const INFO: u32 = 5;

/// As [`READ`], without a chunk. Arguments: the length. Results: one opaque.
pub(crate) const READ_MESSAGE: u32 = 6;
/// As [`WRITE`], without a chunk. Arguments: one opaque.
pub(crate) const WRITE_MESSAGE: u32 = 7;
/// The server starts to call the client. Arguments: a [`Run`](super::reverse::Run), as JSON. Results: the number of
/// outstanding calls; 0 if the server calls another client already.
pub(crate) const START_REVERSE: u32 = 8;
/// Arguments: a position. Results: the length of the last run's outcome as JSON, or 0 without an outcome; then up to
/// [`PAGE`] bytes from that position.
pub(crate) const OUTCOME: u32 = 9;

/// Bytes of results of [`OUTCOME`]: they fit the shortest message.
pub(crate) const PAGE: usize = 512;
/// Results up to this size use small buffers.
pub(crate) const SMALL: usize = 256;

/// Description that a server sends to its clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Info {
    /// Core of the first shard.
    pub(crate) core: u32,
    pub(crate) shards: u32,
    /// Idle policy.
    pub(crate) idle: Idle,
    /// Threads that run the procedures.
    pub(crate) workers: u32,
    /// Delay before the shard's task runs them; `None`: no deferral.
    pub(crate) defer: Option<Defer>,
    /// Credit limit.
    pub(crate) credits: u32,
    /// Inline threshold.
    pub(crate) inline_threshold: u32,
    /// Preferred version and credit scheme.
    pub(crate) scheme: CreditMode,
    /// Load that the server has memory for.
    pub(crate) load: Load,
}

/// Bytes of an [`Info`].
const INFO_BYTES: usize = 52;
/// The index is the code on the wire.
const SCHEME_CODES: [CreditMode; 3] = [CreditMode::V2Windowed, CreditMode::V2Incremental, CreditMode::V1];
/// The index is the code on the wire.
const FORM_CODES: [Form; 4] = [Form::Inline, Form::Continued, Form::Chunk, Form::Long];
/// The index is the code on the wire.
const IDLE_CODES: [Idle; 4] = [Idle::Poll, Idle::Adaptive, Idle::Event, Idle::Yield];

impl Info {
    fn encode(&self) -> [u8; INFO_BYTES] {
        let idle = IDLE_CODES.iter().position(|&idle| idle == self.idle).unwrap_or_default() as u32;
        let Load { connections, outstanding, bulk, message, form } = self.load;
        let scheme = SCHEME_CODES.iter().position(|&code| code == self.scheme).unwrap_or_default() as u32;
        let form = FORM_CODES.iter().position(|&code| code == form).unwrap_or_default() as u32;
        let words = [
            self.core,
            self.shards,
            idle,
            self.workers,
            self.credits,
            self.inline_threshold,
            connections as u32,
            outstanding as u32,
            bulk as u32,
            message as u32,
            form,
            scheme,
            self.defer.map_or(0, |Defer(microseconds)| microseconds.saturating_add(1)),
        ];
        let mut out = [0; INFO_BYTES];
        for (bytes, word) in out.chunks_exact_mut(4).zip(words) {
            bytes.copy_from_slice(&word.to_be_bytes());
        }
        out
    }

    /// Decodes a server's description.
    pub(crate) fn decode(data: &[u8]) -> Result<Self, String> {
        let (words, rest) = data.as_chunks::<4>();
        let words: Vec<u32> = words.iter().map(|bytes| u32::from_be_bytes(*bytes)).collect();
        let &[
            core,
            shards,
            idle,
            workers,
            credits,
            inline_threshold,
            connections,
            outstanding,
            bulk,
            message,
            form,
            scheme,
            defer,
        ] = words.as_slice()
        else {
            return Err(format!("the server says of itself {} bytes instead of {INFO_BYTES}", data.len()));
        };
        let idle = IDLE_CODES.get(idle as usize).filter(|_| rest.is_empty());
        let idle = *idle.ok_or("the server has an idle policy that is not known here")?;
        let form = *FORM_CODES.get(form as usize).ok_or("the server has a form that is not known here")?;
        let load = Load {
            connections: connections.max(1) as usize,
            outstanding: outstanding as usize,
            bulk: bulk as usize,
            message: message as usize,
            form,
        };
        let scheme = *SCHEME_CODES.get(scheme as usize).ok_or("the server has a version that is not known here")?;
        let defer = defer.checked_sub(1).map(Defer);
        Ok(Self { core, shards, idle, workers, defer, credits, inline_threshold, scheme, load })
    }
}

/// Parts of one side's program.
#[derive(Clone)]
pub(crate) struct Program {
    info: Info,
    reverser: Option<Reverser>,
    /// Source of the data of READ.
    content: Arc<Frozen>,
    arena: Arena,
    longest: usize,
}

impl Program {
    /// The program of a side that describes itself as `info`. With a `reverser` it calls clients on request.
    pub(crate) fn new(info: &Info, reverser: Option<Reverser>) -> Result<Self, Failure> {
        let longest = (info.inline_threshold as usize).max(info.load.message + 4);
        let (arena, content) = content(info.load.bulk.max(longest))?;
        Ok(Self { info: *info, reverser, content: Arc::new(content), arena, longest })
    }

    /// Memory of the data of READ, for the configuration.
    pub(crate) fn arena(&self) -> Arena {
        self.arena.clone()
    }

    /// The procedures, run at `place`.
    pub(crate) fn services<P: Place>(&self, place: &P) -> Services<P::Sharing> {
        let Self { info, reverser, content, longest, .. } = self;
        let mut services = Services::new();
        let mut add = |number, procedure: Procedure<P::Sharing>| {
            services.add(PROGRAM, VERSION, number, procedure);
        };
        add(NULL, place.procedure(|_| Ok(())));
        add(ECHO_SMALL, place.procedure(echo).max_reply(SMALL));
        add(ECHO, place.procedure(echo).max_reply(*longest));
        let says = info.encode();
        add(INFO, place.procedure(move |call| reply(call, &says)));
        if let Some(reverser) = reverser {
            let (starts, tells) = (reverser.clone(), reverser.clone());
            add(START_REVERSE, place.procedure(move |call| starts.start(call)));
            add(OUTCOME, place.procedure(move |call| tells.tell(call)).max_reply(PAGE));
        }
        let whole = content.part(0, content.len());
        add(READ_MESSAGE, place.procedure(move |call| read_message(call, &whole)).max_reply(*longest));
        add(WRITE_MESSAGE, place.procedure(write_message));
        let bulk = info.load.bulk;
        if bulk > 0 {
            let content = content.part(0, content.len());
            let read = place.procedure(move |call| read(call, &content));
            add(READ, read.write_chunks(1, bulk).results_from_handler());
            add(WRITE, place.procedure(write).read_chunks(1, bulk));
        }
        services
    }
}

fn echo(call: &mut ServerCall) -> Result<(), Refusal> {
    let (args, mut results) = call.args_and_writer();
    results.put(args).map_err(|_| Refusal::GarbageArguments)
}

fn read(call: &mut ServerCall, content: &Frozen) -> Result<(), Refusal> {
    let len = call.write_chunk_capacity(0).filter(|&len| len <= content.len());
    let len = len.ok_or(Refusal::GarbageArguments)?;
    call.set_result(0, content.part(0, len))?;
    reply(call, &(len as u32).to_be_bytes())
}

fn write(call: &mut ServerCall) -> Result<(), Refusal> {
    let chunk = call.read_chunk(0).ok_or(Refusal::GarbageArguments)?;
    let len = (chunk.len() as u32).to_be_bytes();
    if call.args() != len {
        return Err(Refusal::GarbageArguments);
    }
    let mut results = [0; 8];
    results[..4].copy_from_slice(&len);
    results[4..].copy_from_slice(&tail(chunk).to_be_bytes());
    reply(call, &results)
}

fn read_message(call: &mut ServerCall, content: &[u8]) -> Result<(), Refusal> {
    let len = word(call.args());
    let content = len.and_then(|len| content.get(..len as usize)).ok_or(Refusal::GarbageArguments)?;
    let mut results = call.reply_writer();
    let padding = padded(content.len()) - content.len();
    let written = results.put(&(content.len() as u32).to_be_bytes()).and_then(|()| results.put(content));
    written.and_then(|()| results.put_zeroes(padding)).map_err(|_| Refusal::SystemError)
}

fn write_message(call: &mut ServerCall) -> Result<(), Refusal> {
    let opaque = |args: &[u8]| {
        let (len, rest) = args.split_first_chunk()?;
        let size = u32::from_be_bytes(*len) as usize;
        let whole = rest.len() == padded(size);
        Some((*len, tail(rest.get(..size).filter(|_| whole)?)))
    };
    let (len, tail) = opaque(call.args()).ok_or(Refusal::GarbageArguments)?;
    let mut results = [0; 8];
    results[..4].copy_from_slice(&len);
    results[4..].copy_from_slice(&tail.to_be_bytes());
    reply(call, &results)
}

pub(super) fn reply(call: &mut ServerCall, results: &[u8]) -> Result<(), Refusal> {
    let mut room = call.reply_writer();
    room.put(results).map_err(|_| Refusal::SystemError)
}

/// `len` bytes of [`pattern`], immutable from here on.
fn content(len: usize) -> Result<(Arena, Frozen), Failure> {
    let arena = ArenaConfig { bytes: 0, name: "rpcperf-content", ..ArenaConfig::default() };
    let pool = Pool::new(&PoolConfig { classes: vec![Class { size: len, count: 1 }], arena })
        .map_err(|e| Failure::run(format!("memory for {len} bytes to be read"), e))?;
    let mut buf = pool.alloc(len).ok_or_else(|| Failure::Run(format!("no buffer of {len} bytes")))?;
    fill(&mut buf);
    Ok((pool.arena().clone(), buf.freeze()))
}

/// Byte `at` of each payload. It is never 0, so that unwritten memory does not pass for data.
pub(crate) fn pattern(at: usize) -> u8 {
    (at % PERIOD) as u8 + 1
}

/// Period of [`pattern`], in bytes.
const PERIOD: usize = 251;

/// The number, if `bytes` is exactly one word.
pub(crate) fn word(bytes: &[u8]) -> Option<u32> {
    bytes.try_into().ok().map(u32::from_be_bytes)
}

/// Fills memory with [`pattern`].
pub(crate) fn fill(bytes: &mut [u8]) {
    let (head, rest) = bytes.split_at_mut(bytes.len().min(PERIOD));
    head.iter_mut().enumerate().for_each(|(at, byte)| *byte = pattern(at));
    rest.chunks_mut(PERIOD).for_each(|again| again.copy_from_slice(&head[..again.len()]));
}

/// The last four bytes, or all of fewer. Data copied in order is complete if its end is.
#[inline]
pub(crate) fn tail(bytes: &[u8]) -> u32 {
    match bytes.last_chunk() {
        Some(last) => u32::from_be_bytes(*last),
        None => bytes.iter().fold(0, |tail, &byte| tail << 8 | u32::from(byte)),
    }
}

/// Sets the [`tail`] of `bytes` to `stamp`; returns the part that fits.
#[inline]
pub(crate) fn stamp(bytes: &mut [u8], stamp: u32) -> u32 {
    if let Some(last) = bytes.last_chunk_mut() {
        *last = stamp.to_be_bytes();
        return stamp;
    }
    let room = bytes.len();
    bytes.copy_from_slice(&stamp.to_be_bytes()[4 - room..]);
    tail(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn info_there_and_back() {
        let load = Load { connections: 4, outstanding: 16, bulk: 1 << 20, message: 70_000, form: Form::Continued };
        for (idle, form) in IDLE_CODES.into_iter().zip(FORM_CODES) {
            let load = Load { form, ..load };
            let info = Info {
                core: 3,
                shards: 2,
                idle,
                workers: 2,
                defer: None,
                credits: 64,
                inline_threshold: 4096,
                scheme: CreditMode::V1,
                load,
            };
            assert_eq!(Info::decode(&info.encode()), Ok(info));
            for defer in [0, 700] {
                let info = Info { defer: Some(Defer(defer)), ..info };
                assert_eq!(Info::decode(&info.encode()), Ok(info));
            }
            assert!(Info::decode(&info.encode()[..28]).is_err());
        }
        assert!(Info::decode(&[9; INFO_BYTES]).unwrap_err().contains("idle"));
    }

    #[test]
    fn a_stamp_is_the_tail() {
        for len in 0..9 {
            let mut bytes = vec![0xEE; len];
            let stamped = stamp(&mut bytes, 0x0102_0304);
            assert_eq!(tail(&bytes), stamped);
            assert_eq!(stamped, [0, 4, 0x0304, 0x0002_0304, 0x0102_0304][len.min(4)]);
            assert!(bytes.iter().rev().skip(4).all(|&byte| byte == 0xEE));
        }
    }
}
