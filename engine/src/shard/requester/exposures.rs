//! Memory exposed by a connection to its peer.
//!
//! It stays exposed from the posting of a call until the peer provably cannot reach it.
//!
//! Each call that exposes memory has an *exposure*, and each piece of memory a window. Slots and windows are reused.

use arrayvec::ArrayVec;
use rpcrdma_mempool::Lent;

use super::chunks::{ChunkMemory, Memory};
use super::outcome::{CallResult, Sink};
use crate::fabric::WindowId;
use crate::proto::{CallError, CallId};
use crate::service::MAX_CHUNKS;
use crate::shard::list::push;
use crate::wire::{ErrorBody, ReadSegment, Segment};

/// Chunk of a piece of exposed memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// A Read chunk, and its position in the RPC message.
    Read(u32),
    /// A Write chunk, and the bytes in it by the peer's reply.
    Write(u32),
    Reply,
}

/// One piece of exposed memory: a chunk of one segment.
#[derive(Debug)]
pub(super) struct Exposed {
    pub(super) window: WindowId,
    /// Present until revoked.
    pub(super) mem: Option<Lent>,
    /// Its segment, and the position of a Read chunk in the RPC message.
    pub(super) at: ReadSegment,
    pub(super) place: Place,
    pub(super) revoked: bool,
}

impl Exposed {
    /// Records the bytes that the peer has written.
    #[inline]
    pub(super) fn note_written(&mut self, written: u32) {
        self.place = Place::Write(written);
    }
}

/// Exposed memory of one call.
#[derive(Debug, Default)]
pub(super) struct Exposure {
    /// Read chunks first, that of position zero before all, then Write chunks, then the Reply chunk. Empty while the
    /// slot is free.
    parts: ArrayVec<Exposed, { 2 * MAX_CHUNKS + 2 }>,
    /// Segment size of the offered chunks.
    segment_size: u32,
    /// Box to which the buffers return.
    memory: ChunkMemory,
    /// Outcome of the call, waiting for the last revocation.
    ending: Option<Ending>,
}

impl Exposure {
    #[inline]
    pub(super) fn all(&self) -> &[Exposed] {
        &self.parts
    }

    #[inline]
    pub(super) fn all_mut(&mut self) -> &mut [Exposed] {
        &mut self.parts
    }

    /// Longest segment, in bytes.
    #[inline]
    pub(super) fn segment_size(&self) -> u32 {
        self.segment_size
    }

    /// Keeps the memory of the call until it is revoked.
    #[inline]
    pub(super) fn keep(&mut self, memory: ChunkMemory) {
        self.memory = memory;
    }

    pub(super) fn reply(&self) -> Option<&Exposed> {
        self.parts.last().filter(|part| part.place == Place::Reply)
    }

    /// Whether the RPC message is in a Position Zero Read chunk.
    pub(super) fn is_long(&self) -> bool {
        self.parts.first().is_some_and(|part| part.place == Place::Read(0))
    }

    /// Whether it has no other Read chunk.
    pub(super) fn is_long_only(&self) -> bool {
        self.is_long() && !matches!(self.parts.get(1), Some(Exposed { place: Place::Read(_), .. }))
    }

    /// Adds a piece, in the order of `parts`. Its window is about to be bound.
    #[inline]
    pub(super) fn add(&mut self, window: WindowId, mem: Lent, segment: Segment, place: Place) {
        let position = if let Place::Read(position) = place { position } else { 0 };
        let at = ReadSegment { position, target: segment };
        self.parts.push(Exposed { window, mem: Some(mem), at, place, revoked: false });
    }

    /// Moves the buffers back into their box, and frees the windows. False if the device still holds a buffer. Write
    /// chunks of an `answered` call get the length of the written data.
    #[inline(always)]
    fn take_back(&mut self, mut memory: Option<&mut Memory>, answered: bool, windows: &mut Vec<WindowId>) -> bool {
        let mut whole = true;
        // Usually there is one piece: moving the others is cheap.
        while let Some(part) = self.parts.pop_at(0) {
            push(windows, || part.window);
            let (Some(memory), Some(mem)) = (&mut memory, part.mem) else { continue };
            let Ok(mut buf) = mem.reclaim() else {
                whole = false;
                continue;
            };
            match part.place {
                Place::Read(0) => memory.call = Some(buf),
                Place::Read(position) => memory.send.push((position, buf)),
                Place::Write(written) => {
                    if answered {
                        buf.set_window(buf.start(), written as usize);
                    }
                    memory.receive.push(buf);
                }
                Place::Reply => memory.reply = Some(buf),
            }
        }
        whole
    }
}

