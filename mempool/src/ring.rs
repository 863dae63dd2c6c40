#![expect(unsafe_code, reason = "words and bytes of memory that another process maps")]
//! Rings of bytes in memory that another process maps too.

use std::marker::PhantomData;
use std::ops::Deref;
use std::ptr::{self, NonNull};
use std::sync::atomic::AtomicU64;

use crate::shared::{Line, PeerMapping};

/// A mapping with two rings behind a page of cache lines.
///
/// The layout is checked once. Every position lies in a ring and every line in the page, so accesses need no further
/// check.
#[derive(Debug)]
pub struct PeerRings {
    places: [RingPlace; 2],
    lines: NonNull<[Line; LINES]>,
    mapping: PeerMapping,
}

/// Cache lines of the page at the start.
const LINES: usize = 64;

/// The place of a ring in a mapping, which must outlive it.
#[derive(Clone, Copy, Debug)]
struct RingPlace {
    /// First byte: aligned to 8.
    base: NonNull<u8>,
    /// The ring's length less 1. The length is a power of two of at least 64.
    mask: usize,
}

impl RingPlace {
    fn new(mapping: &PeerMapping, at: usize, bytes: usize) -> Option<Self> {
        let fits = bytes.is_power_of_two() && bytes >= 64 && (at.is_multiple_of(bytes) || at.is_multiple_of(4096));
        mapping.at(at, bytes).filter(|_| fits).map(|base| Self { base, mask: bytes - 1 })
    }
}

// SAFETY: the places and the lines point into the mapping, which is Send and moves with them.
unsafe impl Send for PeerRings {}

impl PeerRings {
    /// Rings of `bytes` bytes at bytes `tx` and `rx` of a mapping. `bytes` must be a power of two of at least 64. Both
    /// rings must begin at a multiple of `bytes` or of 4096, in a mapping of at least a page. Otherwise `None`.
    pub fn new(mapping: PeerMapping, tx: usize, rx: usize, bytes: usize) -> Option<Self> {
        let places = [RingPlace::new(&mapping, tx, bytes)?, RingPlace::new(&mapping, rx, bytes)?];
        let lines = mapping.at(0, size_of::<[Line; LINES]>())?.cast();
        Some(Self { places, lines, mapping })
    }

    /// Line `n`, modulo 64, of the page at the mapping's start. The peer may store anything into it.
    #[inline]
    pub fn line(&self, n: usize) -> &Line {
        // SAFETY: `new` found that many bytes there. Mappings start at a page, and this one lives as long as `self`.
        // The words are as in `PeerRing::word`.
        let lines = unsafe { self.lines.as_ref() };
        &lines[n % LINES]
    }

    /// Moves the ring `tx`, by the rules of [`new`](Self::new).
    ///
    /// False, with nothing changed, if the rules forbid the place.
    #[must_use = "false means that nothing was changed"]
    pub fn move_tx(&mut self, at: usize, bytes: usize) -> bool {
        self.move_ring(0, at, bytes)
    }

    /// Moves the ring `rx`, by the rules of [`new`](Self::new).
    ///
    /// False, with nothing changed, if the rules forbid the place.
    #[must_use = "false means that nothing was changed"]
    pub fn move_rx(&mut self, at: usize, bytes: usize) -> bool {
        self.move_ring(1, at, bytes)
    }

    fn move_ring(&mut self, ring: usize, at: usize, bytes: usize) -> bool {
        let Some(place) = RingPlace::new(&self.mapping, at, bytes) else { return false };
        self.places[ring] = place;
        true
    }

    /// The ring at `tx`.
    #[inline]
    pub fn tx(&self) -> PeerRing<'_> {
        PeerRing { place: self.places[0], _mapping: PhantomData }
    }

    /// The ring at `rx`.
    #[inline]
    pub fn rx(&self) -> PeerRing<'_> {
        PeerRing { place: self.places[1], _mapping: PhantomData }
    }
}

/// The whole mapping, with its lines and rings.
impl Deref for PeerRings {
    type Target = PeerMapping;

    #[inline]
    fn deref(&self) -> &PeerMapping {
        &self.mapping
    }
}

/// A ring of [`PeerRings`]. Positions count bytes and wrap at the ring's end.
#[derive(Clone, Copy, Debug)]
pub struct PeerRing<'a> {
    place: RingPlace,
    _mapping: PhantomData<&'a PeerMapping>,
}

