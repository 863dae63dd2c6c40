//! Read chunks of a call: RDMA Reads, and their target memory.

use std::ops::Deref;

use arrayvec::ArrayVec;
use log::Level;
use rpcrdma_mempool::{Buf, Lent};

use super::Responder;
use super::header::{CallRefusal, Trouble, reply_body};
use super::reads::Reads;
use crate::fabric::{Fabric, ReceivedBuf, RemoteMemory, WorkRequest};
use crate::proto::{MAX_READ_SEGMENTS, Refusal};
use crate::service::{
    Call, CallBoxes, CallParts, LocalProcedure, Long, MAX_CHUNKS, Miscounted, Ready, RpcMessage, Unready,
};
use crate::shard::conn::Conn;
use crate::shard::context::Context;
use crate::wire::Segment;

/// A call with RDMA Reads.
#[derive(Debug)]
pub(super) enum Fetching {
    /// For its RPC message.
    Long(Call<Long>),
    /// For its arguments.
    Ready(Call<Ready>),
}

impl Deref for Fetching {
    type Target = CallParts;

    #[inline(always)]
    fn deref(&self) -> &CallParts {
        match self {
            Self::Long(call) => call,
            Self::Ready(call) => call,
        }
    }
}

impl Fetching {
    /// Returns it unread, to wait.
    fn give_back(self) -> Unready {
        match self {
            Self::Long(call) => Unready::Long(call),
            Self::Ready(call) => Unready::Admitted(call.give_back()),
        }
    }
}

/// A call that waits for its RDMA Reads.
#[derive(Debug)]
pub(super) struct PendingReads {
    call: Fetching,
    landing: ArrayVec<Lent, MAX_CHUNKS>,
    /// Number of posted RDMA Reads.
    count: usize,
}

impl PendingReads {
    /// Its RDMA Reads: number and bytes.
    pub(super) fn reads(&self) -> Reads {
        Reads { count: self.count, bytes: self.landing.iter().map(Lent::len).sum() }
    }

    /// Drops the call after its Reads have failed.
    pub(super) fn end(self, boxes: &mut CallBoxes) {
        match self.call {
            Fetching::Long(call) => boxes.put(call),
            Fetching::Ready(call) => boxes.put(call),
        }
    }
}

