//! Access to shared memory, and its layout.

use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicU64, fence};

use rpcrdma_mempool::{PeerMapping, PeerRing, PeerRings};

use super::ring::{RingConsumer, RingProducer};

/// A word of memory that another process maps, too.
pub(super) trait Word {
    /// Acquire load: pairs with [`publish`](Self::publish) of the other side.
    fn acquire(&self) -> u64;
    /// Loads a word that an earlier acquire has made valid.
    fn get(&self) -> u64;
    /// Stores a word that a later [`publish`](Self::publish) makes visible.
    fn set(&self, value: u64);
    /// Release store: pairs with [`acquire`](Self::acquire) of the other side.
    fn publish(&self, value: u64);
    /// Acquire-release exchange.
    fn exchange(&self, value: u64) -> u64;
    /// Returns the latest value in the word's modification order, by an acquire-release read-modify-write.
    fn newest(&self) -> u64;
    /// A full fence between a store and a load of another word. If both sides use it, at least one of them sees the
    /// other's store.
    fn full_fence();
}

/// A ring in shared memory. Positions count bytes since the beginning, and wrap; words are aligned to 8 bytes.
pub(super) trait RingMemory {
    /// The word type.
    type Word: Word;
    /// The word at a position.
    fn word(&self, position: u64) -> &Self::Word;
    /// Copies bytes out. Returns false and copies nothing if the ring is smaller than `to`.
    #[must_use = "false means that nothing was copied"]
    fn read(&self, position: u64, to: &mut [u8]) -> bool;
    /// Copies bytes in. Returns false and copies nothing if the ring is smaller than `from`.
    #[must_use = "false means that nothing was copied"]
    fn write(&self, position: u64, from: &[u8]) -> bool;
}

impl Word for AtomicU64 {
    #[inline]
    fn acquire(&self) -> u64 {
        self.load(Acquire)
    }

    #[inline]
    fn get(&self) -> u64 {
        self.load(Relaxed)
    }

    #[inline]
    fn set(&self, value: u64) {
        self.store(value, Relaxed);
    }

    #[inline]
    fn publish(&self, value: u64) {
        self.store(value, Release);
    }

    #[inline]
    fn exchange(&self, value: u64) -> u64 {
        self.swap(value, AcqRel)
    }

    #[inline]
    fn newest(&self) -> u64 {
        self.fetch_and(u64::MAX, AcqRel)
    }

    #[inline]
    fn full_fence() {
        fence(SeqCst);
    }
}

impl RingMemory for PeerRing<'_> {
    type Word = AtomicU64;

    #[inline]
    fn word(&self, position: u64) -> &AtomicU64 {
        PeerRing::word(self, position)
    }

    #[inline]
    fn read(&self, position: u64, to: &mut [u8]) -> bool {
        PeerRing::read(self, position, to)
    }

    #[inline]
    fn write(&self, position: u64, from: &[u8]) -> bool {
        PeerRing::write(self, position, from)
    }
}

/// The two sides of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Side {
    /// Creates the rings.
    Connector,
    /// Maps the connector's rings.
    Acceptor,
}

/// Bytes of the cache lines before the rings.
const LINES_BYTES: usize = 4096;
/// Initial bytes of a ring, at most a quarter of its maximum. It holds a few short messages.
const FIRST_BYTES: u32 = 2048;
/// Distance, in cache lines, of lines with different writers: processors fetch lines in pairs.
const LINE_STRIDE: usize = 2;

/// A connection's memory as one side sees it: a page of cache lines, the connector's ring, the acceptor's ring.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    pub(super) side: Side,
    /// Bytes that each ring may grow to, a power of two.
    pub(super) ring_bytes: u32,
}

/// Numbers of the cache lines before the rings.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lines {
    /// Doorbell that this side rings to wake the peer.
    pub(super) peer_bell: usize,
    /// Doorbell that the peer rings to wake this side.
    pub(super) own_bell: usize,
    /// This side's progress in the peer's ring, and its refusal of a record.
    pub(super) own_report: usize,
    pub(super) peer_report: usize,
}

impl Layout {
    /// Bytes of the lines and both rings.
    pub(super) fn bytes(self) -> usize {
        LINES_BYTES + 2 * self.ring_bytes as usize
    }

    /// Initial bytes of one ring.
    pub(super) fn first_bytes(self) -> u32 {
        FIRST_BYTES.min(self.ring_bytes / 4)
    }

    /// Start of the ring that this side sends into.
    pub(super) fn tx_ring(self) -> usize {
        LINES_BYTES + self.side as usize * self.ring_bytes as usize
    }

    /// Start of the ring that this side receives from.
    pub(super) fn rx_ring(self) -> usize {
        LINES_BYTES + (1 - self.side as usize) * self.ring_bytes as usize
    }

    /// This side's rings, before they have grown.
    pub(super) fn rings(self, memory: PeerMapping) -> Result<PeerRings, String> {
        PeerRings::new(memory, self.tx_ring(), self.rx_ring(), self.first_bytes() as usize)
            .ok_or_else(|| format!("rings of {} bytes do not fit their memory", self.ring_bytes))
    }

    /// The sending end of a new ring.
    pub(super) fn producer(self) -> RingProducer {
        RingProducer::new(self.first_bytes(), self.ring_bytes)
    }

    /// The receiving end of a new ring, for messages up to this length.
    pub(super) fn consumer(self, max_message: u32) -> RingConsumer {
        RingConsumer::new(self.first_bytes(), self.ring_bytes, max_message)
    }

    pub(super) fn lines(self) -> Lines {
        let (own, peer) = (self.side as usize, 1 - self.side as usize);
        let [own_report, peer_report, own_bell, peer_bell] =
            [own, peer, 2 + own, 2 + peer].map(|line| line * LINE_STRIDE);
        Lines { peer_bell, own_bell, own_report, peer_report }
    }
}
