//! The ring that carries messages one way: one producer, one consumer, bytes in shared memory.
//!
//! A record is a header of 16 bytes and the payload, rounded up to whole cache lines; the payload may run
//! over the end of the ring, the header never does. Its first word says that the record is there: the
//! producer *first* zeroes the first word of the place behind the record, *then* writes the record, and
//! publishes its first word last. The consumer polls exactly the line that the next message will arrive in: a
//! small message costs its own cache lines and no other.
//!
//! How far the consumer has come (its *head*) goes back inside the headers of the other direction's records,
//! and, when there are none, through a line of its own.
//!
//! The memory is shared with a process that may be hostile: every word is read once, then checked.

use super::memory::RingMemory;

/// Bytes that records are aligned to, one cache line.
pub(super) const LINE: u32 = 64;
/// Bytes of a record's header.
pub(super) const HEADER: usize = 16;

/// The two words of a header: how long the payload is and what to do with it, how far the sender has come in
/// the other direction's ring, and a key. The first is 0 while there is no record.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Header {
    first: u64,
    second: u64,
}

impl Header {
    const LEN: u64 = (1 << 24) - 1;
    const PRESENT: u64 = 1 << 24;
    const INVALIDATE: u64 = 1 << 25;
    const UNKNOWN: u64 = 0b1111_1100 << 24;

    /// A message of `len` bytes; the key that it invalidates; the head of the other direction.
    #[inline]
    pub(super) fn message(len: u32, invalidate: Option<u32>, head: u64) -> Self {
        let first =
            u64::from(len) | Self::PRESENT | if invalidate.is_some() { Self::INVALIDATE } else { 0 } | head << 32;
        Self { first, second: u64::from(invalidate.unwrap_or(0)) | head >> 32 << 32 }
    }

    /// As they lie in memory.
    #[cfg(test)]
    pub(super) fn words(self) -> (u64, u64) {
        (self.first, self.second)
    }

    /// Payload bytes.
    #[inline]
    pub(super) fn len(self) -> u32 {
        (self.first & Self::LEN) as u32
    }

    /// The key to invalidate.
    #[inline]
    pub(super) fn invalidate(self) -> Option<u32> {
        (self.first & Self::INVALIDATE != 0).then_some(self.second as u32)
    }

    /// How far the sender has come in the other direction's ring.
    #[inline]
    pub(super) fn head(self) -> u64 {
        self.first >> 32 | self.second >> 32 << 32
    }

    /// Whether a correct producer may have written it.
    #[inline]
    pub(super) fn is_valid(self, max_message: u32) -> bool {
        self.first & (Self::UNKNOWN | Self::PRESENT) == Self::PRESENT && self.len() <= max_message
    }
}

/// Bytes that a record with this payload takes.
#[inline]
fn record_bytes(len: u32) -> u64 {
    u64::from((HEADER as u32 + len + (LINE - 1)) & !(LINE - 1))
}

/// The sending end. Positions count bytes since the beginning.
#[derive(Debug)]
pub(super) struct Producer {
    /// Bytes of the ring.
    bytes: u32,
    sent: u64,
    acked: u64,
}

impl Producer {
    pub(super) fn new(bytes: u32) -> Self {
        Self { bytes, sent: 0, acked: 0 }
    }

    /// End of what was published.
    #[inline]
    pub(super) fn sent(&self) -> u64 {
        self.sent
    }

    /// How far the consumer has come.
    #[inline]
    pub(super) fn acked(&self) -> u64 {
        self.acked
    }

    /// Whether the consumer has taken everything before `position`.
    #[inline]
    pub(super) fn is_acked(&self, position: u64) -> bool {
        position <= self.acked
    }

    /// Whether everything that was published has been taken.
    #[inline]
    pub(super) fn is_idle(&self) -> bool {
        self.acked == self.sent
    }

    /// Whether a record with this payload fits now; the word behind it has to fit too.
    #[inline]
    pub(super) fn has_room(&self, len: u32) -> bool {
        self.sent - self.acked + record_bytes(len) + u64::from(LINE) <= u64::from(self.bytes)
    }

    /// Publishes one record. The caller has asked [`has_room`](Self::has_room).
    #[inline(always)]
    pub(super) fn push(&mut self, memory: &impl RingMemory, header: Header, payload: &[u8]) {
        let at = self.sent;
        self.sent += record_bytes(header.len());
        memory.store_relaxed(self.sent, 0);
        memory.store_relaxed(at + 8, header.second);
        memory.write(at + HEADER as u64, payload);
        // Pairs with the load in `Consumer::peek`: who sees the word sees the record and the zero behind it.
        memory.publish(at, header.first);
    }

    /// Takes the consumer's word for how far it has come. False if that cannot be. The two ways that heads
    /// travel may overtake each other: an old one is no lie.
    #[inline]
    pub(super) fn acknowledge(&mut self, head: u64) -> bool {
        if head > self.sent {
            return false;
        }
        self.acked = self.acked.max(head);
        true
    }
}

/// The receiving end.
#[derive(Debug)]
pub(super) struct Consumer {
    /// Bytes of the ring.
    bytes: u32,
    head: u64,
    told: u64,
}

impl Consumer {
    pub(super) fn new(bytes: u32) -> Self {
        Self { bytes, head: 0, told: 0 }
    }

    /// The first word of the next record's header, or 0.
    #[inline]
    pub(super) fn peek(&self, memory: &impl RingMemory) -> u64 {
        // Pairs with the publication in `Producer::push`.
        memory.load(self.head)
    }

    /// The header of the record that `peek` has found.
    #[inline]
    pub(super) fn header(&self, memory: &impl RingMemory, first: u64) -> Header {
        Header { first, second: memory.load_relaxed(self.head + 8) }
    }

    /// Copies the payload of the record that `peek` has found; its length is the checked one.
    #[inline]
    pub(super) fn copy(&self, memory: &impl RingMemory, to: &mut [u8]) {
        memory.read(self.head + HEADER as u64, to);
    }

    /// Steps over the record.
    #[inline]
    pub(super) fn advance(&mut self, len: u32) {
        self.head += record_bytes(len);
    }

    /// How far it has come, to be told to the producer by whoever asks.
    #[inline]
    pub(super) fn report(&mut self) -> u64 {
        self.told = self.head;
        self.head
    }

    /// Bytes taken that the producer has not been told of.
    #[inline]
    pub(super) fn untold(&self) -> u64 {
        self.head - self.told
    }

    /// Whether so much is untold that the producer may run out of room.
    #[inline]
    pub(super) fn owes_report(&self) -> bool {
        self.untold() > u64::from(self.bytes) / 4
    }
}
