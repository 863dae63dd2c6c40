//! The memory that goes with a call as chunks: boxed, because most calls have none, and kept for reuse by
//! each thread, so that none is allocated per call.

use std::cell::RefCell;
use std::ops::{Deref, DerefMut};

use arrayvec::ArrayVec;
use rpcrdma_mempool::Buf;

use crate::service::MAX_CHUNKS;

/// Boxes that a thread keeps.
const KEPT: usize = 1024;

thread_local! {
    #[expect(clippy::vec_box, reason = "the boxes themselves are what is kept")]
    static SPARE: RefCell<Vec<Box<Memory>>> = const { RefCell::new(Vec::new()) };
}

/// Buffers of one call.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    /// Read chunks: position in the RPC message, and data.
    pub(crate) send: ArrayVec<(u32, Buf), MAX_CHUNKS>,
    /// Write chunks.
    pub(crate) receive: ArrayVec<Buf, MAX_CHUNKS>,
    /// The RPC message of a long call: its Position Zero Read chunk.
    pub(crate) call: Option<Buf>,
    /// The Reply chunk.
    pub(crate) reply: Option<Buf>,
    /// Most bytes of inline results that the binding leaves beside the Write chunks, if it is known.
    pub(crate) most_results: Option<usize>,
}

impl Memory {
    /// There is nothing to expose.
    pub(crate) fn is_empty(&self) -> bool {
        self.send.is_empty() && self.receive.is_empty() && self.call.is_none() && self.reply.is_none()
    }
}

/// A box of them.
#[derive(Debug)]
pub(crate) struct ChunkMemory(Option<Box<Memory>>);

impl ChunkMemory {
    /// An empty one.
    pub(crate) fn new() -> Self {
        let spare = SPARE.with_borrow_mut(Vec::pop);
        Self(Some(spare.unwrap_or_default()))
    }

    /// The buffers of the Read chunks, in order.
    pub(super) fn take_send(&mut self) -> impl Iterator<Item = Buf> {
        self.send.drain(..).map(|(_, buf)| buf)
    }

    /// The buffers of the Write chunks, in order.
    pub(super) fn take_receive(&mut self) -> impl Iterator<Item = Buf> {
        self.receive.drain(..)
    }
}

impl Deref for ChunkMemory {
    type Target = Memory;

    fn deref(&self) -> &Memory {
        // Only `drop` takes it.
        self.0.as_ref().expect("present until dropped")
    }
}

impl DerefMut for ChunkMemory {
    fn deref_mut(&mut self) -> &mut Memory {
        self.0.as_mut().expect("present until dropped")
    }
}

impl Drop for ChunkMemory {
    // Inlined, to nothing where there are no chunks; out of line where there are.
    #[inline]
    fn drop(&mut self) {
        if let Some(memory) = self.0.take() {
            keep(memory);
        }
    }
}

/// Empties the box, and keeps it for the next call.
#[inline(never)]
fn keep(mut memory: Box<Memory>) {
    memory.send.clear();
    memory.receive.clear();
    (memory.call, memory.reply, memory.most_results) = (None, None, None);
    // A thread that is ending keeps nothing.
    let _ = SPARE.try_with(|spare| {
        let mut spare = spare.borrow_mut();
        if spare.len() < KEPT {
            spare.push(memory);
        }
    });
}
