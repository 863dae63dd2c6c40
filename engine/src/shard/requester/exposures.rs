//! Chunk memory of calls, and its exposure to their peer.
//!
//! The memory of a call is boxed, because most calls have none. Each thread keeps boxes for reuse, so that a call
//! allocates nothing.
//!
//! Memory stays exposed from the posting of a call until the peer provably cannot reach it. Each call that exposes
//! memory has an *exposure*, and each exposed buffer a memory window. Slots and windows are reused.

use std::cell::RefCell;

use arrayvec::ArrayVec;
use rpcrdma_mempool::{Buf, Lent};

use super::outgoing_calls::{CallResult, CompletionTarget};
use crate::fabric::WindowId;
use crate::proto::{CallError, CallId, ConnectionTerms, MAX_READ_SEGMENTS, MAX_WRITE_SEGMENTS};
use crate::service::{MAX_CHUNKS, MAX_SEGMENTS};
use crate::shard::memory::push;
use crate::wire::{Chunks, ErrorBody, ReadSegment, Segment, WriteList};

/// Maximum free boxes that a thread keeps.
const MAX_FREE_BOXES: usize = 1024;

thread_local! {
    #[expect(clippy::vec_box, reason = "the boxes themselves are reused")]
    static FREE_BOXES: RefCell<Vec<Box<CallBuffers>>> = const { RefCell::new(Vec::new()) };
}

/// Kind of an exposed chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ChunkKind {
    /// A Read chunk, and its position in the RPC message.
    Read(u32),
    /// A Write chunk, and its written bytes according to the peer's reply.
    Write(u32),
    Reply,
}

/// Buffers of one call.
#[derive(Debug, Default)]
pub(crate) struct CallBuffers {
    /// Arguments that are not in the message yet.
    pub(crate) args: Vec<u8>,
    /// Read chunks: position in the RPC message, and data.
    pub(crate) send: ArrayVec<(u32, Buf), MAX_CHUNKS>,
    /// Write chunks.
    pub(crate) receive: ArrayVec<Buf, MAX_CHUNKS>,
    /// The RPC message of a long call: its Position Zero Read chunk.
    pub(crate) call: Option<Buf>,
    pub(crate) reply: Option<Buf>,
    /// Write chunks to allocate at the start of the call: the index of each, and its bytes.
    pub(crate) unallocated_writes: ArrayVec<(usize, u32), MAX_CHUNKS>,
    /// Whether the call has too many chunks.
    pub(crate) too_many: bool,
    /// Maximum bytes of inline results beside the Write chunks, if the binding is known.
    pub(crate) max_inline_results: Option<usize>,
}

impl CallBuffers {
    /// Takes the next buffer, in header order.
    #[inline]
    pub(super) fn take_next(&mut self) -> Option<(ChunkKind, Buf)> {
        if let Some(buf) = self.call.take() {
            return Some((ChunkKind::Read(0), buf));
        }
        if let Some((position, buf)) = self.send.pop_at(0) {
            return Some((ChunkKind::Read(position), buf));
        }
        if let Some(buf) = self.receive.pop_at(0) {
            return Some((ChunkKind::Write(0), buf));
        }
        self.reply.take().map(|buf| (ChunkKind::Reply, buf))
    }

    /// Number of Write chunks, with memory or without.
    #[inline]
    pub(crate) fn results(&self) -> usize {
        self.receive.len() + self.unallocated_writes.len()
    }

    /// Whether a call with these chunks cannot start yet.
    #[inline]
    pub(crate) fn is_unfinished(&self) -> bool {
        self.too_many || !self.unallocated_writes.is_empty()
    }

    /// Bytes of each Write chunk.
    pub(crate) fn result_lens(&self) -> ArrayVec<usize, MAX_CHUNKS> {
        let mut lens: ArrayVec<_, MAX_CHUNKS> = self.receive.iter().map(|buf| buf.len()).collect();
        self.unallocated_writes.iter().for_each(|&(index, len)| lens.insert(index, len as usize));
        lens
    }

