//! A one-way message ring in shared memory: one producer, one consumer.
//!
//! A record is a header of 16 bytes and the payload, rounded up to whole cache lines. The payload may wrap around the
//! end of the ring; the header never does. Its first word announces the record. The producer writes the record, zeroes
//! the first word behind it, and publishes the record's first word last. The consumer polls exactly the line of the
//! next message, so a small message touches its own cache lines only.
//!
//! The consumer's progress (its *head*) travels in the headers of the other direction's records. Without such records
//! the consumer reports it in a cache line of its own.
//!
//! A ring starts small. The producer enlarges it, up to the negotiated size, when a record does not fit. Therefore the
//! used part is only as long as the traffic needs, and stays in cache for any number of connections. In place of the
//! record the producer writes a *marker* with the new ring size. The next record starts at the first byte behind the
//! smaller ring, and the producer's position skips forward to the next position that maps to this byte in the larger
//! ring. A record that the consumer has not taken yet is then overwritten only at positions that are at least the
//! larger ring's length after its own, so the usual count of free bytes still protects the record. Until the consumer
//! reaches the marker, the producer may also fill the new part.
//!
//! The memory is shared with a process that may be hostile: every word is read once, then checked.

use super::memory::{RingMemory, Word};

/// Bytes that records are aligned to, one cache line.
pub(super) const LINE: u32 = 64;
/// Bytes of a record's header.
pub(super) const HEADER: usize = 16;

/// The two words of a record's header. The first word is 0 while there is no record.
///
/// The words hold the payload length, the kind, the sender's progress in the other ring, and the key to invalidate.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct RecordHeader {
    pub(super) first: u64,
    pub(super) second: u64,
}

impl RecordHeader {
    const LEN: u64 = (1 << 24) - 1;
    const PRESENT: u64 = 1 << 24;
    const INVALIDATE: u64 = 1 << 25;
    const GROWTH: u64 = 1 << 26;
    const UNKNOWN: u64 = 0b1111_1000 << 24;

    /// The header of a message of `len` bytes, with the key to invalidate and the head of the other ring.
    #[inline]
    pub(super) fn message(len: u32, invalidate: Option<u32>, head: u64) -> Self {
        let first =
            u64::from(len) | Self::PRESENT | if invalidate.is_some() { Self::INVALIDATE } else { 0 } | head << 32;
        Self { first, second: u64::from(invalidate.unwrap_or(0)) | head >> 32 << 32 }
    }

    /// The header of a marker: from here on the ring has `bytes` bytes.
    fn growth(bytes: u32) -> Self {
        Self { first: Self::GROWTH | Self::PRESENT, second: u64::from(bytes) }
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

    /// The sender's progress in the other direction's ring.
    #[inline]
    pub(super) fn head(self) -> u64 {
        self.first >> 32 | self.second >> 32 << 32
    }

    /// Whether a correct producer may have written this header, for messages up to `longest` bytes.
    #[inline]
    fn is_message(self, longest: u32) -> bool {
        self.first & (Self::UNKNOWN | Self::GROWTH | Self::PRESENT) == Self::PRESENT && self.len() <= longest
    }

    /// Ring size from this marker on; `None` for another record.
    fn grows_to(self) -> Option<u32> {
        let bytes = self.second as u32;
        (self == Self::growth(bytes)).then_some(bytes)
    }
}

/// Bytes that a record with a payload of this length occupies.
#[inline]
fn record_bytes(len: u32) -> u64 {
    u64::from((HEADER as u32 + len + (LINE - 1)) & !(LINE - 1))
}

/// The longest payload that a ring of `bytes` bytes can hold, together with the word after the record.
fn longest(bytes: u32) -> u32 {
    bytes.saturating_sub(LINE + HEADER as u32)
}

/// The position of the record after a marker: the next one that maps to the end of the smaller ring.
fn position_after_marker(at: u64, from: u32, to: u32) -> u64 {
    let (from, to) = (u64::from(from), u64::from(to));
    let next = (at & !(to - 1)) + from;
    if next > at { next } else { next + to }
}

/// The sending end. Positions count bytes since the beginning, including those that a growth skips.
#[derive(Debug)]
pub(super) struct RingProducer {
    /// Bytes of the ring, a power of two.
    bytes: u32,
    /// Largest permitted size.
    max_bytes: u32,
    sent: u64,
    acked: u64,
    /// The position after the last marker.
    grown: u64,
    /// The end, as a position, of the part that the last growth has added.
    new_until: u64,
}

impl RingProducer {
    /// The sending end of a ring of `bytes` bytes that may grow to `max_bytes`.
    pub(super) fn new(bytes: u32, max_bytes: u32) -> Self {
        Self { bytes, max_bytes, sent: 0, acked: 0, grown: 0, new_until: 0 }
    }

