//! The FPDUs of a connection that are not yet sent. Long payloads stay in place.

#![forbid(unsafe_code)]

#[cfg(any(test, feature = "testing"))]
#[path = "../../../tests/harness/iwarp_stream.rs"]
mod testing;

use std::collections::VecDeque;

use crc32c::{crc32c, crc32c_append};

use crate::Source;
use crate::iwarp::sys::Slices;
use crate::iwarp::wire::{SegmentHeader, pad};

/// Longest payload to copy after its header, because copying it is cheaper than another vector element.
pub(super) const STAGE: usize = 1024;
/// Number of sent bytes at the front of `staged` that triggers their removal.
const COMPACT: usize = 64 << 10;
/// Bytes of a payload read at a time for its CRC.
const CRC_SLICE: usize = 4096;

/// The payload of a segment.
pub(super) enum Payload<'a> {
    /// Bytes to copy.
    Bytes(&'a [u8]),
    /// Memory, with offset and length. A long payload is sent in place, and the buffer holds the memory until then.
    Memory(&'a Source, usize, usize),
}

/// A range of the bytes to send.
#[derive(Debug)]
enum Span {
    /// This many of the next staged bytes.
    Staged(usize),
    /// Bytes sent in place.
    Memory { source: Source, offset: usize, len: usize },
}

/// The bytes of a connection that are not yet sent.
#[derive(Debug, Default)]
pub(in crate::iwarp) struct SendBuffer {
    staged: Vec<u8>,
    /// Index of the first staged byte that is not sent.
    first: usize,
    spans: VecDeque<Span>,
    /// Bytes appended and bytes sent since the connection began.
    end: u64,
    sent: u64,
}

impl SendBuffer {
    /// Number of bytes to send.
    #[inline]
    pub(in crate::iwarp) fn len(&self) -> usize {
        (self.end - self.sent) as usize
    }

    /// Stream position of the next byte to append.
    #[inline]
    pub(super) fn end(&self) -> u64 {
        self.end
    }

    /// Stream position of the next byte to send.
    #[inline]
    pub(in crate::iwarp) fn sent(&self) -> u64 {
        self.sent
    }

    #[inline]
    fn stage(&mut self, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        self.staged.extend_from_slice(bytes);
        self.end += bytes.len() as u64;
        match self.spans.back_mut() {
            Some(Span::Staged(len)) => *len += bytes.len(),
            _ => self.spans.push_back(Span::Staged(bytes.len())),
        }
    }

    /// Appends one FPDU.
    #[inline]
    pub(super) fn push_fpdu(&mut self, segment: SegmentHeader, payload: Payload<'_>, crc: bool) {
        let len = match &payload {
            Payload::Bytes(bytes) => bytes.len(),
            Payload::Memory(_, _, len) => *len,
        };
        let header = segment.encode(len);
        let padding = &[0; 3][..pad(header.len() - 2 + len)];
        // The CRC field exists even without a CRC (RFC 5044 §4.4).
        let crc = if crc { checksum(&header, &payload, padding) } else { [0; 4] };
        self.stage(&header);
        match payload {
            Payload::Bytes(bytes) => self.stage(bytes),
            Payload::Memory(source, offset, len) if len <= STAGE => {
                let mut bytes = [0; STAGE];
                copy(source, offset, &mut bytes[..len]);
                self.stage(&bytes[..len]);
            }
            Payload::Memory(source, offset, len) => {
                self.end += len as u64;
                self.spans.push_back(Span::Memory { source: source.clone(), offset, len });
            }
        }
        self.stage(padding);
        self.stage(&crc);
    }

    /// Adds the next bytes to a vectored send, as many as it can hold.
    #[inline]
    pub(in crate::iwarp) fn slices<'a>(&'a self, to: &mut Slices<'a>) {
        let mut at = self.first;
        for span in &self.spans {
            let has_room = match span {
                Span::Staged(len) => {
                    at += len;
                    to.bytes(&self.staged[at - len..at])
                }
                Span::Memory { source: Source::Frozen(frozen), offset, len } => {
                    to.bytes(&frozen[*offset..*offset + *len])
                }
                Span::Memory { source: Source::Lent(lent), offset, len } => to.lent(lent, *offset, *len),
            };
            if !has_room {
                break;
            }
        }
    }

    /// Counts `n` bytes as sent.
    #[inline]
    pub(in crate::iwarp) fn advance(&mut self, mut n: usize) {
        self.sent += n as u64;
        while n > 0
            && let Some(span) = self.spans.front_mut()
        {
            let (Span::Staged(left) | Span::Memory { len: left, .. }) = span;
            let part = n.min(*left);
            *left -= part;
            n -= part;
            let is_sent = *left == 0;
            match span {
                Span::Staged(_) => self.first += part,
                Span::Memory { offset, .. } => *offset += part,
            }
            if is_sent {
                self.spans.pop_front();
            }
        }
        if self.first == self.staged.len() || self.first >= COMPACT {
            self.staged.drain(..self.first);
            self.first = 0;
        }
    }

    /// Discards unsent bytes and releases their memory.
    pub(super) fn clear(&mut self) {
        *self = Self { end: self.sent, sent: self.sent, ..Self::default() };
    }
}

/// Copies bytes of a payload. The bounds of posted payloads were checked, so all bytes exist.
fn copy(source: &Source, offset: usize, to: &mut [u8]) {
    match source {
        Source::Frozen(frozen) => to.copy_from_slice(&frozen[offset..offset + to.len()]),
        Source::Lent(lent) => {
            let exists = lent.read_at(offset, to);
            debug_assert!(exists, "the payload exceeds its buffer");
        }
    }
}

#[cold]
fn checksum(header: &[u8], payload: &Payload<'_>, padding: &[u8]) -> [u8; 4] {
    let mut crc = crc32c(header);
    match payload {
        Payload::Bytes(bytes) => crc = crc32c_append(crc, bytes),
        Payload::Memory(source, offset, len) => {
            let mut space = [0; CRC_SLICE];
            for at in (0..*len).step_by(CRC_SLICE) {
                let slice = &mut space[..(*len - at).min(CRC_SLICE)];
                copy(source, offset + at, slice);
                crc = crc32c_append(crc, slice);
            }
        }
    }
    crc32c_append(crc, padding).to_le_bytes()
}
