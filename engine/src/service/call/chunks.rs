//! Chunk lists of a served call, with arguments and results.

use arrayvec::ArrayVec;
use rpcrdma_mempool::{ArenaId, Buf, Frozen};
use rpcrdma_xdr::ReceivedChunks;

use super::super::writer::{ResultTooLong, ResultWriter};
use super::{NoResult, NoResultCause};
use crate::binding::Binding;
use crate::fabric::Source;
use crate::proto::{MAX_CHUNKS, MAX_READ_SEGMENTS, MAX_SEGMENTS, MAX_WRITE_SEGMENTS, Refusal};
use crate::wire::xdr::padded;
use crate::wire::{ChunkCounts, ReadSegment, Segment, WriteList};

/// An argument received by RDMA Read.
#[derive(Debug)]
pub(crate) struct ReadArgument {
    /// Position in the unreduced arguments.
    pub(super) at: u32,
    /// `None` until the argument is read, and after the handler has taken it.
    pub(super) buf: Option<Buf>,
}

/// Arguments received by RDMA Read, by position.
#[derive(Debug)]
pub(crate) struct ReadArguments(pub(super) ArrayVec<ReadArgument, MAX_CHUNKS>);

/// A DDP-eligible argument is in the next chunk if that chunk has the argument's position (RFC 8166 §3.4.5).
impl ReceivedChunks for ReadArguments {
    fn item(&self, _: usize, used: usize, position: usize, _: usize) -> Option<&[u8]> {
        let argument = self.0.get(used).filter(|argument| argument.at as usize == position)?;
        argument.buf.as_deref()
    }

    fn is_complete(&self, used: usize) -> bool {
        self.0.len() == used
    }
}

/// A Read chunk that does not match the length word in front of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct LengthMismatch {
    /// Bytes of the chunk.
    pub(crate) chunk: usize,
    /// The word in front of the chunk, if the message has one there.
    pub(crate) word: Option<u32>,
}

/// A result sent by RDMA Write into a Write chunk.
#[derive(Debug)]
pub(crate) struct ResultChunk {
    /// Bytes of the caller's chunk, at most `declared`.
    pub(super) capacity: u32,
    /// Maximum bytes that the procedure declares for a result.
    declared: u32,
    /// Bytes to send.
    pub(super) len: usize,
    /// Memory of the pool, filled by the handler.
    pool: Option<Buf>,
    /// Memory of the handler, sent instead of the pool's.
    shared: Option<Frozen>,
    /// Whether the handler has the address of the pool memory, so that a device may write there until the call ends.
    is_exposed: bool,
}

impl ResultChunk {
    /// Whether the result travels in the chunk. An empty chunk requests it inline, as if no chunk were offered
    /// (RFC 8166 §4.3.2.3).
    pub(super) fn has_room(&self) -> bool {
        self.capacity > 0
    }

    /// Writer of the result, in the pool memory.
    fn writer(&mut self, index: usize) -> Result<ResultWriter<'_>, NoResult> {
        if self.shared.is_some() {
            return Err(NoResult(NoResultCause::Shared));
        }
        match &mut self.pool {
            Some(buf) => {
                let chunk = (index as u32, self.declared);
                Ok(ResultWriter::of_chunk(buf, &mut self.len, &mut self.is_exposed, chunk))
            }
            None if self.capacity == 0 => Err(NoResult::no_chunk(index)),
            None => Err(NoResult(NoResultCause::NoMemory)),
        }
    }

    /// Shortens the result to at most `len` bytes.
    fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// Sets the result, which has this index, to these bytes.
    fn share(&mut self, index: usize, bytes: Frozen) -> Result<(), NoResult> {
        let (needed, room) = (bytes.len(), self.capacity as usize);
        if !self.has_room() {
            return Err(NoResult::no_chunk(index));
        }
        if needed > room {
            let error = ResultTooLong { needed, room, chunk: Some((index as u32, self.declared)) };
            return Err(NoResult(NoResultCause::TooLong(error)));
        }
        (self.len, self.shared) = (needed, Some(bytes));
        if !self.is_exposed {
            self.pool = None;
        }
        Ok(())
    }
}

/// Results that travel in Write chunks, by index.
#[derive(Debug, Default)]
pub(crate) struct Results<'a>(&'a mut [ResultChunk]);