    /// Position after the last published record.
    #[inline]
    pub(super) fn sent(&self) -> u64 {
        self.sent
    }

    /// The consumer's progress.
    #[inline]
    pub(super) fn acked(&self) -> u64 {
        self.acked
    }

    /// Whether the consumer has taken everything that was published.
    #[inline]
    pub(super) fn is_idle(&self) -> bool {
        self.acked == self.sent
    }

    /// Whether a record with this payload fits now, together with the word after it.
    #[inline]
    pub(super) fn has_room(&self, len: u32) -> bool {
        self.sent - self.acked + record_bytes(len) + u64::from(LINE) <= u64::from(self.bytes) || self.has_new_room(len)
    }

    /// Whether a record fits behind the marker of a ring that has grown.
    ///
    /// Until the consumer reaches the marker, the usual count of free bytes may
    /// include positions that were skipped.
    #[cold]
    fn has_new_room(&self, len: u32) -> bool {
        self.acked < self.grown && self.sent + record_bytes(len) + u64::from(LINE) <= self.new_until
    }

    /// Writes and publishes a record.
    ///
    /// The caller has checked [`has_room`](Self::has_room). `header` makes the header once the payload is written.
    /// False, and nothing is written, if the payload exceeds the ring.
    // Always inlined, because its only caller in the fabric sends each message.
    #[inline(always)]
    #[must_use = "false means that nothing was written"]
    pub(super) fn push(
        &mut self,
        memory: &impl RingMemory,
        payload: &[u8],
        header: impl FnOnce() -> RecordHeader,
    ) -> bool {
        if !memory.write(self.sent + HEADER as u64, payload) {
            return false;
        }
        let (header, at) = (header(), self.sent);
        self.sent += record_bytes(header.len());
        memory.word(self.sent).set(0);
        memory.word(at + 8).set(header.second);
        // Pairs with the load in `RingConsumer::peek`: a reader of the word also sees the record and the zero behind
        // it.
        memory.word(at).publish(header.first);
        true
    }

    /// The ring size that makes room for this payload; `None` at the maximum.
    ///
    /// The growth to the maximum starts from a quarter of it or less. The longest record, whose payload has half the
    /// maximum size, therefore fits into the new part.
    #[cold]
    pub(super) fn larger(&self, len: u32) -> Option<u32> {
        if self.bytes == self.max_bytes {
            return None;
        }
        let bytes = (self.bytes + record_bytes(len) as u32 + LINE).next_power_of_two();
        Some(if bytes < self.max_bytes / 2 { bytes } else { self.max_bytes })
    }

    /// Writes a marker and enlarges the ring. `memory` already has the size of [`larger`](Self::larger).
    #[cold]
    pub(super) fn grow(&mut self, memory: &impl RingMemory, bytes: u32) {
        // The marker's position in the smaller ring, whose bytes are the first ones of the larger ring.
        let marker = self.sent & u64::from(self.bytes - 1);
        self.sent = position_after_marker(self.sent, self.bytes, bytes);
        (self.grown, self.new_until) = (self.sent, self.sent + u64::from(bytes - self.bytes));
        self.bytes = bytes;
        let header = RecordHeader::growth(bytes);
        memory.word(self.sent).set(0);
        memory.word(marker + 8).set(header.second);
        // Pairs with the load in `RingConsumer::peek`.
        memory.word(marker).publish(header.first);
    }

    /// Records the consumer's reported progress. False if it is invalid.
    ///
    /// Reports in record headers and in the consumer's cache line may overtake each other, so an older one is valid.
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
pub(super) struct RingConsumer {
    /// Bytes of the ring, a power of two.
    bytes: u32,
    /// Largest permitted size.
    max_bytes: u32,
    /// Bytes of the longest message that both sides have agreed on.
    max_message: u32,
    /// Bytes of the longest message that fits the ring at its current size.
    longest: u32,
    head: u64,
    reported: u64,
}

impl RingConsumer {
    /// The receiving end of a ring of `bytes` bytes that may grow to `max_bytes`.
    ///
    /// Its messages have at most `max_message` bytes.
    pub(super) fn new(bytes: u32, max_bytes: u32, max_message: u32) -> Self {
        Self { bytes, max_bytes, max_message, longest: longest(bytes).min(max_message), head: 0, reported: 0 }
    }

    /// Whether a correct producer may have written this message header into a ring of this size.
    #[inline]
    pub(super) fn admits(&self, header: RecordHeader) -> bool {
        header.is_message(self.longest)
    }

