//! Chunk lists of messages that a test writes by hand.

use rpcrdma::wire::{Chunks, ReadSegment, Segment, WriteList};

/// The chunk lists of a message.
#[derive(Clone, Debug, Default)]
pub struct Lists {
    inv_handle: u32,
    reads: Vec<ReadSegment>,
    counts: Vec<u32>,
    segments: Vec<Segment>,
    reply: Option<Vec<Segment>>,
}

impl Lists {
    /// Empty lists.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a Read chunk of these segments.
    #[must_use]
    pub fn read(mut self, position: u32, segments: impl AsRef<[Segment]>) -> Self {
        self.reads.extend(segments.as_ref().iter().map(|&target| ReadSegment { position, target }));
        self
    }

    /// Adds a Write chunk of these segments.
    #[must_use]
    pub fn write(mut self, segments: impl AsRef<[Segment]>) -> Self {
        self.counts.push(segments.as_ref().len() as u32);
        self.segments.extend_from_slice(segments.as_ref());
        self
    }

    /// Sets the Reply chunk.
    #[must_use]
    pub fn reply(mut self, segments: impl AsRef<[Segment]>) -> Self {
        self.reply = Some(segments.as_ref().to_vec());
        self
    }

    /// Offers a handle to be invalidated.
    #[must_use]
    pub fn offer(mut self, handle: u32) -> Self {
        self.inv_handle = handle;
        self
    }

    /// The lists, for a header.
    pub fn chunks(&self) -> Chunks<'_> {
        let writes = WriteList { counts: &self.counts, segments: &self.segments };
        Chunks { inv_handle: self.inv_handle, reads: &self.reads, writes, reply: self.reply.as_deref() }
    }
}

impl<'a> From<&'a Lists> for Chunks<'a> {
    fn from(lists: &'a Lists) -> Self {
        lists.chunks()
    }
}

/// Divides a segment of exposed memory.
pub trait Cut {
    /// The `length` bytes that follow the first `skip` bytes.
    fn part(&self, skip: u32, length: u32) -> Segment;

    /// Consecutive segments of these lengths, from the start of this segment.
    fn cut(&self, lens: &[u32]) -> Vec<Segment>;
}

impl Cut for Segment {
    fn part(&self, skip: u32, length: u32) -> Segment {
        Segment { length, offset: self.offset + u64::from(skip), ..*self }
    }

    fn cut(&self, lens: &[u32]) -> Vec<Segment> {
        let starts = lens.iter().scan(0, |end, len| Some(std::mem::replace(end, *end + len)));
        starts.zip(lens).map(|(start, &len)| self.part(start, len)).collect()
    }
}

/// A segment whose handle belongs to no window.
pub fn segment(length: u32) -> Segment {
    Segment { handle: 1, length, offset: 0 }
}

/// Chunks with this Read list.
pub fn reads(list: &[ReadSegment]) -> Chunks<'_> {
    Chunks { reads: list, ..Chunks::NONE }
}
