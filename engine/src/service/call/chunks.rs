//! The chunk lists of a call that is served, what came in them, and what goes into them.

use arrayvec::ArrayVec;
use rpcrdma_mempool::{ArenaId, Buf, Frozen};

use super::super::writer::ResultWriter;
use super::NoResult;
use crate::binding::Binding;
use crate::fabric::Source;
use crate::proto::{MAX_CHUNKS, MAX_READ_SEGMENTS, MAX_SEGMENTS, MAX_WRITE_SEGMENTS};
use crate::wire::xdr::padded;
use crate::wire::{ChunkCounts, ReadSegment, Segment, WriteList};

/// An argument that comes by RDMA Read.
#[derive(Debug)]
struct ReadArgument {
    /// Byte of the unreduced arguments at which it belongs.
    at: u32,
    /// `None` while it has not come, and once the handler has taken it.
    buf: Option<Buf>,
}

/// Where the bytes of a result are.
#[derive(Debug)]
enum ResultBytes {
    /// The handler has given none.
    Empty,
    /// Memory of the pool, filled by the handler.
    Pool(Buf),
    /// Memory of the handler's own.
    Shared(Frozen),
}

/// A Read chunk that is no counted argument.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Miscounted {
    /// Its bytes.
    pub(crate) chunk: usize,
    /// The word in front of it, where the count of them should be.
    pub(crate) word: Option<u32>,
}

/// A result that goes by RDMA Write, into one Write chunk of the caller.
#[derive(Debug)]
pub(super) struct ResultChunk {
    /// Bytes that the caller has room for.
    capacity: u32,
    /// Most bytes that the procedure declares for a result.
    declared: u32,
    /// Bytes that it gets.
    len: usize,
    /// Bytes of pool memory, from its start on, that are this call's, beside the first `len`.
    filled: usize,
    bytes: ResultBytes,
    /// The address of its pool memory was told, to something that may write there for as long as the call lasts.
    told: bool,
    /// Such memory, in whose place other memory is sent.
    kept: Option<Buf>,
    /// How many segments of the Write list are this chunk's, in order.
    segments: u32,
}

impl ResultChunk {
    /// A chunk of so many bytes, in so many segments, that nothing is in yet.
    fn of(capacity: u32, segments: u32) -> Self {
        Self {
            capacity,
            declared: u32::MAX,
            len: 0,
            filled: 0,
            bytes: ResultBytes::Empty,
            told: false,
            kept: None,
            segments,
        }
    }

    /// Bytes that the caller has room for.
    pub(super) fn capacity(&self) -> u32 {
        self.capacity
    }

    /// Clears what memory of the pool holds of other calls within the first `len` bytes, or all of them if
    /// there are fewer; returns how many these are.
    fn fill(&mut self, len: usize) -> usize {
        let ResultBytes::Pool(buf) = &mut self.bytes else { return 0 };
        let (filled, len) = (self.filled.max(self.len), len.min(buf.len()));
        if let Some(unwritten) = buf.get_mut(filled..len) {
            unwritten.fill(0);
        }
        self.filled = filled.max(len);
        len
    }

    /// All of its memory of the pool; what this call has not written is cleared first.
    pub(super) fn cleared(&mut self) -> Result<&mut [u8], NoResult> {
        self.fill(usize::MAX);
        match &mut self.bytes {
            ResultBytes::Pool(buf) => Ok(&mut buf[..]),
            ResultBytes::Empty => Err(NoResult::NoMemory),
            ResultBytes::Shared(_) => Err(NoResult::Shared),
        }
    }

    /// Writes its memory of the pool from the start on.
    pub(super) fn writer(&mut self, index: usize) -> Result<ResultWriter<'_>, NoResult> {
        self.filled = self.filled.max(self.len);
        let of = (index as u32, self.declared);
        match &mut self.bytes {
            ResultBytes::Pool(buf) => Ok(ResultWriter::of_chunk(&mut buf[..], &mut self.len, &mut self.told, of)),
            // An empty chunk of the caller.
            ResultBytes::Empty if self.capacity == 0 => {
                Ok(ResultWriter::of_chunk(&mut [], &mut self.len, &mut self.told, of))
            }
            ResultBytes::Empty => Err(NoResult::NoMemory),
            ResultBytes::Shared(_) => Err(NoResult::Shared),
        }
    }

    /// Sends its first `len` bytes, or as many as there are.
    pub(super) fn set_len(&mut self, len: usize) {
        self.len = match &self.bytes {
            ResultBytes::Empty => 0,
            ResultBytes::Pool(_) => self.fill(len),
            ResultBytes::Shared(bytes) => len.min(bytes.len()),
        };
    }

    /// Sends these bytes, for which there is room.
    fn share(&mut self, bytes: Frozen) {
        self.len = bytes.len();
        if let ResultBytes::Pool(buf) = std::mem::replace(&mut self.bytes, ResultBytes::Shared(bytes))
            && self.told
        {
            self.kept = Some(buf);
        }
    }
}

