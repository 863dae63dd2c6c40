//! The RPC program of `serve`.
#![forbid(unsafe_code)]

use std::sync::Arc;

use rpcrdma::mempool::{Arena, ArenaConfig, Class, Frozen, Pool, PoolConfig};
use rpcrdma::typed::{CallInfo, ReplySender, ReplySent, Signature};
use rpcrdma::{CreditMode, Procedure, Refusal, ServerCall, Services};

use super::config::Load;
use super::procedure_runner::ProcedureRunner;
use super::protocol::rpcperf_v5::{
    self, Outcome, PROGRAM, Read, ReadMessage, StartReverse, StopReverse, VERSION, Write, WriteMessage,
};
use super::protocol::{
    BulkPayload, CreditMode as WireCreditMode, IdlePolicy, Payload, PayloadForm, Received, Run, ServerInfo,
};
use super::reverse::ReverseControl;
use crate::cli::{Defer, Form, Idle};
use crate::failure::Failure;

/// Procedure without arguments and results.
pub(crate) const NULL: u32 = 0;
/// Procedure that returns its arguments as results, up to [`SMALL`] bytes.
pub(crate) const ECHO_SMALL: u32 = 1;
/// Procedure that returns its arguments as results, up to the message length.
pub(crate) const ECHO: u32 = 2;
/// Results up to this size use small buffers.
pub(crate) const SMALL: usize = 256;

/// Conversions between enumerations with the same variants.
macro_rules! convert_variants {
    ($($ours:ident, $theirs:ident: $($variant:ident)*;)*) => {
        $(
            impl From<$ours> for $theirs {
                fn from(ours: $ours) -> Self {
                    match ours { $($ours::$variant => Self::$variant),* }
                }
            }

            impl From<$theirs> for $ours {
                fn from(theirs: $theirs) -> Self {
                    match theirs { $($theirs::$variant => Self::$variant),* }
                }
            }
        )*
    };
}
convert_variants! {
    Idle, IdlePolicy: Poll Adaptive Event Yield;
    Form, PayloadForm: Inline Continued Chunk Long;
    CreditMode, WireCreditMode: V2Windowed V2Incremental V1;
}

impl ServerInfo {
    /// A description of a server for this load; the other fields are zero.
    pub(crate) fn for_load(load: &Load) -> Self {
        Self {
            connections: load.connections as u32,
            outstanding: load.outstanding as u32,
            bulk: load.bulk as u32,
            message: load.message as u32,
            form: load.form.into(),
            ..Self::default()
        }
    }

    /// Load that the server has memory for.
    pub(crate) fn load(&self) -> Load {
        Load {
            connections: self.connections.max(1) as usize,
            outstanding: self.outstanding as usize,
            bulk: self.bulk as usize,
            message: self.message as usize,
            form: self.form.into(),
        }
    }

    /// Sets the delay before the shard's task runs procedures; `None`: no deferral.
    pub(crate) fn with_defer(self, defer: Option<Defer>) -> Self {
        Self { defer: defer.map_or(0, |Defer(microseconds)| microseconds.saturating_add(1)), ..self }
    }

    /// The delay before the shard's task runs procedures, in microseconds.
    pub(crate) fn deferred_us(&self) -> Option<u32> {
        self.defer.checked_sub(1)
    }
}

/// The procedures of one side, and their data.
#[derive(Clone)]
pub(crate) struct Program {
    info: ServerInfo,
    reverse: Option<ReverseControl>,
    /// Source of the data of READ.
    content: Arc<Frozen>,
    arena: Arena,
    longest: usize,
}

impl Program {
    /// The program of a side that describes itself as `info`. With `reverse` it calls clients on request.
    pub(crate) fn new(info: &ServerInfo, reverse: Option<ReverseControl>) -> Result<Self, Failure> {
        let longest = (info.inline_threshold as usize).max(info.message as usize + 4);
        let (arena, content) = content((info.bulk as usize).max(longest))?;
        Ok(Self { info: *info, reverse, content: Arc::new(content), arena, longest })
    }

    /// Memory of the data of READ, for the configuration.
    pub(crate) fn arena(&self) -> Arena {
        self.arena.clone()
    }

    /// The procedures, run by `runner`. Their memory is sized for the load, not for the protocol's limits.
    pub(crate) fn services<P: ProcedureRunner>(&self, runner: &P) -> Services<P::Sharing> {
        let program = Arc::new(self.clone());
        let typed = || {
            let program = Arc::clone(&program);
            runner.procedure(move |call| rpcperf_v5::run(&*program, call))
        };
        let mut services = Services::new();
        let mut add = |number, procedure: Procedure<P::Sharing>| {
            services.add(PROGRAM, VERSION, number, procedure);
        };
        add(NULL, runner.procedure(|_| Ok(())));
        add(ECHO_SMALL, runner.procedure(echo).max_reply(SMALL));
        add(ECHO, runner.procedure(echo).max_reply(self.longest));
        add(rpcperf_v5::Info::NUMBER, typed());
        if self.reverse.is_some() {
            add(StartReverse::NUMBER, typed());
            add(StopReverse::NUMBER, typed());
            add(Outcome::NUMBER, typed().max_reply(Outcome::BINDING.max_reply));
        }
        add(ReadMessage::NUMBER, typed().max_reply(self.longest));
        add(WriteMessage::NUMBER, typed());
        let bulk = self.info.bulk as usize;
        if bulk > 0 {
            add(Read::NUMBER, typed().write_chunks(1, bulk).results_from_handler());
            add(Write::NUMBER, typed().read_chunks(1, bulk));
        }
        services
    }

