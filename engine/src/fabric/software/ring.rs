//! The ring that carries messages one way: one producer, one consumer, bytes in shared memory.
//!
//! A record is a header of 16 bytes and the payload, rounded up to whole cache lines; the payload may run over the
//! end of the ring, the header never does. Its first word says that the record is there: the producer *first*
//! zeroes the first word of the place behind the record, *then* writes the record, and publishes its first word
//! last. The consumer polls exactly the line that the next message will arrive in: a small message costs its own cache
//! lines and no other.
//!
//! How far the consumer has come (its *head*) goes back inside the headers of the other direction's records, and,
//! when there are none, through a line of its own.
//!
//! The memory is shared with a process that may be hostile: every word is read once, then checked.

use super::memory::Memory;

/// Bytes that records are aligned to, one cache line.
pub(super) const LINE: u32 = 64;
/// Bytes of a record's header.
pub(super) const HEADER: u32 = 16;

/// The first word of a header, 0 while there is no record.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Word(pub(super) u64);

impl Word {
    const PRESENT: u64 = 1 << 32;
    const INVALIDATE: u64 = 1 << 33;
    const WANTS_ACK: u64 = 1 << 34;
    const KNOWN: u64 = Self::PRESENT | Self::INVALIDATE | Self::WANTS_ACK;

    /// A message of `len` bytes; whether it names a key to invalidate, whether its sender waits to hear of it.
    #[inline]
    pub(super) fn message(len: u32, invalidate: bool, wants_ack: bool) -> Self {
        Self(
            u64::from(len)
                | Self::PRESENT
                | if invalidate { Self::INVALIDATE } else { 0 }
                | if wants_ack { Self::WANTS_ACK } else { 0 },
        )
    }

    /// Payload bytes.
    #[inline]
    pub(super) fn len(self) -> u32 {
        self.0 as u32
    }

    /// The header names a key to invalidate.
    #[inline]
    pub(super) fn invalidates(self) -> bool {
        self.0 & Self::INVALIDATE != 0
    }

    /// The sender has asked for a completion.
    #[inline]
    pub(super) fn wants_ack(self) -> bool {
        self.0 & Self::WANTS_ACK != 0
    }

    /// Whether a correct producer may have written it.
    #[inline]
    pub(super) fn is_valid(self, max_message: u32) -> bool {
        self.0 >> 32 & !(Self::KNOWN >> 32) == 0 && self.0 & Self::PRESENT != 0 && self.len() <= max_message
    }
}

/// Bytes that a record with this payload takes.
#[inline]
fn record_bytes(len: u32) -> u32 {
    (HEADER + len + (LINE - 1)) & !(LINE - 1)
}

/// Where a ring lies in its mapping.
#[derive(Clone, Copy, Debug)]
pub(super) struct Span {
    /// First byte.
    pub(super) base: usize,
    /// Bytes, a power of two.
    pub(super) bytes: u32,
}

impl Span {
    #[inline]
    fn at(self, position: u32) -> usize {
        self.base + (position & (self.bytes - 1)) as usize
    }

    /// The ring's bytes from `position` on: how many there are before the end, at most `len`.
    #[inline]
    fn before_end(self, position: u32, len: usize) -> usize {
        len.min((self.bytes - (position & (self.bytes - 1))) as usize)
    }
}

/// The sending end. Positions count bytes since the beginning, modulo 2^32.
#[derive(Debug)]
pub(super) struct Producer {
    span: Span,
    sent: u32,
    acked: u32,
}

impl Producer {
    pub(super) fn new(span: Span) -> Self {
        Self { span, sent: 0, acked: 0 }
    }

    /// End of what was published.
    #[inline]
    pub(super) fn sent(&self) -> u32 {
        self.sent
    }

    /// Whether the consumer has taken everything before `position`.
    #[inline]
    pub(super) fn is_acked(&self, position: u32) -> bool {
        (self.acked.wrapping_sub(position) as i32) >= 0
    }