    /// Adapts the positions of the Read chunks to arguments that start at byte `to` of the message instead of `from`.
    #[inline]
    pub(crate) fn move_reads(&mut self, from: usize, to: usize) {
        let moved = |position: u32| (position - from as u32).saturating_add(to as u32);
        self.send.iter_mut().for_each(|(position, _)| *position = moved(*position));
    }

    /// Allocates the missing memory of Write chunks.
    ///
    /// # Errors
    /// The error of `alloc`.
    #[inline]
    pub(crate) fn allocate(&mut self, mut alloc: impl FnMut(usize) -> Result<Buf, CallError>) -> Result<(), CallError> {
        let Self { unallocated_writes, receive, .. } = self;
        for (index, len) in unallocated_writes.drain(..) {
            receive.insert(index, alloc(len as usize)?);
        }
        Ok(())
    }

    /// Whether there is nothing to expose.
    pub(crate) fn is_empty(&self) -> bool {
        self.send.is_empty() && self.results() == 0 && self.call.is_none() && self.reply.is_none()
    }
}

/// A box of chunk memory, or [none](Self::NONE). It is as small as a pointer, because it moves with every call.
#[derive(Debug, Default)]
pub(crate) struct ChunkMemory(Option<Box<CallBuffers>>);

impl ChunkMemory {
    /// Chunk memory of a call without chunks.
    pub(crate) const NONE: Self = Self(None);

    #[inline]
    pub(crate) fn is_none(&self) -> bool {
        self.0.is_none()
    }

    #[inline]
    pub(crate) fn is_some(&self) -> bool {
        self.0.is_some()
    }

    /// Takes the box; leaves none.
    #[inline]
    pub(super) fn take(&mut self) -> Self {
        Self(self.0.take())
    }

    #[inline]
    pub(crate) fn get(&self) -> Option<&CallBuffers> {
        self.0.as_deref()
    }

    #[inline]
    pub(crate) fn get_mut(&mut self) -> Option<&mut CallBuffers> {
        self.0.as_deref_mut()
    }

    /// The box, or an empty one. Inlined, so that the compiler can keep the surrounding call in registers.
    #[inline(always)]
    pub(crate) fn get_or_new(&mut self) -> &mut CallBuffers {
        self.0.get_or_insert_with(take_box)
    }

    /// Drops the box if it is empty.
    pub(crate) fn drop_if_empty(self) -> Self {
        if self.get().is_some_and(CallBuffers::is_empty) { Self::NONE } else { self }
    }

    /// Takes the arguments that are not in the message yet.
    pub(crate) fn take_args(&mut self) -> Vec<u8> {
        self.get_mut().map(|memory| std::mem::take(&mut memory.args)).unwrap_or_default()
    }

    /// Takes the buffers of the Read chunks, in order.
    pub(super) fn take_send(&mut self) -> impl Iterator<Item = Buf> {
        self.get_mut().into_iter().flat_map(|memory| memory.send.drain(..).map(|(_, buf)| buf))
    }

    /// Takes the buffers of the Write chunks, in order.
    pub(super) fn take_receive(&mut self) -> impl Iterator<Item = Buf> {
        self.get_mut().into_iter().flat_map(|memory| memory.receive.drain(..))
    }
}

impl Drop for ChunkMemory {
    // This is inlined, because it does nothing for calls without chunks. The work for chunks is out of line.
    #[inline]
    fn drop(&mut self) {
        if let Some(memory) = self.0.take() {
            recycle(memory);
        }
    }
}

#[inline(never)]
fn take_box() -> Box<CallBuffers> {
    FREE_BOXES.with_borrow_mut(Vec::pop).unwrap_or_default()
}

/// Empties the box, and keeps it for the next call.
#[inline(never)]
fn recycle(mut memory: Box<CallBuffers>) {
    memory.args = Vec::new();
    // Usually there is one buffer, for which these loops take fewer instructions than `clear`.
    while memory.send.pop().is_some() {}
    while memory.receive.pop().is_some() {}
    memory.unallocated_writes.clear();
    memory.too_many = false;
    (memory.call, memory.reply, memory.max_inline_results) = (None, None, None);
    // A thread that ends keeps no box.
    let _ = FREE_BOXES.try_with(|boxes| {
        let mut boxes = boxes.borrow_mut();
        if boxes.len() < MAX_FREE_BOXES {
            boxes.push(memory);
        }
    });
}

