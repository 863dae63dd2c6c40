//! Shared memory as this fabric's protocols use it, and its layout.

use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicU64, fence};

use rpcrdma_mempool::{PeerMapping, PeerRing, PeerRings, prefetch};

use super::doorbell::Doorbell;
use super::ring::{Consumer, Producer};

/// A word that another process maps too.
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
    /// Acquire-release exchange of the word with itself. It returns the current value, in one order with the other
    /// side's exchanges.
    fn newest(&self) -> u64;
    /// A fence between a store and a load of another word. If both sides use it, at least one sees the other's store.
    fn settle();
}

/// The lines in front of the rings, counted around.
pub(super) trait Lines {
    /// The word type.
    type Word: Word;
    /// The first two words of a line.
    fn words(&self, line: usize) -> (&Self::Word, &Self::Word);
}

/// A ring in such memory. Positions count its bytes since the beginning, and wrap; words are aligned to 8.
pub(super) trait RingMemory {
    /// The word type.
    type Word: Word;
    /// The word at a position.
    fn word(&self, position: u64) -> &Self::Word;
    /// Copies bytes out. False, with nothing copied, if the ring is shorter.
    #[must_use = "false means that nothing was copied"]
    fn read(&self, position: u64, to: &mut [u8]) -> bool;
    /// Copies bytes in. False, with nothing copied, if the ring is shorter.
    #[must_use = "false means that nothing was copied"]
    fn write(&self, position: u64, from: &[u8]) -> bool;
    /// Has the line at a position fetched.
    fn prefetch(&self, position: u64);
}

impl Word for AtomicU64 {
    #[inline(always)]
    fn acquire(&self) -> u64 {
        self.load(Acquire)
    }

    #[inline(always)]
    fn get(&self) -> u64 {
        self.load(Relaxed)
    }

    #[inline(always)]
    fn set(&self, value: u64) {
        self.store(value, Relaxed);
    }

    #[inline(always)]
    fn publish(&self, value: u64) {
        self.store(value, Release);
    }

    #[inline(always)]
    fn exchange(&self, value: u64) -> u64 {
        self.swap(value, AcqRel)
    }

    #[inline(always)]
    fn newest(&self) -> u64 {
        self.fetch_and(u64::MAX, AcqRel)
    }

    #[inline(always)]
    fn settle() {
        fence(SeqCst);
    }
}

impl Lines for PeerRings {
    type Word = AtomicU64;

    #[inline(always)]
    fn words(&self, line: usize) -> (&AtomicU64, &AtomicU64) {
        let [first, second, ..] = self.line(line);
        (first, second)
    }
}

impl RingMemory for PeerRing<'_> {
    type Word = AtomicU64;

    #[inline(always)]
    fn word(&self, position: u64) -> &AtomicU64 {
        PeerRing::word(self, position)
    }

    #[inline(always)]
    fn read(&self, position: u64, to: &mut [u8]) -> bool {
        PeerRing::read(self, position, to)
    }

    #[inline(always)]
    fn write(&self, position: u64, from: &[u8]) -> bool {
        PeerRing::write(self, position, from)
    }

    #[inline(always)]
    fn prefetch(&self, position: u64) {
        prefetch::<1, _>(PeerRing::word(self, position));
    }
}

/// The two sides of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Side {
    /// Made the rings.
    Connector,
    /// Maps them.
    Acceptor,
}

/// Bytes of the lines before the rings.
const LINES: usize = 4096;
/// Initial bytes of a ring, at most a quarter of its maximum. It holds a few short messages.
const FIRST_BYTES: u32 = 2048;
/// Distance of lines with different writers: processors fetch lines in pairs.
const APART: usize = 2;

/// Memory layout of a connection: page of lines, connector's ring, acceptor's ring.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    pub(super) ring_bytes: u32,
}

impl Layout {
    /// With rings that grow up to this size, a power of two.
    pub(super) fn new(ring_bytes: u32) -> Self {
        Self { ring_bytes }
    }

    /// Size of it all.
    pub(super) fn bytes(self) -> usize {
        LINES + 2 * self.ring_bytes as usize
    }

    /// Bytes of one ring at first.
    pub(super) fn first_bytes(self) -> u32 {
        FIRST_BYTES.min(self.ring_bytes / 4)
    }

    /// Start of the ring that this side sends into.
    pub(super) fn ring(self, from: Side) -> usize {
        LINES + if from == Side::Connector { 0 } else { self.ring_bytes as usize }
    }

    /// Lays out the ring of a sending side, with its initial bytes. False if it does not fit.
    pub(super) fn lay_tx(self, rings: &mut PeerRings, of: Side, bytes: u32) -> bool {
        rings.lay_tx(self.ring(of), bytes as usize)
    }

    /// The same of the ring that it takes from.
    pub(super) fn lay_rx(self, rings: &mut PeerRings, of: Side, bytes: u32) -> bool {
        rings.lay_rx(self.ring(of.other()), bytes as usize)
    }

    /// This side's rings of this layout, before they have grown.
    pub(super) fn rings(self, memory: PeerMapping, of: Side) -> Result<PeerRings, String> {
        let len = memory.len();
        let fits = self.bytes() <= len;
        let rings = PeerRings::new(memory, self.ring(of), self.ring(of.other()), self.first_bytes() as usize);
        rings
            .filter(|_| fits)
            .ok_or_else(|| format!("rings of {} bytes do not fit memory of {len} bytes", self.ring_bytes))
    }

    /// The end that sends into such a ring.
    pub(super) fn producer(self) -> Producer {
        Producer::new(self.first_bytes(), self.ring_bytes)
    }

    /// The end that takes from it messages up to this length.
    pub(super) fn consumer(self, max_message: u32) -> Consumer {
        Consumer::new(self.first_bytes(), self.ring_bytes, max_message)
    }

    /// The line for this side's progress in the other's ring, and its refusal of a record.
    pub(super) fn report(self, by: Side) -> usize {
        if by == Side::Connector { 0 } else { APART }
    }

    /// This side's bell.
    pub(super) fn bell(self, of: Side) -> Doorbell {
        Doorbell(if of == Side::Connector { 2 * APART } else { 3 * APART })
    }
}

impl Side {
    /// The other one.
    pub(super) fn other(self) -> Self {
        if self == Self::Connector { Self::Acceptor } else { Self::Connector }
    }
}