/// See the module page. Of a call without chunks all of it is empty.
#[derive(Debug)]
pub(crate) struct Chunks {
    /// The Read list, by position: the segments of each chunk stand together, in their order.
    reads: ArrayVec<ReadSegment, MAX_READ_SEGMENTS>,
    arguments: ArrayVec<ReadArgument, MAX_CHUNKS>,
    results: ArrayVec<ResultChunk, MAX_CHUNKS>,
    /// The Write list, flat.
    writes: ArrayVec<Segment, MAX_WRITE_SEGMENTS>,
    /// The Reply chunk, if one was offered.
    reply: Option<ArrayVec<Segment, MAX_SEGMENTS>>,
}

/// Those of a call that has none.
pub(super) const NO_CHUNKS: &Chunks = &Chunks::new();

impl Default for Chunks {
    fn default() -> Self {
        Self::new()
    }
}

/// The lists, as the caller gives them.
impl Chunks {
    const fn new() -> Self {
        Self {
            reads: ArrayVec::new_const(),
            arguments: ArrayVec::new_const(),
            results: ArrayVec::new_const(),
            writes: ArrayVec::new_const(),
            reply: None,
        }
    }

    /// Takes over the Read list.
    #[inline(always)]
    pub(crate) fn take_reads(&mut self, reads: impl IntoIterator<Item = ReadSegment>) {
        self.reads.extend(reads);
        // The segments of a chunk may be anywhere in the list, and chunks in any order: grouped, they are in the
        // order of the list.
        if self.reads.len() > 1 {
            self.reads.sort_by_key(|read| read.position);
        }
    }

    /// Takes over one more Write chunk.
    #[inline(always)]
    pub(crate) fn take_write(&mut self, chunk: impl IntoIterator<Item = Segment>) {
        let (before, mut capacity) = (self.writes.len(), 0u32);
        for segment in chunk {
            capacity = capacity.saturating_add(segment.length);
            self.writes.push(segment);
        }
        self.results.push(ResultChunk::of(capacity, (self.writes.len() - before) as u32));
    }

    /// Takes over the Reply chunk.
    #[inline(always)]
    pub(crate) fn take_reply(&mut self, chunk: impl IntoIterator<Item = Segment>) {
        self.reply = Some(chunk.into_iter().collect());
    }

    /// The Read list.
    pub(crate) fn reads(&self) -> &[ReadSegment] {
        &self.reads
    }

    /// Bytes of the Read list.
    pub(crate) fn read_bytes(&self) -> u64 {
        self.reads.iter().map(|read| u64::from(read.target.length)).sum()
    }

    /// Handles of all segments.
    pub(crate) fn handles(&self) -> impl Iterator<Item = u32> {
        let written = self.writes.iter().chain(self.reply.iter().flatten());
        written.chain(self.reads.iter().map(|read| &read.target)).map(|segment| segment.handle)
    }

    /// There is a Write list, or a Reply chunk, for the reply to return.
    #[inline]
    pub(crate) fn is_returned(&self) -> bool {
        !self.results.is_empty() || self.reply.is_some()
    }

    /// The lists that the reply returns.
    #[inline]
    pub(crate) fn returned(&self) -> ChunkCounts {
        ChunkCounts {
            reads: 0,
            writes: self.results.len(),
            write_segments: self.writes.len(),
            reply: self.reply.as_ref().map(|chunk| chunk.len()),
        }
    }

    /// Bytes of the Reply chunk; `None` if there is none.
    pub(crate) fn reply_capacity(&self) -> Option<u64> {
        self.reply.as_ref().map(|chunk| chunk.iter().map(|segment| u64::from(segment.length)).sum())
    }

    pub(super) fn clear_reads(&mut self) {
        self.reads.clear();
        self.arguments.clear();
    }

    pub(super) fn clear(&mut self) {
        self.clear_reads();
        self.results.clear();
        self.writes.clear();
        self.reply = None;
    }
}

/// What is to be read, and has been.
impl Chunks {
    /// The Position Zero Read chunk if there is one, which no procedure has an argument in; else all of the Read list.
    #[inline(always)]
    fn next_reads(&self) -> &[ReadSegment] {
        match self.reads.first() {
            Some(first) if first.position == 0 => &self.reads[..self.message().count()],
            _ => &self.reads,
        }
    }

    /// Something is to be read.
    #[inline(always)]
    pub(crate) fn fetches(&self) -> bool {
        !self.reads.is_empty()
    }