/// Exposed memory of one chunk.
#[derive(Debug)]
pub(super) struct ExposedChunk {
    window: WindowId,
    mem: Lent,
    /// The chunk as one segment, with the position of a Read chunk in the RPC message.
    pub(super) at: ReadSegment,
    pub(super) kind: ChunkKind,
    revoked: bool,
}

/// Exposed memory of one call.
#[derive(Debug, Default)]
pub(super) struct CallExposure {
    /// The call's chunks in the order of a header: a Position Zero Read chunk, other Read chunks, Write chunks, the
    /// Reply chunk. Empty while the slot is free.
    pub(super) chunks: ArrayVec<ExposedChunk, { 2 * MAX_CHUNKS + 2 }>,
    /// Bytes of the longest segment of the offered chunks.
    pub(super) segment_size: u32,
    /// Box to which the buffers return.
    pub(super) memory: ChunkMemory,
    /// Outcome of the call, waiting for the last revocation.
    outcome: Option<PendingOutcome>,
}

impl CallExposure {
    pub(super) fn reply(&self) -> Option<&ExposedChunk> {
        self.chunks.last().filter(|chunk| chunk.kind == ChunkKind::Reply)
    }

    /// Whether the RPC message is in a Position Zero Read chunk.
    pub(super) fn is_long(&self) -> bool {
        self.chunks.first().is_some_and(|chunk| chunk.kind == ChunkKind::Read(0))
    }

    /// Whether a Position Zero Read chunk is the call's only Read chunk.
    pub(super) fn is_long_only(&self) -> bool {
        self.is_long() && !matches!(self.chunks.get(1), Some(ExposedChunk { kind: ChunkKind::Read(_), .. }))
    }

    /// The chunk lists for a header, if they have only one chunk of one segment, as most do.
    #[inline]
    pub(super) fn single_chunk<'a>(&'a self, terms: &ConnectionTerms) -> Option<Chunks<'a>> {
        let [chunk] = &self.chunks[..] else { return None };
        if segments_of(chunk.at.target.length as usize, terms) != 1 || terms.segment_count == 0 {
            return None;
        }
        let segments = std::slice::from_ref(&chunk.at.target);
        let inv_handle = if terms.offers_invalidation { chunk.at.target.handle } else { 0 };
        Some(match chunk.kind {
            ChunkKind::Read(_) => Chunks { inv_handle, reads: std::slice::from_ref(&chunk.at), ..Chunks::NONE },
            ChunkKind::Write(_) => Chunks { inv_handle, writes: WriteList { counts: &[1], segments }, ..Chunks::NONE },
            ChunkKind::Reply => Chunks { inv_handle, reply: Some(segments), ..Chunks::NONE },
        })
    }

    /// Adds a chunk, in the order of `chunks`. Its window is about to be bound.
    #[inline]
    pub(super) fn add(&mut self, window: WindowId, mem: Lent, segment: Segment, kind: ChunkKind) {
        let position = if let ChunkKind::Read(position) = kind { position } else { 0 };
        let at = ReadSegment { position, target: segment };
        self.chunks.push(ExposedChunk { window, mem, at, kind, revoked: false });
    }
}

/// Outcome of a call, to be reported once no memory is exposed.
#[derive(Debug)]
pub(super) enum PendingOutcome {
    /// The call has ended.
    Ended {
        target: CompletionTarget,
        token: u64,
        result: CallResult,
        /// Length of the RPC reply in the Reply chunk, if it is there.
        reply_chunk_len: Option<u32>,
    },
    /// The peer has refused the call, which will be retransmitted.
    Refused(CallId, ErrorBody),
}

/// Exposures of one connection.
#[derive(Debug, Default)]
pub(super) struct Exposures {
    slots: Vec<CallExposure>,
    free: Vec<u32>,
    windows: Vec<WindowId>,
}