    /// Whether everything that was published has been taken.
    #[inline]
    pub(super) fn is_idle(&self) -> bool {
        self.acked == self.sent
    }

    /// Whether a record with this payload fits now; the word behind it has to fit too.
    #[inline]
    pub(super) fn has_room(&self, len: u32) -> bool {
        self.span.bytes - self.sent.wrapping_sub(self.acked) >= record_bytes(len) + LINE
    }

    /// Publishes one record. The caller has asked [`has_room`](Self::has_room).
    #[inline]
    pub(super) fn push(&mut self, memory: &impl Memory, word: Word, tail: u64, payload: &[u8]) {
        let header = self.span.at(self.sent);
        let end = self.sent.wrapping_add(record_bytes(word.len()));
        memory.store_relaxed(self.span.at(end), 0);
        memory.store_relaxed(header + 8, tail);
        let body = self.sent.wrapping_add(HEADER);
        let first = self.span.before_end(body, payload.len());
        if first == payload.len() {
            memory.write(header + HEADER as usize, payload);
        } else {
            memory.write(header + HEADER as usize, &payload[..first]);
            memory.write(self.span.base, &payload[first..]);
        }
        // Pairs with the load in `Consumer::peek`: who sees the word sees the record and the zero behind it.
        memory.publish(header, word.0);
        self.sent = end;
    }

    /// Takes the consumer's word for how far it has come. False if that cannot be.
    #[inline]
    pub(super) fn acknowledge(&mut self, head: u32) -> bool {
        if head.wrapping_sub(self.acked) <= self.sent.wrapping_sub(self.acked) {
            self.acked = head;
            return true;
        }
        // The two ways that heads travel may overtake each other: an old one is no lie.
        (self.acked.wrapping_sub(head) as i32) >= 0
    }
}

/// The receiving end.
#[derive(Debug)]
pub(super) struct Consumer {
    span: Span,
    head: u32,
    told: u32,
}

impl Consumer {
    pub(super) fn new(span: Span) -> Self {
        Self { span, head: 0, told: 0 }
    }

    /// The word that the next record begins with, or 0.
    #[inline]
    pub(super) fn peek(&self, memory: &impl Memory) -> Word {
        // Pairs with the publication in `Producer::push`.
        Word(memory.load(self.span.at(self.head)))
    }

    /// Whether everything published has been taken.
    pub(super) fn is_empty(&self, memory: &impl Memory) -> bool {
        self.peek(memory) == Word(0)
    }

    /// The second word of the record that `peek` has found.
    #[inline]
    pub(super) fn tail(&self, memory: &impl Memory) -> u64 {
        memory.load_relaxed(self.span.at(self.head) + 8)
    }

    /// Copies the payload of the record that `peek` has found; its length is the checked one.
    #[inline]
    pub(super) fn copy(&self, memory: &impl Memory, to: &mut [u8]) {
        let header = self.span.at(self.head);
        let first = self.span.before_end(self.head.wrapping_add(HEADER), to.len());
        if first == to.len() {
            memory.read(header + HEADER as usize, to);
        } else {
            let (front, back) = to.split_at_mut(first);
            memory.read(header + HEADER as usize, front);
            memory.read(self.span.base, back);
        }
    }

    /// Steps over the record.
    #[inline]
    pub(super) fn advance(&mut self, len: u32) {
        self.head = self.head.wrapping_add(record_bytes(len));
    }

    /// How far it has come, to be told to the producer by whoever asks.
    #[inline]
    pub(super) fn tell(&mut self) -> u32 {
        self.told = self.head;
        self.head
    }

    /// Bytes taken that the producer has not been told of.
    #[inline]
    pub(super) fn untold(&self) -> u32 {
        self.head.wrapping_sub(self.told)
    }

    /// Size of the ring.
    #[inline]
    pub(super) fn bytes(&self) -> u32 {
        self.span.bytes
    }
}
