//! Chunk memory of a call.
//!
//! It is boxed, because most calls have none. Each thread keeps boxes for reuse: no allocation per call.

use std::cell::RefCell;

use arrayvec::ArrayVec;
use rpcrdma_mempool::Buf;

use super::exposures::Place;
use crate::proto::CallError;
use crate::service::MAX_CHUNKS;

/// Most boxes that a thread keeps.
const KEPT: usize = 1024;

thread_local! {
    #[expect(clippy::vec_box, reason = "the boxes themselves are what is kept")]
    static SPARE: RefCell<Vec<Box<CallBuffers>>> = const { RefCell::new(Vec::new()) };
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
    pub(crate) wanted: ArrayVec<(usize, u32), MAX_CHUNKS>,
    /// The call has too many chunks.
    pub(crate) too_many: bool,
    /// Most bytes of inline results beside the Write chunks, if the binding is known.
    pub(crate) most_results: Option<usize>,
}

impl CallBuffers {
    /// Takes the next buffer, in header order.
    #[inline]
    pub(super) fn take_next(&mut self) -> Option<(Place, Buf)> {
        if let Some(buf) = self.call.take() {
            return Some((Place::Read(0), buf));
        }
        if let Some((position, buf)) = self.send.pop_at(0) {
            return Some((Place::Read(position), buf));
        }
        if let Some(buf) = self.receive.pop_at(0) {
            return Some((Place::Write(0), buf));
        }
        self.reply.take().map(|buf| (Place::Reply, buf))
    }

    /// Number of Write chunks, with memory or without.
    #[inline]
    pub(crate) fn results(&self) -> usize {
        self.receive.len() + self.wanted.len()
    }

    /// Whether a call with these chunks cannot start yet.
    #[inline]
    pub(crate) fn is_unfinished(&self) -> bool {
        self.too_many || !self.wanted.is_empty()
    }

    /// Bytes of each Write chunk.
    pub(crate) fn result_lens(&self) -> ArrayVec<usize, MAX_CHUNKS> {
        let mut lens: ArrayVec<_, MAX_CHUNKS> = self.receive.iter().map(|buf| buf.len()).collect();
        self.wanted.iter().for_each(|&(index, len)| lens.insert(index, len as usize));
        lens
    }

    /// Moves the Read chunks for arguments that start at byte `to` of the message instead of `from`.
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
        let Self { wanted, receive, .. } = self;
        for (index, len) in wanted.drain(..) {
            receive.insert(index, alloc(len as usize)?);
        }
        Ok(())
    }

    /// Whether there is nothing to expose.
    pub(crate) fn is_empty(&self) -> bool {
        self.send.is_empty() && self.results() == 0 && self.call.is_none() && self.reply.is_none()
    }
}

/// A box of chunk memory, or [none](Self::NONE): one word, moved with every call.
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

    /// The box, or an empty one. Inlined, so that the compiler keeps the call around it in registers.
    #[inline(always)]
    pub(crate) fn get_or_new(&mut self) -> &mut CallBuffers {
        self.0.get_or_insert_with(spare)
    }

    /// Frees an empty box.
    pub(crate) fn unless_empty(self) -> Self {
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
    // Inlined for calls without chunks, for which it does nothing; out of line with chunks.
    #[inline]
    fn drop(&mut self) {
        if let Some(memory) = self.0.take() {
            keep(memory);
        }
    }
}

#[inline(never)]
fn spare() -> Box<CallBuffers> {
    SPARE.with_borrow_mut(Vec::pop).unwrap_or_default()
}

/// Empties the box, and keeps it for the next call.
#[inline(never)]
fn keep(mut memory: Box<CallBuffers>) {
    memory.args = Vec::new();
    // Most often one: fewer instructions than `clear`.
    while memory.send.pop().is_some() {}
    while memory.receive.pop().is_some() {}
    memory.wanted.clear();
    memory.too_many = false;
    (memory.call, memory.reply, memory.most_results) = (None, None, None);
    // An ending thread keeps no box.
    let _ = SPARE.try_with(|spare| {
        let mut spare = spare.borrow_mut();
        if spare.len() < KEPT {
            spare.push(memory);
        }
    });
}