impl Exposures {
    /// Takes a free slot; returns its index, the slot, and the free windows.
    #[inline]
    pub(super) fn begin(&mut self) -> (u32, &mut CallExposure, &mut Vec<WindowId>) {
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(CallExposure::default());
            self.slots.len() as u32 - 1
        });
        (index, &mut self.slots[index as usize], &mut self.windows)
    }

    pub(super) fn get_mut(&mut self, index: u32) -> Option<&mut CallExposure> {
        self.slots.get_mut(index as usize)
    }

    /// Begins to revoke a call's exposure. The peer may have invalidated one handle. Returns the windows to revoke,
    /// their number, and the number of all windows.
    #[inline(always)]
    pub(super) fn begin_revocation(
        &mut self,
        index: u32,
        invalidated: Option<u32>,
    ) -> (impl Iterator<Item = WindowId> + use<'_>, usize, usize) {
        let exposure = &mut self.slots[index as usize];
        let mut remaining = 0;
        for chunk in &mut exposure.chunks {
            chunk.revoked = Some(chunk.at.target.handle) == invalidated;
            remaining += usize::from(!chunk.revoked);
        }
        let bound = exposure.chunks.iter().filter(|chunk| !chunk.revoked).map(|chunk| chunk.window);
        (bound, remaining, exposure.chunks.len())
    }

    /// Stores the call's outcome until the last revocation.
    pub(super) fn set_outcome(&mut self, index: u32, outcome: Option<PendingOutcome>) {
        self.slots[index as usize].outcome = outcome;
    }

    /// Takes the stored outcome, if any.
    pub(super) fn take_outcome(&mut self, index: u32) -> Option<PendingOutcome> {
        self.slots.get_mut(index as usize)?.outcome.take()
    }

    /// Frees the slot after revocation, or after the loss of the device. Moves the buffers back into their box.
    ///
    /// Returns the box, if `keeps_buffers`, and whether it is complete; if not, the device still holds a buffer. Write
    /// chunks of an `answered` call get the length of their data.
    #[inline(always)]
    pub(super) fn recover(&mut self, index: u32, keeps_buffers: bool, answered: bool) -> (ChunkMemory, bool) {
        let Some(exposure) = self.slots.get_mut(index as usize) else { return (ChunkMemory::NONE, true) };
        let (mut memory, mut whole) = (exposure.memory.take(), true);
        if !keeps_buffers {
            memory = ChunkMemory::NONE;
        }
        // Usually there is one chunk, so moving the others is cheap.
        while let Some(chunk) = exposure.chunks.pop_at(0) {
            push(&mut self.windows, || chunk.window);
            let Some(memory) = memory.get_mut() else { continue };
            let Ok(mut buf) = chunk.mem.reclaim() else {
                whole = false;
                continue;
            };
            match chunk.kind {
                ChunkKind::Read(0) => memory.call = Some(buf),
                ChunkKind::Read(position) => memory.send.push((position, buf)),
                ChunkKind::Write(written) => {
                    if answered {
                        buf.set_window(buf.start(), written as usize);
                    }
                    memory.receive.push(buf);
                }
                ChunkKind::Reply => memory.reply = Some(buf),
            }
        }
        push(&mut self.free, || index);
        (memory, whole)
    }

    /// Indices of the exposures with an outcome, which wait for the last revocation.
    pub(super) fn awaiting_revocation(&self) -> Vec<u32> {
        let all = self.slots.iter().zip(0..);
        all.filter(|(exposure, _)| exposure.outcome.is_some()).map(|(_, index)| index).collect()
    }

    /// Whether nothing is exposed.
    pub(super) fn is_empty(&self) -> bool {
        self.slots.len() == self.free.len()
    }
}

/// Number of segments for `len` bytes, at the peer's segment size.
#[inline]
pub(super) fn segments_of(len: usize, terms: &ConnectionTerms) -> usize {
    let size = terms.segment_size as usize;
    if len <= size { usize::from(len > 0) } else { len.div_ceil(size) }
}