    /// The first word of the next record's header, or 0.
    #[inline]
    pub(super) fn peek(&self, memory: &impl RingMemory) -> u64 {
        // Pairs with the publication in `RingProducer::push`.
        memory.word(self.head).acquire()
    }

    /// The header of the next record, if there is one.
    #[inline]
    pub(super) fn next_header(&self, memory: &impl RingMemory) -> Option<RecordHeader> {
        // Both addresses are computed before the load, which is a barrier for the compiler.
        let second = memory.word(self.head + 8);
        match self.peek(memory) {
            0 => None,
            first => Some(RecordHeader { first, second: second.get() }),
        }
    }

    /// Copies the payload of the next record, whose header has been read. False, and nothing is copied, if it is longer
    /// than the ring, which [`admits`](Self::admits) excludes.
    #[inline]
    #[must_use = "false means that nothing was copied"]
    pub(super) fn copy(&self, memory: &impl RingMemory, to: &mut [u8]) -> bool {
        memory.read(self.head + HEADER as u64, to)
    }

    /// Skips a record with a payload of this length.
    #[inline]
    pub(super) fn advance(&mut self, len: u32) {
        self.head += record_bytes(len);
    }

    /// Skips a marker. Returns the ring's new size; `None`, with nothing changed, for an invalid marker.
    #[cold]
    pub(super) fn grow(&mut self, header: RecordHeader) -> Option<u32> {
        let bytes = header.grows_to().filter(|&to| to.is_power_of_two() && to > self.bytes && to <= self.max_bytes)?;
        self.head = position_after_marker(self.head, self.bytes, bytes);
        self.bytes = bytes;
        self.longest = longest(bytes).min(self.max_message);
        Some(bytes)
    }

    /// The consumer's progress, which the caller must report to the producer now.
    #[inline]
    pub(super) fn report(&mut self) -> u64 {
        self.reported = self.head;
        self.head
    }

    /// Position of the next record.
    pub(super) fn taken(&self) -> u64 {
        self.head
    }

    /// Progress that was not reported to the producer, in bytes.
    #[inline]
    pub(super) fn unreported(&self) -> u64 {
        self.head - self.reported
    }