impl<'a> PeerRing<'a> {
    /// The aligned 8-byte word that contains the byte at a position. The peer may store anything into it.
    #[inline(always)]
    pub fn word(&self, position: u64) -> &'a AtomicU64 {
        let offset = position as usize & self.place.mask & !7;
        // SAFETY: the offset is a multiple of 8 below the ring's length, which is also a multiple of 8.
        let word = unsafe { self.place.base.add(offset) }.cast::<AtomicU64>();
        // SAFETY: in bounds and aligned; any bits are valid. Shared memory is only ever accessed atomically or by
        // copies, which may see torn words. The mapping lives for 'a.
        unsafe { word.as_ref() }
    }

    /// Copies bytes out of the ring, from a position on. Returns false and copies nothing if the ring is smaller.
    #[inline(always)]
    #[must_use = "false means that nothing was copied"]
    pub fn read(&self, position: u64, to: &mut [u8]) -> bool {
        let at = position as usize & self.place.mask;
        if at + to.len() > self.place.mask + 1 {
            return self.read_wrapping(at, to);
        }
        // SAFETY: `at` is below the ring's length.
        let from = unsafe { self.place.base.add(at) };
        // SAFETY: that many bytes follow in the ring, checked above; no Rust slice refers to the mapping, so `to`
        // lies elsewhere.
        unsafe { ptr::copy_nonoverlapping(from.as_ptr(), to.as_mut_ptr(), to.len()) };
        true
    }

    /// Copies bytes into the ring, from a position on. Returns false and copies nothing if the ring is smaller.
    #[inline(always)]
    #[must_use = "false means that nothing was copied"]
    pub fn write(&self, position: u64, from: &[u8]) -> bool {
        let at = position as usize & self.place.mask;
        if at + from.len() > self.place.mask + 1 {
            return self.write_wrapping(at, from);
        }
        // SAFETY: `at` is below the ring's length.
        let to = unsafe { self.place.base.add(at) };
        // SAFETY: that many bytes follow in the ring, checked above; no reference to them exists, so `from`
        // lies elsewhere.
        unsafe { ptr::copy_nonoverlapping(from.as_ptr(), to.as_ptr(), from.len()) };
        true
    }

    /// Reads across the ring's end, out of line because this is rare.
    #[inline(never)]
    fn read_wrapping(self, at: usize, to: &mut [u8]) -> bool {
        if to.len() > self.place.mask + 1 {
            return false;
        }
        let Some((front, back)) = to.split_at_mut_checked(self.place.mask + 1 - at) else { return false };
        self.read(at as u64, front) && self.read(0, back)
    }

    #[inline(never)]
    fn write_wrapping(self, at: usize, from: &[u8]) -> bool {
        if from.len() > self.place.mask + 1 {
            return false;
        }
        let Some((front, back)) = from.split_at_checked(self.place.mask + 1 - at) else { return false };
        self.write(at as u64, front) && self.write(0, back)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::atomic::Ordering::Relaxed;

    use super::*;
    use crate::shared::SharedMapping;

    fn mapping(bytes: usize) -> PeerMapping {
        let shared = SharedMapping::create(bytes, "rings").unwrap();
        PeerMapping::map(shared.fd().try_clone_to_owned().unwrap(), bytes).unwrap()
    }

    #[test]
    fn rings_outside_of_their_mapping_or_misaligned_are_refused() {
        for (tx, rx, bytes) in [
            (0, 8192, 4096),
            (8192, 0, 4096),
            (0, usize::MAX - 4095, 4096),
            (0, 4096, 8192),
            (0, 4096, 3000),
            (0, 64, 32),
            (0, 40, 64),
            (4, 64, 64),
        ] {
            assert!(PeerRings::new(mapping(8192), tx, rx, bytes).is_none(), "{tx} {rx} {bytes}");
        }
        assert!(PeerRings::new(mapping(8192), 4096, 0, 4096).is_some());
    }

    #[test]
    fn every_position_lies_in_its_ring() {
        let rings = PeerRings::new(mapping(3 * 4096), 4096, 8192, 4096).unwrap();
        let ring = rings.tx();
        for position in [0u64, 7, 4088, 4095, 4096, 1 << 40, u64::MAX] {
            ring.word(position).store(0x0101_0101_0101_0101, Relaxed);
            let mut back = [0; 8];
            assert!(rings.read(4096 + (position as usize & 4095 & !7), &mut back));
            assert_eq!(back, [1; 8], "{position}");
            ring.word(position).store(0, Relaxed);
        }
        // Write across the end of the ring, and read a whole round.
        assert!(ring.write(4096 * 5 + 4090, &[2; 20]));
        let mut back = [0; 4096];
        assert!(ring.read(4090, &mut back));
        assert_eq!((back[..20].to_vec(), back[20..].iter().all(|&byte| byte == 0)), (vec![2; 20], true));
        let mut all = vec![0; 3 * 4096];
        assert!(rings.read(0, &mut all));
        assert!(
            all[..4096].iter().chain(&all[8192..]).all(|&byte| byte == 0),
            "nothing is written outside of the ring"
        );
        assert_eq!(all.iter().filter(|&&byte| byte == 2).count(), 20);
        assert!(!ring.read(0, &mut [0; 4097]) && !ring.write(1, &[3; 4097]));
        assert!(rings.rx().read(0, &mut back) && back == [0; 4096]);
    }
}