/// Chunk lists of the current call, in segments of the peer's size. All calls reuse this memory.
#[derive(Debug, Default)]
pub(super) struct ChunkLists {
    reads: ArrayVec<ReadSegment, MAX_READ_SEGMENTS>,
    counts: ArrayVec<u32, MAX_CHUNKS>,
    writes: ArrayVec<Segment, MAX_WRITE_SEGMENTS>,
    reply: ArrayVec<Segment, MAX_SEGMENTS>,
}

impl ChunkLists {
    /// Lists of exposed memory for a header. `None` with too many segments: the peer has changed its terms since the
    /// form of the call was chosen.
    #[inline(never)]
    pub(super) fn fill(&mut self, exposure: &CallExposure, terms: &ConnectionTerms) -> Option<Chunks<'_>> {
        self.reads.clear();
        self.counts.clear();
        self.writes.clear();
        self.reply.clear();
        let mut segments_left = terms.segment_count as usize;
        let (mut last_handle, mut has_reply) = (0, false);
        for chunk in &exposure.chunks {
            let (mut rest, size) = (chunk.at.target, terms.segment_size);
            let count = segments_of(rest.length as usize, terms);
            match segments_left.checked_sub(count) {
                Some(fewer) if count <= MAX_SEGMENTS => segments_left = fewer,
                _ => return None,
            }
            last_handle = rest.handle;
            match chunk.kind {
                ChunkKind::Read(_) => {}
                ChunkKind::Write(_) => self.counts.push(count as u32),
                ChunkKind::Reply => has_reply = true,
            }
            for _ in 0..count {
                let segment = Segment { length: rest.length.min(size), ..rest };
                match chunk.kind {
                    ChunkKind::Read(position) => self.reads.push(ReadSegment { position, target: segment }),
                    ChunkKind::Write(_) => self.writes.push(segment),
                    ChunkKind::Reply => self.reply.push(segment),
                }
                rest.length -= segment.length;
                rest.offset += u64::from(segment.length);
            }
        }
        Some(Chunks {
            inv_handle: if terms.offers_invalidation { last_handle } else { 0 },
            reads: &self.reads,
            writes: WriteList { counts: &self.counts, segments: &self.writes },
            reply: has_reply.then_some(&self.reply[..]),
        })
    }
}

#[cfg(test)]
mod tests {
    use rpcrdma_mempool::{ArenaConfig, Class, PagePolicy, Pool, PoolConfig};

    use super::*;
    use crate::fabric::QpId;
    use crate::proto::{ConnConfig, Connection};

    fn pool() -> Pool {
        let arena = ArenaConfig { pages: PagePolicy::Small, prefault: false, ..ArenaConfig::default() };
        Pool::new(&PoolConfig { classes: vec![Class { size: 64, count: 16 }], arena }).expect("memory")
    }

    fn window(index: u32) -> WindowId {
        WindowId { qp: QpId { slot: 0, generation: 0 }, index }
    }

    /// Exposes two Read chunks, one of position zero, a Write chunk and a Reply chunk. Each has as many bytes as the
    /// number of its handle.
    fn expose(exposures: &mut Exposures, pool: &Pool) -> (u32, Vec<Lent>) {
        let (index, exposure, windows) = exposures.begin();
        let mut held = Vec::new();
        for (n, kind) in
            [(1, ChunkKind::Read(0)), (2, ChunkKind::Read(44)), (3, ChunkKind::Write(0)), (4, ChunkKind::Reply)]
        {
            let mem = pool.alloc(n).expect("a buffer").lend().expect("lent by the owning thread");
            let segment = Segment { handle: n as u32, length: n as u32, offset: 0 };
            let window = windows.pop().unwrap_or(window(n as u32));
            exposure.add(window, mem.clone(), segment, kind);
            held.push(mem);
        }
        exposure.memory.get_or_new();
        (index, held)
    }