    /// The first `len` bytes of the content, if it has as many.
    fn content(&self, len: u32) -> Result<&[u8], Refusal> {
        self.content.get(..len as usize).ok_or(Refusal::GarbageArguments)
    }
}

impl rpcperf_v5::Server for Program {
    fn read(&self, _: CallInfo<'_>, len: u32, mut answer: ReplySender<'_, Read>) -> Result<ReplySent, Refusal> {
        let len = self.content(len)?.len();
        let data = answer.lend(self.content.part(0, len))?;
        answer.send(&BulkPayload(data))
    }

    fn write(
        &self,
        _: CallInfo<'_>,
        data: BulkPayload<'_>,
        answer: ReplySender<'_, Write>,
    ) -> Result<ReplySent, Refusal> {
        answer.send(&Received::of(data.0.bytes()))
    }

    fn info(&self, _: CallInfo<'_>, answer: ReplySender<'_, rpcperf_v5::Info>) -> Result<ReplySent, Refusal> {
        answer.send(&self.info)
    }

    fn read_message(
        &self,
        _: CallInfo<'_>,
        len: u32,
        answer: ReplySender<'_, ReadMessage>,
    ) -> Result<ReplySent, Refusal> {
        answer.send(&Payload(self.content(len)?))
    }

    fn write_message(
        &self,
        _: CallInfo<'_>,
        data: Payload<'_>,
        answer: ReplySender<'_, WriteMessage>,
    ) -> Result<ReplySent, Refusal> {
        answer.send(&Received::of(data.0))
    }

    fn start_reverse(
        &self,
        info: CallInfo<'_>,
        run: Run<'_>,
        answer: ReplySender<'_, StartReverse>,
    ) -> Result<ReplySent, Refusal> {
        let reverse = self.reverse.as_ref().ok_or(Refusal::ProcedureUnavailable)?;
        answer.send(&reverse.start(info.caller(), run.0)?)
    }

    fn stop_reverse(&self, info: CallInfo<'_>, answer: ReplySender<'_, StopReverse>) -> Result<ReplySent, Refusal> {
        self.reverse.as_ref().ok_or(Refusal::ProcedureUnavailable)?.stop(info.caller());
        answer.send(&())
    }

    fn outcome(&self, _: CallInfo<'_>, at: u32, answer: ReplySender<'_, Outcome>) -> Result<ReplySent, Refusal> {
        self.reverse.as_ref().ok_or(Refusal::ProcedureUnavailable)?.send_outcome(at as usize, answer)
    }
}

impl Received {
    /// The result that proves to a sender that `data` arrived.
    fn of(data: &[u8]) -> Self {
        Self { len: data.len() as u32, tail: tail(data) }
    }
}

fn echo(call: &mut ServerCall) -> Result<(), Refusal> {
    let (args, mut results) = call.args_and_writer();
    results.put(args).map_err(|_| Refusal::GarbageArguments)
}

/// Returns `len` immutable bytes of [`pattern`].
fn content(len: usize) -> Result<(Arena, Frozen), Failure> {
    let arena = ArenaConfig { bytes: 0, name: "rpcperf-content", ..ArenaConfig::default() };
    let pool = Pool::new(&PoolConfig { classes: vec![Class { size: len, count: 1 }], arena })
        .map_err(|e| Failure::run(format!("memory for {len} bytes of content"), e))?;
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

/// Fills memory with [`pattern`].
pub(crate) fn fill(bytes: &mut [u8]) {
    let (head, rest) = bytes.split_at_mut(bytes.len().min(PERIOD));
    head.iter_mut().enumerate().for_each(|(at, byte)| *byte = pattern(at));
    rest.chunks_mut(PERIOD).for_each(|part| part.copy_from_slice(&head[..part.len()]));
}

/// Returns the last four bytes, or all bytes if there are fewer. If they arrived in data that is copied in order, so
/// did the rest.
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
    fn an_encoded_load_decodes_to_the_original() {
        let load = Load { connections: 4, outstanding: 16, bulk: 1 << 20, message: 70_000, form: Form::Continued };
        assert_eq!(ServerInfo::for_load(&load).load(), load);
    }

    #[test]
    fn an_encoded_delay_decodes_to_the_original() {
        for defer in [None, Some(0), Some(700)] {
            assert_eq!(ServerInfo::default().with_defer(defer.map(Defer)).deferred_us(), defer);
        }
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
