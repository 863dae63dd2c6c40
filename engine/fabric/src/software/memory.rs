//! Shared memory as the protocols of this fabric see it, and where things lie in it.

use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicU64, fence};

use rpcrdma_mempool::{PeerMapping, PeerRing, PeerRings, prefetch};

use super::doorbell::Doorbell;
use super::ring::{Consumer, Producer};

/// Words and bytes that another process maps too. Offsets are in bytes; words are aligned to 8.
///
/// Offsets were checked against the mapping's size when it was made; one that is out of it reads as zero and
/// writes nothing.
pub(super) trait Memory {
    /// Acquire load: pairs with [`publish`](Self::publish) of the other side.
    fn load(&self, at: usize) -> u64;
    /// Load of a word that an acquire before has made valid.
    fn load_relaxed(&self, at: usize) -> u64;
    /// Store that a later [`publish`](Self::publish) makes visible.
    fn store_relaxed(&self, at: usize, value: u64);
    /// Release store: pairs with [`load`](Self::load) of the other side.
    fn publish(&self, at: usize, value: u64);
    /// Acquire-release exchange.
    fn swap(&self, at: usize, value: u64) -> u64;
    /// Between a store and a load of another word: of two sides that both do this, one at least sees the
    /// other's store.
    fn settle(&self);
    /// Acquire-release exchange of the word for itself: what is there now, in one order with the other side's
    /// exchanges.
    fn newest(&self, at: usize) -> u64;
}

/// A ring in such memory. Positions count its bytes since the beginning, and wrap; words are aligned to 8.
pub(super) trait RingMemory {
    /// Acquire load: pairs with [`publish`](Self::publish) of the other side.
    fn load(&self, position: u64) -> u64;
    /// Load of a word that an acquire before has made valid.
    fn load_relaxed(&self, position: u64) -> u64;
    /// Store that a later [`publish`](Self::publish) makes visible.
    fn store_relaxed(&self, position: u64, value: u64);
    /// Release store: pairs with [`load`](Self::load) of the other side.
    fn publish(&self, position: u64, value: u64);
    /// Copies bytes out, no more than the ring has.
    fn read(&self, position: u64, to: &mut [u8]);
    /// Copies bytes in, no more than the ring has.
    fn write(&self, position: u64, from: &[u8]);
    /// Has the line at a position fetched.
    fn prefetch(&self, position: u64);
}

impl Memory for PeerMapping {
    #[inline]
    fn load(&self, at: usize) -> u64 {
        self.atomic_u64(at).map_or(0, |w| w.load(Acquire))
    }

    #[inline]
    fn load_relaxed(&self, at: usize) -> u64 {
        self.atomic_u64(at).map_or(0, |w| w.load(Relaxed))
    }

    #[inline]
    fn store_relaxed(&self, at: usize, value: u64) {
        word(self, at, |w| w.store(value, Relaxed));
    }

    #[inline]
    fn publish(&self, at: usize, value: u64) {
        word(self, at, |w| w.store(value, Release));
    }

    #[inline]
    fn swap(&self, at: usize, value: u64) -> u64 {
        self.atomic_u64(at).map_or(0, |w| w.swap(value, AcqRel))
    }

    #[inline]
    fn settle(&self) {
        fence(SeqCst);
    }

    #[inline]
    fn newest(&self, at: usize) -> u64 {
        self.atomic_u64(at).map_or(0, |w| w.fetch_and(u64::MAX, AcqRel))
    }
}

impl RingMemory for PeerRing<'_> {
    #[inline(always)]
    fn load(&self, position: u64) -> u64 {
        self.word(position).load(Acquire)
    }

    #[inline(always)]
    fn load_relaxed(&self, position: u64) -> u64 {
        self.word(position).load(Relaxed)
    }

    #[inline(always)]
    fn store_relaxed(&self, position: u64, value: u64) {
        self.word(position).store(value, Relaxed);
    }

    #[inline(always)]
    fn publish(&self, position: u64, value: u64) {
        self.word(position).store(value, Release);
    }

    #[inline(always)]
    fn read(&self, position: u64, to: &mut [u8]) {
        let all = PeerRing::read(self, position, to);
        debug_assert!(all, "{} bytes at {position}", to.len());
    }

    #[inline(always)]
    fn write(&self, position: u64, from: &[u8]) {
        let all = PeerRing::write(self, position, from);
        debug_assert!(all, "{} bytes at {position}", from.len());
    }

    #[inline(always)]
    fn prefetch(&self, position: u64) {
        prefetch::<1, _>(self.word(position));
    }
}

#[inline]
fn word(mapping: &PeerMapping, at: usize, act: impl FnOnce(&AtomicU64)) {
    match mapping.atomic_u64(at) {
        Some(word) => act(word),
        None => debug_assert!(false, "no word at {at}"),
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
/// Bytes that a ring begins with, at most a quarter of those that it may have: enough for a few short messages at a
/// time.
const FIRST_BYTES: u32 = 2048;
/// Lines that different sides write are this far apart: processors fetch lines in pairs.
const APART: usize = 128;

/// Where everything lies in the memory of one connection: a page of lines, the connector's ring, the
/// acceptor's.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    ring_bytes: u32,
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

    /// Most bytes of one ring.
    pub(super) fn ring_bytes(self) -> u32 {
        self.ring_bytes
    }

    /// Bytes of one ring at first.
    pub(super) fn first_bytes(self) -> u32 {
        FIRST_BYTES.min(self.ring_bytes / 4)
    }

    /// Where the ring begins that this side sends into.
    pub(super) fn ring(self, from: Side) -> usize {
        LINES + if from == Side::Connector { 0 } else { self.ring_bytes as usize }
    }

    /// Lays the ring that a side sends into out so, with so many bytes for now. False if it does not fit.
    pub(super) fn lay_tx(self, rings: &mut PeerRings, of: Side, bytes: u32) -> bool {
        rings.lay_tx(self.ring(of), bytes as usize)
    }

    /// The same of the ring that it takes from.
    pub(super) fn lay_rx(self, rings: &mut PeerRings, of: Side, bytes: u32) -> bool {
        rings.lay_rx(self.ring(of.other()), bytes as usize)
    }

    /// The rings of memory that is laid out so, as this side has them, before they have grown.
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

    /// The end that takes from it.
    pub(super) fn consumer(self) -> Consumer {
        Consumer::new(self.first_bytes(), self.ring_bytes)
    }

    /// Two words in which this side says how far it has come in the other's ring, and whether it refused the
    /// record there.
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