impl Responder {
    /// Posts the RDMA Reads of a call, which runs after all have completed. Returns it without enough memory.
    pub(super) fn fetch<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        conn: &mut Conn,
        mut call: Fetching,
    ) -> Result<(), Unready> {
        let before = conn.sends.len();
        match self.push_reads(cx, conn, &mut call) {
            Ok((landing, count)) => {
                let index = call.id().index();
                conn.served.pending[index] = Some(PendingReads { call, landing, count });
            }
            // No Reads for a waiting or refused call.
            Err(NoLanding::NoMemory) => {
                conn.sends.truncate(before);
                return Err(call.give_back());
            }
            Err(NoLanding::Wrong(why)) => {
                conn.sends.truncate(before);
                self.refuse_landing(cx, conn, call, &why);
            }
        }
        Ok(())
    }

    /// Queues the RDMA Reads of a call; returns their targets and number.
    #[inline(always)]
    fn push_reads<F: Fabric>(
        &self,
        cx: &Context<F>,
        conn: &mut Conn,
        call: &mut Fetching,
    ) -> Result<(ArrayVec<Lent, MAX_CHUNKS>, usize), NoLanding> {
        let name = call.id().index() as u64;
        let first_two = {
            let mut reads = call.chunks().to_fetch();
            (reads.next(), reads.next())
        };
        if let (Some((at, segment)), None) = first_two {
            // Most chunks have one segment.
            let lent = self.land(cx, call, at, segment.length as usize)?;
            conn.sends.push_named(name, true, || read_of(&lent, 0, &segment));
            return Ok((ArrayVec::from_iter([lent]), 1));
        }
        let mut landing = ArrayVec::<Lent, MAX_CHUNKS>::new();
        let mut filled = 0;
        let (all, mut before): (ArrayVec<_, MAX_READ_SEGMENTS>, _) = (call.chunks().to_fetch().collect(), None);
        let (count, mut left) = (all.len(), all.len());
        let lens: ArrayVec<usize, MAX_CHUNKS> = call.chunks().chunks_to_fetch().collect();
        let mut lens = lens.into_iter();
        for (at, segment) in all {
            left -= 1;
            let signalled = left == 0;
            if before.replace(at) != Some(at) {
                landing.push(self.land(cx, call, at, lens.next().unwrap_or_default())?);
                filled = 0;
            }
            let Some(lent) = landing.last() else { continue };
            let len = segment.length as usize;
            // Reads complete in order: the last one is signaled.
            conn.sends.push_named(name, signalled, || read_of(lent, filled, &segment));
            filled += len;
        }
        Ok((landing, count))
    }

    /// Target of a call's next Read chunk, `len` bytes at this position: the procedure's choice, or pool memory.
    #[inline(always)]
    fn land<F: Fabric>(
        &self,
        cx: &Context<F>,
        call: &mut Fetching,
        position: u32,
        len: usize,
    ) -> Result<Lent, NoLanding> {
        // The message of a long call is no argument.
        if let Fetching::Ready(call) = call {
            let index = call.push_argument(position);
            if let Some(services) = &self.services
                && let entry = services.entry(call.entry())
                && entry.read_target.is_some()
            {
                return choose_read_target(cx, entry, call, index, len);
            }
        }
        lend(cx.alloc_chunk(len))
    }

    /// Refuses a call whose procedure chose unsuitable memory for a Read chunk.
    #[cold]
    fn refuse_landing<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn, call: Fetching, why: &str) {
        // The Reads of a long call use pool memory.
        let Fetching::Ready(call) = call else { return };
        cx.stats.read_targets_refused += 1;
        let (peer, name) = (conn.who(), call.name());
        let line = format_args!("{peer}: SYSTEM_ERR to {name}: Read chunk: {why}");
        cx.log_of(Level::Error, "Read chunks that cannot land", Some(name), line);
        self.refuse_call(cx, conn, call.refuse(), CallRefusal::Rpc(reply_body(Refusal::SystemError)));
    }

    /// Handles the completion of a call's RDMA Reads.
    pub(in crate::shard) fn fetched<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn, index: usize) {
        let Some(PendingReads { call, mut landing, .. }) = conn.served.pending.get_mut(index).and_then(Option::take)
        else {
            return;
        };
        conn.served.fetched = conn.served.fetched.wrapping_add(1);
        let mut last = || landing.pop()?.reclaim().ok();
        let mut call = match call {
            Fetching::Long(call) => return self.long_call_fetched(cx, conn, call, last()),
            Fetching::Ready(call) => call,
        };
        if !call.landed(last) {
            return self.refuse_call(cx, conn, call.refuse(), CallRefusal::System(Trouble::Lost));
        }
        if let Some(services) = &self.services
            && let Err(wrong) = call.trim_arguments(&services.entry(call.entry()).binding)
        {
            return self.refuse_miscounted(cx, conn, call, wrong);
        }
        self.run(cx, conn, call);
    }

    /// Refuses a call with a Read chunk that does not match its length word: the real length is unknown.
    #[cold]
    fn refuse_miscounted<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        conn: &mut Conn,
        call: Call<Ready>,
        Miscounted { chunk, word }: Miscounted,
    ) {
        let (peer, name) = (conn.who(), call.name());
        let word = word.map_or_else(|| "no count".to_owned(), |word| format!("count {word}"));
        let line = format_args!(
            "{peer}: GARBAGE_ARGS to {name}: {word} before a Read chunk of {chunk} bytes (Procedure::uncounted, unless its reduced arguments are opaque<> or string<>)"
        );
        cx.log_of(Level::Warn, "Read chunks that are not what the word in front of them counts", Some(name), line);
        self.refuse_call(cx, conn, call.refuse(), CallRefusal::Rpc(reply_body(Refusal::GarbageArguments)));
    }

    /// Continues a long call after the Read of its RPC message, as an inline one.
    #[cold]
    fn long_call_fetched<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        conn: &mut Conn,
        call: Call<Long>,
        message: Option<Buf>,
    ) {
        let Some(message) = message else {
            return self.refuse_call(cx, conn, call.refuse(), CallRefusal::System(Trouble::Lost));
        };
        let mut call = call.has_come();
        call.put_together();
        let read = self.read_rpc(&message, &call);
        self.serve(cx, conn, call, read, RpcMessage { buf: ReceivedBuf::whole(message), at: 0 });
    }
}

/// Reason for the lack of a target.
enum NoLanding {
    /// No free buffer.
    NoMemory,
    /// Its procedure chose unsuitable memory, for this reason.
    Wrong(String),
}

/// Allocates a pool buffer for a Read chunk.
#[inline(always)]
fn lend(buf: Option<Buf>) -> Result<Lent, NoLanding> {
    buf.and_then(|buf| buf.lend().ok()).ok_or(NoLanding::NoMemory)
}

/// Lets a procedure choose the target of a Read chunk.
#[inline(never)]
fn choose_read_target<F: Fabric>(
    cx: &Context<F>,
    entry: &LocalProcedure,
    call: &Call<Ready>,
    index: usize,
    len: usize,
) -> Result<Lent, NoLanding> {
    let wrong = |why: String| Err(NoLanding::Wrong(why));
    let mut buf = match entry.choose_read_target(call, index, len) {
        Ok(Some(buf)) => buf,
        Ok(None) if cx.pool.room(len).1 == 0 => {
            return wrong(format!("none was chosen, and no buffer of `memory.bulk_buffers` has {len} bytes"));
        }
        Ok(None) => return lend(cx.alloc_chunk(len)),
        Err(panic) => return wrong(format!("the `Procedure::place_reads_in` callback panicked: {panic}")),
    };
    if buf.len() < len {
        return wrong(format!("a buffer of {} bytes for {len}", buf.len()));
    }
    if !cx.knows(buf.arena()) {
        return wrong(format!("a buffer in arena {}, which is not among `memory.arenas`", buf.arena()));
    }
    buf.set_window(buf.start(), len);
    buf.lend().or_else(|_| wrong("a buffer of a pool that was not made on the shard's thread".to_owned()))
}

/// RDMA Read of a segment, into a buffer at an offset.
#[inline(always)]
fn read_of(landing: &Lent, offset: usize, from: &Segment) -> WorkRequest {
    let remote = RemoteMemory { rkey: from.handle, address: from.offset };
    WorkRequest::Read { dst: landing.clone(), offset, len: from.length as usize, remote }
}