impl<'a> Results<'a> {
    /// Whether the caller offers no Write chunk.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether the result travels in a Write chunk. It is requested inline if its chunk is empty or missing.
    #[inline]
    pub(crate) fn has_chunk(&self, index: usize) -> bool {
        self.0.get(index).is_some_and(ResultChunk::has_room)
    }

    /// These results, borrowed for a shorter time.
    #[inline]
    pub(crate) fn reborrow(&mut self) -> Results<'_> {
        Results(self.0)
    }

    /// Writer of a result.
    pub(crate) fn into_writer(self, index: usize) -> Result<ResultWriter<'a>, NoResult> {
        self.0.get_mut(index).ok_or(NoResult::no_chunk(index))?.writer(index)
    }

    /// Sets a result to the service's own memory.
    pub(crate) fn share(self, index: usize, bytes: Frozen) -> Result<(), NoResult> {
        self.0.get_mut(index).ok_or(NoResult::no_chunk(index))?.share(index, bytes)
    }

    /// Copies a result into its chunk.
    pub(crate) fn copy(&mut self, index: usize, bytes: &[u8]) -> Result<(), Refusal> {
        let result = self.0.get_mut(index).ok_or(NoResult::no_chunk(index))?;
        if bytes.is_empty() {
            result.truncate(0);
            return Ok(());
        }
        Ok(result.writer(index)?.put(bytes)?)
    }

    /// Shortens a result to its first `len` bytes.
    ///
    /// # Errors
    /// The result has fewer bytes; returns their number.
    pub(crate) fn send(&mut self, index: usize, len: usize) -> Result<(), usize> {
        let result = self.0.get_mut(index).ok_or(0_usize)?;
        (len <= result.len).then(|| result.truncate(len)).ok_or(result.len)
    }

    /// Empties the results from `index` on.
    pub(crate) fn clear_from(&mut self, index: usize) {
        self.0.iter_mut().skip(index).for_each(|result| result.truncate(0));
    }
}

/// Chunks of a call; empty for a call without chunks.
#[derive(Debug)]
pub(crate) struct CallChunks {
    /// Read list, by position; the segments of a chunk are adjacent, in order.
    reads: ArrayVec<ReadSegment, MAX_READ_SEGMENTS>,
    pub(super) arguments: ReadArguments,
    pub(super) results: ArrayVec<ResultChunk, MAX_CHUNKS>,
    /// The Write list, flat.
    writes: ArrayVec<Segment, MAX_WRITE_SEGMENTS>,
    /// Number of segments of each Write chunk.
    counts: ArrayVec<u32, MAX_CHUNKS>,
    /// The Reply chunk, if one was offered.
    reply: Option<ArrayVec<Segment, MAX_SEGMENTS>>,
}

/// Chunks of a call without any.
pub(super) const NO_CHUNKS: &CallChunks = &CallChunks::new();

impl Default for CallChunks {
    fn default() -> Self {
        Self::new()
    }
}

/// The chunk lists of the caller.
impl CallChunks {
    const fn new() -> Self {
        Self {
            reads: ArrayVec::new_const(),
            arguments: ReadArguments(ArrayVec::new_const()),
            results: ArrayVec::new_const(),
            writes: ArrayVec::new_const(),
            counts: ArrayVec::new_const(),
            reply: None,
        }
    }

    /// Stores the Read list.
    #[inline]
    pub(crate) fn store_reads(&mut self, reads: impl IntoIterator<Item = ReadSegment>) {
        self.reads.extend(reads);
        // The list may have chunks in any order. The sort is stable, so it keeps the order within a chunk.
        if self.reads.len() > 1 {
            self.reads.sort_by_key(|read| read.position);
        }
    }

    /// Stores one more Write chunk.
    #[inline]
    pub(crate) fn store_write_chunk(&mut self, chunk: impl IntoIterator<Item = Segment>) {
        let (before, mut capacity) = (self.writes.len(), 0u32);
        for segment in chunk {
            capacity = capacity.saturating_add(segment.length);
            self.writes.push(segment);
        }
        self.counts.push((self.writes.len() - before) as u32);
        let (declared, is_exposed) = (u32::MAX, false);
        self.results.push(ResultChunk { capacity, declared, len: 0, pool: None, shared: None, is_exposed });
    }

    /// Stores the Reply chunk.
    pub(crate) fn store_reply_chunk(&mut self, chunk: impl IntoIterator<Item = Segment>) {
        self.reply = Some(chunk.into_iter().collect());
    }