    /// Whether the producer needs a report soon, because it may run out of room.
    #[inline]
    pub(super) fn needs_report(&self) -> bool {
        self.unreported() > u64::from(self.bytes) / 4
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::collections::VecDeque;

    use rpcrdma_mempool::{PeerMapping, SharedMapping};

    use super::super::memory::{Layout, Side};
    use super::*;

    /// Both ends of a ring, and the memory of each side.
    struct RingEnds {
        tx: RingProducer,
        rx: RingConsumer,
        rings: [rpcrdma_mempool::PeerRings; 2],
        layout: Layout,
    }

    impl RingEnds {
        fn new(bytes: u32) -> Self {
            let layout = Layout { side: Side::Connector, ring_bytes: bytes };
            let memory = SharedMapping::create(layout.bytes(), "ring").expect("memory");
            let rings = [Side::Connector, Side::Acceptor].map(|side| {
                let fd = memory.fd().try_clone_to_owned().expect("dup");
                let memory = PeerMapping::map(fd, layout.bytes()).expect("map");
                Layout { side, ..layout }.rings(memory).expect("they fit")
            });
            Self { tx: layout.producer(), rx: layout.consumer(1 << 20), rings, layout }
        }

        /// Sends a message, and enlarges the ring if necessary. False if there is no room.
        fn send(&mut self, payload: &[u8]) -> bool {
            let len = payload.len() as u32;
            if !self.tx.has_room(len)
                && let Some(bytes) = self.tx.larger(len)
            {
                assert!(self.rings[0].move_tx(self.layout.tx_ring(), bytes as usize));
                self.tx.grow(&self.rings[0].tx(), bytes);
                assert!(self.tx.has_room(len), "{len} at {:?}", self.tx);
            }
            let room = self.tx.has_room(len);
            if room {
                assert!(self.tx.push(&self.rings[0].tx(), payload, || RecordHeader::message(len, None, 0)));
            }
            room
        }

        fn receive(&mut self) -> Option<Vec<u8>> {
            loop {
                let ring = self.rings[1].rx();
                let header = self.rx.next_header(&ring)?;
                if self.rx.admits(header) {
                    let mut payload = vec![0; header.len() as usize];
                    assert!(self.rx.copy(&ring, &mut payload));
                    self.rx.advance(header.len());
                    return Some(payload);
                }
                let bytes = self.rx.grow(header).expect("a marker");
                assert!(self.rings[1].move_rx(self.layout.tx_ring(), bytes as usize));
            }
        }
    }

    #[test]
    fn records_arrive_whole_and_in_order_while_a_ring_grows() {
        for seed in 1..=200u64 {
            let mut random = crate::testing::random::Xorshift::new(seed);
            let mut ends = RingEnds::new(16 << 10);
            let mut sent = VecDeque::new();
            // The batch size grows too, so the ring grows from any position.
            for turn in 0..400u64 {
                let longest = 1 + 20 * turn;
                for _ in 0..random.below(8) {
                    let payload = vec![random.below(255) as u8 + 1; random.below(longest.min(8000)) as usize];
                    if ends.send(&payload) {
                        sent.push_back(payload);
                    }
                }
                for _ in 0..random.below(10) {
                    let taken = ends.receive();
                    assert_eq!(taken, sent.pop_front(), "seed {seed}, turn {turn}");
                }
                if random.below(3) == 0 {
                    let head = ends.rx.report();
                    assert!(ends.tx.acknowledge(head));
                }
            }
            while let Some(taken) = ends.receive() {
                assert_eq!(Some(taken), sent.pop_front(), "seed {seed}");
            }
            assert!(sent.is_empty());
            assert!(ends.tx.acknowledge(ends.rx.report()) && ends.tx.is_idle());
            assert!(ends.send(&[1; 8000]), "the longest record");
        }
    }

    #[test]
    fn a_growing_ring_always_has_room_for_the_longest_message() {
        for max in [4 << 10, 8 << 10, 64 << 10] {
            for len in [0, 100, 500, 1000, 3000, 8000, 20_000].into_iter().filter(|len| 2 * len <= max as usize) {
                for sent in 0.. {
                    let mut ends = RingEnds::new(max);
                    assert!((0..sent).all(|_| ends.send(&vec![7; len])), "{max}: {sent} of {len} bytes");
                    if ends.tx.bytes == max {
                        assert!(sent > 0);
                        break;
                    }
                    assert!(ends.send(&vec![7; max as usize / 2]), "{max}: after {sent} of {len} bytes");
                }
            }
        }
    }

    #[test]
    fn a_ring_grows_only_as_its_traffic_needs() {
        let mut ends = RingEnds::new(1 << 18);
        for _ in 0..1000 {
            for _ in 0..4 {
                assert!(ends.send(&[7; 100]));
            }
            while ends.receive().is_some() {}
            assert!(ends.tx.acknowledge(ends.rx.report()));
        }
        assert_eq!(ends.tx.bytes, ends.layout.first_bytes());
        // A new ring has room for immediate sends up to its maximum size.
        let mut ends = RingEnds::new(1 << 18);
        let (records, capacity) = ((0..10_000).take_while(|_| ends.send(&[7; 100])).count(), (1 << 18) / 128);
        assert!((capacity - 10..capacity).contains(&records), "{records} of {capacity}");
    }

    /// In each ring size, the longest admitted payload is the longest for which the producer has room.
    #[test]
    fn messages_longer_than_the_ring_are_not_admitted() {
        for bytes in [128, 2048, 64 << 10] {
            let rx = RingConsumer::new(bytes, 1 << 20, 1 << 18);
            let admitted = |len| rx.admits(RecordHeader::message(len, None, 0));
            let longest = (0..=bytes).filter(|&len| RingProducer::new(bytes, bytes).has_room(len)).max().expect("room");
            assert!(admitted(longest) && !admitted(longest + 1), "{longest} in {bytes}");
        }
        let mut rx = RingConsumer::new(2048, 8192, 3000);
        let admitted = |rx: &RingConsumer, len| rx.admits(RecordHeader::message(len, None, 0));
        assert!(admitted(&rx, 1968) && !admitted(&rx, 1969));
        assert_eq!(rx.grow(RecordHeader::growth(8192)), Some(8192));
        assert!(admitted(&rx, 3000) && !admitted(&rx, 3001));
    }

    #[test]
    fn invalid_markers_are_refused() {
        let mut rx = RingConsumer::new(1024, 4096, 4096);
        for bytes in [0, 512, 1024, 3000, 8192, u32::MAX] {
            assert_eq!(rx.grow(RecordHeader::growth(bytes)), None, "{bytes}");
        }
        assert_eq!(rx.grow(RecordHeader::message(0, Some(2048), 0)), None);
        assert_eq!(rx.grow(RecordHeader { first: RecordHeader::growth(2048).first | 1, second: 2048 }), None);
        assert_eq!((rx.head, rx.grow(RecordHeader::growth(2048)), rx.head), (0, Some(2048), 1024));
        assert_eq!(rx.grow(RecordHeader::growth(2048)), None, "the ring has that size already");
    }
}