    /// Bytes of the longest segment that is to be read.
    #[inline(always)]
    pub(crate) fn longest_read(&self) -> usize {
        self.next_reads().iter().map(|read| read.target.length as usize).max().unwrap_or(0)
    }

    /// What is to be read: its position, and from where. Those of one position stand together, and none is empty.
    #[inline(always)]
    pub(crate) fn to_fetch(&self) -> impl Iterator<Item = (u32, Segment)> + Clone {
        let all = self.next_reads().iter().filter(|read| read.target.length > 0);
        all.map(|read| (read.position, read.target))
    }

    /// Bytes of each chunk that is to be read.
    pub(crate) fn chunks_to_fetch(&self) -> impl Iterator<Item = usize> {
        let chunks = self.next_reads().chunk_by(|a, b| a.position == b.position);
        chunks.map(|chunk| chunk.iter().map(|read| read.target.length as usize).sum())
    }

    /// The segments of the Position Zero Read chunk.
    fn message(&self) -> impl Iterator<Item = &ReadSegment> {
        self.reads.iter().take_while(|read| read.position == 0)
    }

    /// Bytes of the Position Zero Read chunk.
    pub(crate) fn message_bytes(&self) -> u64 {
        self.message().map(|read| u64::from(read.target.length)).sum()
    }

    /// It has been read, and is not part of the Read list any more.
    pub(super) fn drop_message(&mut self) {
        let segments = self.message().count();
        self.reads.drain(..segments);
    }

    /// An argument that belongs at this byte is about to be read.
    #[inline(always)]
    pub(super) fn push_argument(&mut self, at: u32) {
        self.arguments.push(ReadArgument { at, buf: None });
    }

    /// The arguments have been read; `last` gives their buffers, from the last one on. False if one of them was lost.
    #[inline(always)]
    pub(super) fn landed(&mut self, mut last: impl FnMut() -> Option<Buf>) -> bool {
        self.arguments.iter_mut().rev().all(|argument| {
            argument.buf = last();
            argument.buf.is_some()
        })
    }

    /// Takes away what came beyond the arguments that they are; `inline` is those that came inline.
    ///
    /// # Errors
    /// The word in front of a chunk, if there is one, is not the count of its bytes, as the binding declares it.
    pub(super) fn trim_arguments(&mut self, inline: &[u8], binding: &Binding) -> Result<(), Miscounted> {
        for index in 0..self.arguments.len() {
            let word = if binding.is_counted() { self.word_before(index, inline) } else { None };
            if let Some(buf) = self.arguments.get_mut(index).and_then(|argument| argument.buf.as_mut()) {
                let chunk = buf.len();
                let len = binding.argument_len(chunk, word).ok_or(Miscounted { chunk, word })?;
                if len < chunk {
                    buf.set_window(buf.start(), len);
                }
            }
        }
        Ok(())
    }

    /// The word of the message that is right in front of an argument.
    fn word_before(&self, index: usize, inline: &[u8]) -> Option<u32> {
        let at = self.arguments.get(index)?.at as usize;
        // Positions count what other chunks have put in front; these may be in any order.
        let mut end = at;
        for other in self.arguments.iter().filter(|other| (other.at as usize) < at) {
            let len = padded(other.buf.as_ref()?.len());
            if other.at as usize + len + 4 > at {
                return None;
            }
            end = end.checked_sub(len)?;
        }
        let word = inline.get(end.checked_sub(4)?..end)?;
        word.try_into().ok().map(u32::from_be_bytes)
    }

    /// How many arguments there are.
    pub(super) fn arguments(&self) -> usize {
        self.arguments.len()
    }

    /// One of them.
    pub(super) fn argument(&self, index: usize) -> Option<&[u8]> {
        self.arguments.get(index)?.buf.as_deref()
    }

    /// Where it belongs.
    pub(super) fn argument_at(&self, index: usize) -> Option<usize> {
        self.arguments.get(index).map(|argument| argument.at as usize)
    }

    /// The handler has it from now on.
    pub(super) fn take_argument(&mut self, index: usize) -> Option<Buf> {
        self.arguments.get_mut(index)?.buf.take()
    }
}

/// What is to be written.
impl Chunks {
    /// How many results there are.
    #[inline]
    pub(crate) fn results(&self) -> usize {
        self.results.len()
    }

    /// Bytes that the caller has room for in the largest.
    #[inline(always)]
    pub(crate) fn largest_capacity(&self) -> usize {
        self.results.iter().map(|result| result.capacity as usize).max().unwrap_or(0)
    }

    /// Bytes that the caller has room for in each.
    pub(crate) fn capacities(&self) -> impl Iterator<Item = u32> {
        self.results.iter().map(|result| result.capacity)
    }