    pub(crate) fn reads(&self) -> &[ReadSegment] {
        &self.reads
    }

    /// Bytes of the Read list.
    pub(crate) fn read_bytes(&self) -> u64 {
        self.reads.iter().map(|read| u64::from(read.target.length)).sum()
    }

    /// Handles of all segments.
    fn handles(&self) -> impl Iterator<Item = u32> {
        let reads = self.reads.iter().map(|read| &read.target);
        reads.chain(&self.writes).chain(self.reply.iter().flatten()).map(|segment| segment.handle)
    }

    /// Whether a segment has this handle.
    pub(crate) fn has_handle(&self, handle: u32) -> bool {
        self.handles().any(|own| own == handle)
    }

    /// Handle that all segments have; 0 if they differ, or there are none.
    pub(crate) fn only_handle(&self) -> u32 {
        let mut first = None;
        let is_only = self.handles().all(|handle| *first.get_or_insert(handle) == handle);
        first.filter(|_| is_only).unwrap_or(0)
    }

    /// Whether the reply returns a Write list or a Reply chunk.
    pub(crate) fn returns_chunks(&self) -> bool {
        !self.results.is_empty() || self.reply.is_some()
    }

    /// Sizes of the lists that the reply returns.
    pub(crate) fn returned(&self) -> ChunkCounts {
        ChunkCounts {
            reads: 0,
            writes: self.results.len(),
            write_segments: self.writes.len(),
            reply: self.reply.as_ref().map(|chunk| chunk.len()),
        }
    }

    /// Bytes of the Reply chunk, if any.
    pub(crate) fn reply_capacity(&self) -> Option<u64> {
        self.reply.as_ref().map(|chunk| chunk.iter().map(|segment| u64::from(segment.length)).sum())
    }

    pub(super) fn clear_reads(&mut self) {
        self.reads.clear();
        self.arguments.0.clear();
    }

    pub(super) fn clear(&mut self) {
        self.clear_reads();
        self.results.clear();
        self.writes.clear();
        self.counts.clear();
        self.reply = None;
    }
}

/// The RDMA Reads of a call.
impl CallChunks {
    /// The Read chunks to read next: the Position Zero Read chunk if there is one, otherwise the whole Read list.
    fn next_reads(&self) -> &[ReadSegment] {
        match self.reads.first() {
            Some(first) if first.position == 0 => &self.reads[..self.message().count()],
            _ => &self.reads,
        }
    }

    /// Whether RDMA Reads are needed.
    pub(crate) fn needs_reads(&self) -> bool {
        !self.reads.is_empty()
    }

    /// Bytes of the longest segment to read next.
    pub(crate) fn longest_read(&self) -> usize {
        self.next_reads().iter().map(|read| read.target.length as usize).max().unwrap_or(0)
    }

    /// Segments to read next, with their positions; those of one position are adjacent, and none is empty.
    #[inline]
    pub(crate) fn to_fetch(&self) -> impl Iterator<Item = (u32, Segment)> + Clone {
        let all = self.next_reads().iter().filter(|read| read.target.length > 0);
        all.map(|read| (read.position, read.target))
    }

    /// Bytes of each chunk to read next.
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

    /// Removes the Position Zero Read chunk, after it was read.
    pub(super) fn drop_message(&mut self) {
        let segments = self.message().count();
        self.reads.drain(..segments);
    }

    /// Stores the buffers of all arguments, which `next_back` returns from the last to the first.
    ///
    /// Returns false if one is missing.
    #[inline]
    pub(crate) fn set_argument_buffers(&mut self, mut next_back: impl FnMut() -> Option<Buf>) -> bool {
        self.arguments.0.iter_mut().rev().all(|argument| {
            argument.buf = next_back();
            argument.buf.is_some()
        })
    }

    /// Trims arguments to their lengths; `inline` has the inline arguments.
    ///
    /// # Errors
    /// The length word that the binding declares in front of a chunk does not match the chunk.
    pub(super) fn trim_arguments(&mut self, inline: &[u8], binding: &Binding) -> Result<(), LengthMismatch> {
        for index in 0..self.arguments.0.len() {
            let word = if binding.counted { self.word_before(index, inline) } else { None };
            if let Some(buf) = self.arguments.0.get_mut(index).and_then(|argument| argument.buf.as_mut()) {
                let chunk = buf.len();
                let len = binding.argument_len(chunk, word).ok_or(LengthMismatch { chunk, word })?;
                if len < chunk {
                    buf.set_window(buf.start(), len);
                }
            }
        }
        Ok(())
    }

