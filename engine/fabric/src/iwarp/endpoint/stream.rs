//! A connection's outbound bytes in order: FPDUs, with payloads read in place.

#![forbid(unsafe_code)]

#[cfg(any(test, feature = "testing"))]
#[path = "../../../tests/harness/iwarp_stream.rs"]
mod testing;

use std::collections::VecDeque;

use crate::Source;
use crate::iwarp::sys::Slices;
use crate::iwarp::wire::{Crc, Segment, pad};

/// Longest payload to copy behind its header: cheaper than another vector element.
pub(super) const STAGE: usize = 1024;
/// Sent staged bytes from which on their space is reclaimed, though others follow.
const COMPACT: usize = 64 << 10;
/// Bytes read at a time for a CRC.
const CRC_SLICE: usize = 4096;

/// Location of a segment's payload.
pub(super) enum Payload<'a> {
    /// Inline bytes, to be copied.
    Bytes(&'a [u8]),
    /// Pool or application memory, from an offset on for a length. It is held until sent.
    Memory(&'a Source, usize, usize),
}

/// A stretch of the stream.
#[derive(Debug)]
enum Span {
    /// A number of staged bytes.
    Staged(usize),
    /// These bytes, in their place.
    Memory { of: Source, offset: usize, len: usize },
}

/// The bytes of a connection that are not sent yet.
#[derive(Debug, Default)]
pub(super) struct Stream {
    staged: Vec<u8>,
    /// The first staged byte that is not sent.
    first: usize,
    spans: VecDeque<Span>,
    /// Bytes that were put, and that were sent, since the stream began.
    put: u64,
    sent: u64,
}

impl Stream {
    /// Bytes to send.
    #[inline]
    pub(super) fn len(&self) -> usize {
        (self.put - self.sent) as usize
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.put == self.sent
    }

    /// Position of the next byte.
    #[inline]
    pub(super) fn end(&self) -> u64 {
        self.put
    }

    /// All before this position is sent.
    #[inline]
    pub(super) fn sent(&self) -> u64 {
        self.sent
    }

    #[inline]
    fn stage(&mut self, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        self.staged.extend_from_slice(bytes);
        self.put += bytes.len() as u64;
        match self.spans.back_mut() {
            Some(Span::Staged(len)) => *len += bytes.len(),
            _ => self.spans.push_back(Span::Staged(bytes.len())),
        }
    }

    /// Puts one FPDU.
    #[inline]
    pub(super) fn fpdu(&mut self, segment: Segment, payload: Payload<'_>, crc: bool) {
        let len = match &payload {
            Payload::Bytes(bytes) => bytes.len(),
            Payload::Memory(_, _, len) => *len,
        };
        let header = segment.encode(len);
        let padding = pad(header.len() - 2 + len);
        self.stage(&header);
        let sum = crc.then(|| sum(&header, &payload, padding));
        match payload {
            Payload::Bytes(bytes) => self.stage(bytes),
            Payload::Memory(of, offset, len) if len <= STAGE => self.stage_memory(of, offset, len),
            Payload::Memory(of, offset, len) => {
                self.put += len as u64;
                self.spans.push_back(Span::Memory { of: of.clone(), offset, len });
            }
        }
        // The CRC field exists even without a CRC (RFC 5044 §4.4).
        let trailer = [0; 7];
        match sum {
            None => self.stage(&trailer[..padding + 4]),
            Some(sum) => {
                self.stage(&trailer[..padding]);
                self.stage(&sum);
            }
        }
    }

    fn stage_memory(&mut self, of: &Source, offset: usize, len: usize) {
        let mut bytes = [0; STAGE];
        copy(of, offset, &mut bytes[..len]);
        self.stage(&bytes[..len]);
    }

    /// The next bytes to send, as the elements of a vectored write.
    #[inline]
    pub(super) fn slices<'a>(&'a self, to: &mut Slices<'a>) {
        let mut at = self.first;
        for span in &self.spans {
            let room = match span {
                Span::Staged(len) => {
                    let bytes = &self.staged[at..at + len];
                    at += len;
                    to.bytes(bytes)
                }
                Span::Memory { of: Source::Frozen(frozen), offset, len } => to.bytes(&frozen[*offset..*offset + *len]),
                Span::Memory { of: Source::Lent(lent), offset, len } => to.lent(lent, *offset, *len),
            };
            if !room {
                break;
            }
        }
    }

    /// Counts `n` bytes as sent.
    #[inline]
    pub(super) fn advance(&mut self, mut n: usize) {
        self.sent += n as u64;
        while n > 0 {
            let Some(span) = self.spans.front_mut() else { break };
            let (Span::Staged(left) | Span::Memory { len: left, .. }) = span;
            let taken = n.min(*left);
            *left -= taken;
            n -= taken;
            let over = *left == 0;
            match span {
                Span::Staged(_) => self.first += taken,
                Span::Memory { offset, .. } => *offset += taken,
            }
            if over {
                self.spans.pop_front();
            }
        }
        if self.first == self.staged.len() {
            self.staged.clear();
            self.first = 0;
        } else if self.first >= COMPACT {
            self.staged.drain(..self.first);
            self.first = 0;
        }
    }

    /// Discards unsent bytes and releases their memory.
    pub(super) fn clear(&mut self) {
        self.staged = Vec::new();
        self.first = 0;
        self.spans = VecDeque::new();
        self.put = self.sent;
    }
}

/// Copies from a payload in place. Posted payloads were checked, so all bytes exist.
fn copy(of: &Source, offset: usize, to: &mut [u8]) {
    match of {
        Source::Frozen(frozen) => to.copy_from_slice(&frozen[offset..offset + to.len()]),
        Source::Lent(lent) => {
            let there = lent.read_at(offset, to);
            debug_assert!(there, "a payload outside of its buffer");
        }
    }
}

#[cold]
fn sum(header: &[u8], payload: &Payload<'_>, padding: usize) -> [u8; 4] {
    let mut crc = Crc::new();
    crc.update(header);
    match payload {
        Payload::Bytes(bytes) => crc.update(bytes),
        Payload::Memory(of, offset, len) => {
            let mut space = [0; CRC_SLICE];
            let mut at = 0;
            while at < *len {
                let slice = &mut space[..(*len - at).min(CRC_SLICE)];
                copy(of, offset + at, slice);
                crc.update(slice);
                at += slice.len();
            }
        }
    }
    crc.update(&[0; 3][..padding]);
    crc.finish()
}
