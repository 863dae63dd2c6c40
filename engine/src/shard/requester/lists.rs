//! Chunk lists of the current call.

use arrayvec::ArrayVec;

use super::exposures::{Exposure, Place};
use super::forms::segments_of;
use crate::proto::{MAX_READ_SEGMENTS, MAX_WRITE_SEGMENTS, Terms};
use crate::service::{MAX_CHUNKS, MAX_SEGMENTS};
use crate::wire::{Chunks, ReadSegment, Segment, WriteList};

/// Chunk lists of a call, in segments of the peer's size. All calls reuse it.
#[derive(Debug, Default)]
pub(super) struct Lists {
    reads: ArrayVec<ReadSegment, MAX_READ_SEGMENTS>,
    counts: ArrayVec<u32, MAX_CHUNKS>,
    writes: ArrayVec<Segment, MAX_WRITE_SEGMENTS>,
    reply: ArrayVec<Segment, MAX_SEGMENTS>,
    has_reply: bool,
    /// The handle that the peer may invalidate.
    offer: u32,
}

impl Lists {
    /// Lists of exposed memory for a header, with the handle that the peer may invalidate if `offered`. `None` with too
    /// many segments: the peer has changed its terms since the call got its form.
    #[inline(always)]
    pub(super) fn of<'a>(&'a mut self, exposure: &'a Exposure, terms: &Terms, offered: bool) -> Option<Chunks<'a>> {
        match exposure.all() {
            // Usually there is one chunk, of one segment.
            [part] if segments_of(part.at.target.length as usize, terms) == 1 && terms.segment_count > 0 => {
                let segments = std::slice::from_ref(&part.at.target);
                let inv_handle = if offered { part.at.target.handle } else { 0 };
                Some(match part.place {
                    Place::Read(_) => Chunks { inv_handle, reads: std::slice::from_ref(&part.at), ..Chunks::NONE },
                    Place::Write(_) => {
                        Chunks { inv_handle, writes: WriteList { counts: &[1], segments }, ..Chunks::NONE }
                    }
                    Place::Reply => Chunks { inv_handle, reply: Some(segments), ..Chunks::NONE },
                })
            }
            _ => self.fill(exposure, terms).then(|| self.chunks(offered)),
        }
    }

    #[inline(never)]
    fn fill(&mut self, exposure: &Exposure, terms: &Terms) -> bool {
        self.reads.clear();
        self.counts.clear();
        self.writes.clear();
        self.reply.clear();
        let mut left = terms.segment_count as usize;
        (self.offer, self.has_reply) = (0, false);
        for part in exposure.all() {
            let (mut rest, size) = (part.at.target, terms.segment_size);
            let count = segments_of(rest.length as usize, terms);
            match left.checked_sub(count) {
                Some(fewer) if count <= MAX_SEGMENTS => left = fewer,
                _ => return false,
            }
            self.offer = rest.handle;
            match part.place {
                Place::Read(_) => {}
                Place::Write(_) => self.counts.push(count as u32),
                Place::Reply => self.has_reply = true,
            }
            for _ in 0..count {
                let segment = Segment { length: rest.length.min(size), ..rest };
                match part.place {
                    Place::Read(position) => self.reads.push(ReadSegment { position, target: segment }),
                    Place::Write(_) => self.writes.push(segment),
                    Place::Reply => self.reply.push(segment),
                }
                rest.length -= segment.length;
                rest.offset += u64::from(segment.length);
            }
        }
        true
    }

    fn chunks(&self, offer: bool) -> Chunks<'_> {
        Chunks {
            inv_handle: if offer { self.offer } else { 0 },
            reads: &self.reads,
            writes: WriteList { counts: &self.counts, segments: &self.writes },
            reply: self.has_reply.then_some(&self.reply[..]),
        }
    }
}