/// An outcome to report once no memory is exposed.
#[derive(Debug)]
pub(super) struct Ending {
    pub(super) sink: Sink,
    pub(super) token: u64,
    pub(super) result: CallResult,
    /// Length of the RPC reply in the Reply chunk, if it is there.
    pub(super) long: Option<u32>,
    /// Reason to send the call again instead of reporting it.
    pub(super) again: Option<(CallId, ErrorBody)>,
}

impl Ending {
    /// An outcome without results.
    pub(super) fn error(sink: Sink, token: u64, error: CallError) -> Self {
        Self { sink, token, result: Err(error.into()), long: None, again: None }
    }

    /// An outcome that sends the call again, with its sink.
    pub(super) fn again(token: u64, call: CallId, error: ErrorBody) -> Self {
        Self { again: Some((call, error)), ..Self::error(Sink::Polled, token, CallError::Transport(error)) }
    }
}

/// Exposures of one connection.
#[derive(Debug, Default)]
pub(super) struct Exposures {
    slots: Vec<Exposure>,
    free: Vec<u32>,
    windows: Vec<WindowId>,
}

impl Exposures {
    /// Takes a free slot, with its index for work requests, and the free windows.
    #[inline]
    pub(super) fn begin(&mut self) -> (u32, &mut Exposure, &mut Vec<WindowId>) {
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Exposure::default());
            self.slots.len() as u32 - 1
        });
        (index, &mut self.slots[index as usize], &mut self.windows)
    }

    pub(super) fn offer(&mut self, index: u32, segment_size: u32) -> &Exposure {
        let exposure = &mut self.slots[index as usize];
        exposure.segment_size = segment_size;
        exposure
    }

    pub(super) fn get(&self, index: u32) -> Option<&Exposure> {
        self.slots.get(index as usize)
    }

    pub(super) fn get_mut(&mut self, index: u32) -> Option<&mut Exposure> {
        self.slots.get_mut(index as usize)
    }

    /// Ends a call; the peer may have invalidated one handle. Returns the windows to revoke, their number, and the
    /// number of all.
    #[inline(always)]
    pub(super) fn end(
        &mut self,
        index: u32,
        invalidated: Option<u32>,
    ) -> (impl Iterator<Item = WindowId> + use<'_>, usize, usize) {
        let exposure = &mut self.slots[index as usize];
        let mut left = 0;
        for part in &mut exposure.parts {
            part.revoked = Some(part.at.target.handle) == invalidated;
            left += usize::from(!part.revoked);
        }
        let bound = exposure.parts.iter().filter(|part| !part.revoked).map(|part| part.window);
        (bound, left, exposure.parts.len())
    }

    /// Stores the call's outcome until the last revocation.
    pub(super) fn wait(&mut self, index: u32, ending: Option<Ending>) {
        self.slots[index as usize].ending = ending;
    }

    /// Takes the waiting outcome, if any.
    pub(super) fn ending(&mut self, index: u32) -> Option<Ending> {
        self.slots.get_mut(index as usize)?.ending.take()
    }

    /// Frees the slot after revocation. Returns its memory, if `wanted`, and whether it is complete: otherwise the
    /// device still holds some in spite of the revocation. Write chunks of an `answered` call get the length of their
    /// data.
    #[inline(always)]
    pub(super) fn recover(&mut self, index: u32, wanted: bool, answered: bool) -> (ChunkMemory, bool) {
        let Some(exposure) = self.slots.get_mut(index as usize) else { return (ChunkMemory::NONE, true) };
        let mut memory = exposure.memory.take();
        if !wanted {
            memory = ChunkMemory::NONE;
        }
        let whole = exposure.take_back(memory.get_mut(), answered, &mut self.windows);
        push(&mut self.free, || index);
        (memory, whole)
    }

    /// Takes the memory of an unfinished call after the loss of the device. None if part of it is lost.
    pub(super) fn bring_home(&mut self, index: u32) -> ChunkMemory {
        let Some(exposure) = self.slots.get_mut(index as usize) else { return ChunkMemory::NONE };
        let mut memory = exposure.memory.take();
        match exposure.take_back(memory.get_mut(), false, &mut self.windows) {
            true => memory,
            false => ChunkMemory::NONE,
        }
    }

    /// Exposures of ended calls, waiting for the last revocation.
    pub(super) fn ended(&self) -> Vec<u32> {
        let all = self.slots.iter().zip(0..);
        all.filter(|(exposure, _)| exposure.ending.is_some()).map(|(_, index)| index).collect()
    }

    /// Resets after the loss of the device and all windows.
    pub(super) fn forget_device(&mut self) {
        *self = Self::default();
    }

    /// Whether nothing is exposed.
    pub(super) fn is_empty(&self) -> bool {
        self.slots.len() == self.free.len()
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
        for (n, place) in [(1, Place::Read(0)), (2, Place::Read(44)), (3, Place::Write(0)), (4, Place::Reply)] {
            let mem = pool.alloc(n).expect("a buffer").lend().expect("its own thread");
            let segment = Segment { handle: n as u32, length: n as u32, offset: 0 };
            let window = windows.pop().unwrap_or(window(n as u32));
            exposure.add(window, mem.clone(), segment, place);
            held.push(mem);
        }
        exposure.keep(ChunkMemory::new());
        (index, held)
    }

    /// An outcome without results.
    fn failed(again: bool) -> Ending {
        let (call, _) = Connection::new(ConnConfig::default()).start_call(1, u64::MAX, 0, false).expect("a free slot");
        let again = again.then_some((call, ErrorBody::System));
        Ending { again, ..Ending::error(Sink::Polled, 7, CallError::Closed) }
    }

    #[test]
    fn each_piece_comes_home_to_its_place() {
        let (pool, mut exposures) = (pool(), Exposures::default());
        let (index, held) = expose(&mut exposures, &pool);
        let exposure = exposures.get(index).expect("it is there");
        assert!(exposure.is_long() && exposure.reply().is_some());
        assert!(!exposure.is_long_only() && exposure.all().len() == 4);
        assert!(!exposures.is_empty() && exposures.ended().is_empty());
        let (bound, left, all) = exposures.end(index, Some(2));
        assert_eq!((bound.map(|window| window.index).collect::<Vec<_>>(), left, all), (vec![1, 3, 4], 3, 4));
        exposures.wait(index, Some(failed(true)));
        assert_eq!(exposures.ended(), [index]);
        drop(held);
        let ending = exposures.ending(index);
        let (memory, whole) = exposures.recover(index, ending.is_some(), false);
        assert!(whole && ending.is_some_and(|ending| ending.token == 7));
        let memory = memory.get().expect("the call is sent again");
        assert_eq!(memory.call.as_ref().map(|buf| buf.len()), Some(1));
        assert_eq!(memory.send.iter().map(|(at, buf)| (*at, buf.len())).collect::<Vec<_>>(), [(44, 2)]);
        // A call that is sent again offers all of it again.
        assert_eq!(memory.receive.iter().map(|buf| buf.len()).collect::<Vec<_>>(), [3]);
        assert_eq!(memory.reply.as_ref().map(|buf| buf.len()), Some(4));
        assert!(exposures.is_empty() && exposures.ended().is_empty());
        // The slot and the windows are reused.
        let (again, _held) = expose(&mut exposures, &pool);
        assert_eq!((again, exposures.windows.pop()), (index, None));
    }

    #[test]
    fn nobody_gets_memory_that_the_device_holds_or_that_nobody_waits_for() {
        let (pool, mut exposures) = (pool(), Exposures::default());
        let (index, held) = expose(&mut exposures, &pool);
        drop(exposures.end(index, None));
        let (_, whole) = exposures.recover(index, true, false);
        assert!(!whole);
        drop(held);
        let (index, _held) = expose(&mut exposures, &pool);
        drop(exposures.end(index, None));
        assert!(exposures.recover(index, false, false).0.is_none(), "it was given up");
    }

    #[test]
    fn outstanding_buffers_return_when_the_device_is_lost() {
        let (pool, mut exposures) = (pool(), Exposures::default());
        let (index, held) = expose(&mut exposures, &pool);
        drop(held);
        assert_eq!(exposures.bring_home(index).get().map(|memory| memory.receive.len()), Some(1));
        let (index, held) = expose(&mut exposures, &pool);
        assert!(exposures.bring_home(index).is_none(), "the device holds it");
        drop(held);
        let (index, _held) = expose(&mut exposures, &pool);
        drop(_held);
        drop(exposures.end(index, None));
        exposures.wait(index, Some(failed(false)));
        assert_eq!(exposures.ended(), [index]);
        let ending = exposures.ending(index);
        let (memory, _) = exposures.recover(index, ending.is_some(), false);
        let given = memory.get().map(|memory| memory.receive.iter().map(|buf| buf.len()).collect::<Vec<_>>());
        assert_eq!(given, Some(vec![3]), "of a call that has failed, as long as it was");
        exposures.forget_device();
        assert!(exposures.is_empty() && exposures.windows.is_empty());
    }
}