    /// An outcome without results.
    fn pending_outcome(refused: bool) -> PendingOutcome {
        let call = Connection::new(ConnConfig::default()).start_call(1, u64::MAX, 0, false).expect("a free slot").id;
        let result = Err(CallError::Closed.into());
        match refused {
            true => PendingOutcome::Refused(call, ErrorBody::System),
            false => {
                PendingOutcome::Ended { target: CompletionTarget::Polled, token: 7, result, reply_chunk_len: None }
            }
        }
    }

    #[test]
    fn recovered_buffers_return_to_their_chunks() {
        let (pool, mut exposures) = (pool(), Exposures::default());
        let (index, held) = expose(&mut exposures, &pool);
        let exposure = exposures.get_mut(index).expect("a used slot");
        assert!(exposure.is_long() && exposure.reply().is_some());
        assert!(!exposure.is_long_only() && exposure.chunks.len() == 4);
        assert!(!exposures.is_empty() && exposures.awaiting_revocation().is_empty());
        let (bound, remaining, all) = exposures.begin_revocation(index, Some(2));
        assert_eq!((bound.map(|window| window.index).collect::<Vec<_>>(), remaining, all), (vec![1, 3, 4], 3, 4));
        exposures.set_outcome(index, Some(pending_outcome(true)));
        assert_eq!(exposures.awaiting_revocation(), [index]);
        drop(held);
        let outcome = exposures.take_outcome(index);
        let (memory, whole) = exposures.recover(index, outcome.is_some(), false);
        assert!(whole && matches!(outcome, Some(PendingOutcome::Refused(..))));
        let memory = memory.get().expect("the outcome is stored");
        assert_eq!(memory.call.as_ref().map(|buf| buf.len()), Some(1));
        assert_eq!(memory.send.iter().map(|(at, buf)| (*at, buf.len())).collect::<Vec<_>>(), [(44, 2)]);
        // A retransmitted call offers the whole Write chunk again.
        assert_eq!(memory.receive.iter().map(|buf| buf.len()).collect::<Vec<_>>(), [3]);
        assert_eq!(memory.reply.as_ref().map(|buf| buf.len()), Some(4));
        assert!(exposures.is_empty() && exposures.awaiting_revocation().is_empty());
        // The slot and the windows are reused.
        let (reused, _held) = expose(&mut exposures, &pool);
        assert_eq!((reused, exposures.windows.pop()), (index, None));
    }

    #[test]
    fn memory_is_not_recovered_while_the_device_holds_it_or_if_unwanted() {
        let (pool, mut exposures) = (pool(), Exposures::default());
        let (index, held) = expose(&mut exposures, &pool);
        drop(exposures.begin_revocation(index, None));
        let (_, whole) = exposures.recover(index, true, false);
        assert!(!whole);
        drop(held);
        let (index, _held) = expose(&mut exposures, &pool);
        drop(exposures.begin_revocation(index, None));
        assert!(exposures.recover(index, false, false).0.is_none(), "the call was abandoned");
    }

    #[test]
    fn outstanding_buffers_return_when_the_device_is_lost() {
        let (pool, mut exposures) = (pool(), Exposures::default());
        let (index, held) = expose(&mut exposures, &pool);
        drop(held);
        let (memory, whole) = exposures.recover(index, true, false);
        assert_eq!((memory.get().map(|memory| memory.receive.len()), whole), (Some(1), true));
        let (index, held) = expose(&mut exposures, &pool);
        assert!(!exposures.recover(index, true, false).1, "the device holds a buffer");
        drop(held);
        let (index, _held) = expose(&mut exposures, &pool);
        drop(_held);
        drop(exposures.begin_revocation(index, None));
        exposures.set_outcome(index, Some(pending_outcome(false)));
        assert_eq!(exposures.awaiting_revocation(), [index]);
        let outcome = exposures.take_outcome(index);
        let (memory, _) = exposures.recover(index, outcome.is_some(), false);
        let lens = memory.get().map(|memory| memory.receive.iter().map(|buf| buf.len()).collect::<Vec<_>>());
        assert_eq!(lens, Some(vec![3]), "the buffer of a failed call keeps its length");
        assert!(exposures.is_empty());
    }
}