    /// The word of the message in front of an argument.
    fn word_before(&self, index: usize, inline: &[u8]) -> Option<u32> {
        let at = self.arguments.0.get(index)?.at as usize;
        // The position counts the bytes of the chunks in front of it, which are not in `inline`. A chunk that ends less
        // than a word in front of the argument leaves no room for a length word.
        let mut end = at;
        for other in self.arguments.0.iter().filter(|other| (other.at as usize) < at) {
            let len = padded(other.buf.as_ref()?.len());
            let has_word_between = other.at as usize + len + 4 <= at;
            if !has_word_between {
                return None;
            }
            end = end.checked_sub(len)?;
        }
        let word = inline.get(end.checked_sub(4)?..end)?;
        word.try_into().ok().map(u32::from_be_bytes)
    }
}

/// The results of a call.
impl CallChunks {
    /// Number of Write chunks.
    pub(crate) fn results(&self) -> usize {
        self.results.len()
    }

    /// Bytes of each Write chunk.
    pub(crate) fn capacities(&self) -> impl Iterator<Item = u32> {
        self.results.iter().map(|result| result.capacity)
    }

    /// Bytes of all results in Write chunks.
    pub(crate) fn result_bytes(&self) -> usize {
        self.results.iter().map(|result| result.len).sum()
    }

    /// Limits each result to the declared `max_len` bytes. `alloc`, if given, allocates pool memory for each result.
    ///
    /// Returns false if there is not enough memory.
    #[inline]
    pub(super) fn prepare_results(&mut self, max_len: u32, alloc: Option<impl FnMut(usize) -> Option<Buf>>) -> bool {
        self.results.iter_mut().for_each(|result| {
            (result.capacity, result.declared) = (result.capacity.min(max_len), max_len);
        });
        let Some(mut alloc) = alloc else { return true };
        self.results.iter_mut().filter(|result| result.has_room()).all(|result| {
            result.pool = alloc(result.capacity as usize);
            result.pool.is_some()
        })
    }

    /// Frees the memory of results and arguments.
    pub(super) fn release(&mut self) {
        self.arguments.0.clear();
        self.results.iter_mut().for_each(|result| (result.pool, result.shared) = (None, None));
    }

    /// Splits the chunks into arguments and results.
    #[inline]
    pub(super) fn split(&mut self) -> (&ReadArguments, Results<'_>) {
        (&self.arguments, Results(&mut self.results))
    }

    /// The arenas of results in memory of the handler.
    pub(super) fn arenas(&self) -> impl Iterator<Item = ArenaId> {
        self.results.iter().filter_map(|result| result.shared.as_ref()).map(Frozen::arena)
    }

    /// Passes the results, and the long reply, to `write` for RDMA Writes.
    ///
    /// For each chunk, `write` gets the segments, the memory to send, and the number of bytes. It must set the lengths
    /// of the segments.
    /// Returns the bytes of all chunks; `None` if memory cannot be lent.
    #[inline]
    pub(crate) fn write_out(
        &mut self,
        long: Option<Buf>,
        mut write: impl FnMut(&mut [Segment], Option<Source>, u32),
    ) -> Option<usize> {
        let (mut written, mut segments) = (0, &mut self.writes[..]);
        for (result, &count) in self.results.iter_mut().zip(&self.counts) {
            let (chunk, rest) = std::mem::take(&mut segments).split_at_mut(count as usize);
            segments = rest;
            let source = match result.shared.take() {
                Some(bytes) => Some(Source::Frozen(bytes)),
                None => result.pool.take().map(|buf| buf.lend().map(Source::Lent)).transpose().ok()?,
            };
            write(chunk, source, result.len as u32);
            written += result.len;
        }
        if let Some(chunk) = &mut self.reply {
            let len = long.as_ref().map_or(0, |reply| reply.len());
            let source = long.map(|reply| reply.lend().map(Source::Lent)).transpose().ok()?;
            write(chunk, source, len as u32);
            written += len;
        }
        Some(written)
    }

    /// The Write list, with the length written to each segment.
    pub(crate) fn write_list(&self) -> WriteList<'_> {
        WriteList { counts: &self.counts, segments: &self.writes }
    }

    /// The Reply chunk, if one was offered.
    pub(crate) fn reply(&self) -> Option<&[Segment]> {
        self.reply.as_deref()
    }
}