    /// Bytes of all results.
    pub(crate) fn result_bytes(&self) -> usize {
        self.results.iter().map(|result| result.len).sum()
    }

    /// The procedure declares so many bytes for each result: no more of the caller's room is used.
    #[inline(always)]
    pub(super) fn limit_results(&mut self, most: u32) {
        self.results.iter_mut().for_each(|result| {
            (result.capacity, result.declared) = (result.capacity.min(most), most);
        });
    }

    /// Gives each result memory of the pool, as much as it has room for. False if there is not enough.
    #[inline(always)]
    pub(super) fn fill_results(&mut self, mut alloc: impl FnMut(usize) -> Option<Buf>) -> bool {
        self.results.iter_mut().filter(|result| result.capacity > 0).all(|result| {
            let Some(buf) = alloc(result.capacity as usize) else { return false };
            result.bytes = ResultBytes::Pool(buf);
            true
        })
    }

    /// Gives back all memory, of results and of arguments.
    pub(super) fn release(&mut self) {
        self.arguments.clear();
        self.results.iter_mut().for_each(|result| result.bytes = ResultBytes::Empty);
    }

    /// One of the results.
    pub(super) fn result(&self, index: usize) -> Result<&ResultChunk, NoResult> {
        self.results.get(index).ok_or(NoResult::NoChunk)
    }

    /// The same, to be written.
    pub(super) fn result_mut(&mut self, index: usize) -> Result<&mut ResultChunk, NoResult> {
        self.results.get_mut(index).ok_or(NoResult::NoChunk)
    }

    /// Sends these bytes in one of them.
    pub(super) fn share(&mut self, index: usize, bytes: Frozen) -> Result<(), NoResult> {
        let result = self.result_mut(index)?;
        let (needed, capacity) = (bytes.len(), result.capacity as usize);
        let declared = result.declared as usize;
        if needed > declared {
            return Err(NoResult::Undeclared { needed, declared });
        }
        if needed > capacity {
            return Err(NoResult::TooSmall { index, needed, capacity });
        }
        result.share(bytes);
        Ok(())
    }

    /// Nothing is written.
    pub(super) fn drop_results(&mut self) {
        self.results.iter_mut().for_each(|result| result.len = 0);
    }

    /// The arenas of results in memory of the handler's own.
    pub(super) fn arenas(&self) -> impl Iterator<Item = ArenaId> {
        self.results.iter().filter_map(|result| match &result.bytes {
            ResultBytes::Shared(bytes) => Some(bytes.arena()),
            ResultBytes::Empty | ResultBytes::Pool(_) => None,
        })
    }

    /// Gives away the results and a long reply: `write` has the segments of each, which it says the lengths in, its
    /// bytes, and how many they are. `None` if memory cannot be lent.
    #[inline(always)]
    pub(crate) fn write_out(
        &mut self,
        long: Option<Buf>,
        mut write: impl FnMut(&mut [Segment], Option<Source>, u32),
    ) -> Option<Written> {
        let (mut written, mut segments) = (Written::default(), &mut self.writes[..]);
        for result in &mut self.results {
            let (mine, rest) = std::mem::take(&mut segments).split_at_mut(result.segments as usize);
            segments = rest;
            let source = match std::mem::replace(&mut result.bytes, ResultBytes::Empty) {
                ResultBytes::Pool(buf) => Some(Source::Lent(buf.lend().ok()?)),
                ResultBytes::Shared(bytes) => Some(Source::Frozen(bytes)),
                ResultBytes::Empty => None,
            };
            write(mine, source, result.len as u32);
            written.counts.push(result.segments);
            written.bytes += result.len;
        }
        if let Some(chunk) = &mut self.reply {
            let len = long.as_ref().map_or(0, |reply| reply.len());
            let source = match long {
                Some(reply) => Some(Source::Lent(reply.lend().ok()?)),
                None => None,
            };
            write(chunk, source, len as u32);
            written.bytes += len;
        }
        Some(written)
    }

    /// The Write list, whose segments say how much was written into each.
    pub(crate) fn write_list<'a>(&'a self, written: &'a Written) -> WriteList<'a> {
        WriteList { counts: &written.counts, segments: &self.writes }
    }

    /// The Reply chunk, if one was offered.
    pub(crate) fn reply(&self) -> Option<&[Segment]> {
        self.reply.as_deref()
    }
}

/// What was [written out](Chunks::write_out).
#[derive(Debug, Default)]
pub(crate) struct Written {
    /// How many segments each chunk of the Write list has.
    counts: ArrayVec<u32, MAX_CHUNKS>,
    /// Of all chunks.
    bytes: usize,
}

impl Written {
    /// Bytes of all chunks.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}
