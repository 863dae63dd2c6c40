#![expect(unsafe_code, reason = "maps memory as an application does")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use super::*;
use crate::error::MemErrorCause;
use crate::{Arena, ArenaConfig, Class, PagePolicy, Pool};

const PAGE: usize = 4096;

/// The application's owner of its memory; records its drop.
struct Mapping {
    base: NonNull<u8>,
    len: usize,
    dropped: Arc<AtomicBool>,
    unmap: fn(NonNull<u8>, usize),
}

// SAFETY: a mapping belongs to the process.
unsafe impl Send for Mapping {}
// SAFETY: nothing can be done with a reference.
unsafe impl Sync for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        self.dropped.store(true, Ordering::SeqCst);
        (self.unmap)(self.base, self.len);
    }
}

#[cfg(not(miri))]
fn anonymous(len: usize) -> Mapping {
    use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
    let rights = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: without MAP_FIXED it overlaps nothing.
    let base = unsafe { mmap_anonymous(std::ptr::null_mut(), len, rights, MapFlags::PRIVATE) }.unwrap();
    // SAFETY: no pointer into it exists any more.
    let unmap = |base: NonNull<u8>, len| unsafe { munmap(base.as_ptr().cast(), len) }.unwrap();
    Mapping { base: NonNull::new(base.cast()).unwrap(), len, dropped: Arc::default(), unmap }
}

#[cfg(miri)]
fn anonymous(len: usize) -> Mapping {
    use std::alloc::{Layout, alloc_zeroed, dealloc};
    // SAFETY: callers request at least one page.
    let base = unsafe { alloc_zeroed(Layout::from_size_align(len, PAGE).unwrap()) };
    // SAFETY: no pointer into it exists any more.
    let unmap = |base: NonNull<u8>, len| unsafe { dealloc(base.as_ptr(), Layout::from_size_align(len, PAGE).unwrap()) };
    Mapping { base: NonNull::new(base).unwrap(), len, dropped: Arc::default(), unmap }
}

fn arena(mapping: Mapping) -> Arena {
    let (base, len) = (mapping.base, mapping.len);
    // SAFETY: the memory is mapped until `mapping` is dropped, and not shared.
    Arena::from_external(unsafe { ExternalMemory::new(base, len, mapping) }.unwrap(), "external")
}

#[test]
fn the_owner_is_dropped_with_the_last_buffer() {
    let mapping = anonymous(4 * PAGE);
    let (base, dropped) = (mapping.base.addr().get(), Arc::clone(&mapping.dropped));
    let arena = arena(mapping);
    assert_eq!((arena.base_address(), arena.len()), (base, 4 * PAGE));
    assert_eq!(arena.report().to_string(), "arena external: 16 KiB that the application has mapped");
    assert!(arena.fd().is_none(), "peers cannot map it");
    let pool = Pool::of_pages(arena, Class { size: PAGE, count: 4 }).unwrap();
    let mut page = pool.alloc(10).unwrap();
    page.copy_from_slice(b"0123456789");
    let (kept, other) = (page.freeze(), pool.alloc(PAGE).unwrap());
    drop(pool);
    thread::spawn(move || drop(other)).join().unwrap();
    assert!(!dropped.load(Ordering::SeqCst), "one buffer is outstanding");
    let clone = kept.clone();
    drop(kept);
    thread::spawn(move || assert_eq!(*clone, *b"0123456789")).join().unwrap();
    assert!(dropped.load(Ordering::SeqCst), "that was the last buffer");
}

#[test]
fn pages_lie_at_multiples_of_their_size_beside_other_pools() {
    let arena = arena(anonymous(8 * PAGE));
    let odd = Pool::in_arena(arena.clone(), &[Class { size: 100, count: 3 }]).unwrap();
    let pool = Pool::of_pages(arena.clone(), Class { size: PAGE, count: 7 }).unwrap();
    let pages: Vec<_> = (0..7).map(|_| pool.alloc(PAGE).unwrap()).collect();
    let mut numbers: Vec<_> = pages.iter().map(|page| page.base_offset() / PAGE).collect();
    numbers.sort_unstable();
    assert_eq!(numbers, [1, 2, 3, 4, 5, 6, 7], "the first page has the other pool's buffers");
    assert!(pages.iter().all(|page| page.address().is_multiple_of(PAGE)));
    let full = Pool::of_pages(arena.clone(), Class { size: PAGE, count: 1 }).unwrap_err();
    assert!(matches!(*full.0, MemErrorCause::ArenaFull { .. }), "{full}");
    drop(odd);
    assert!(Pool::of_pages(arena.clone(), Class { size: PAGE, count: 1 }).is_ok());
    for (size, count, word) in [(0, 1, "0 bytes"), (100, 1, "multiple of 64"), (64, 0, "0 buffers")] {
        let error = Pool::of_pages(arena.clone(), Class { size, count }).unwrap_err().to_string();
        assert!(error.contains(word), "{error}");
    }
}

#[test]
fn invalid_ranges_are_refused() {
    let mapping = anonymous(PAGE);
    let base = mapping.base;
    // SAFETY: the memory is not shared, and not used.
    let empty = unsafe { ExternalMemory::new(base, 0, ()) };
    let inside = NonNull::new(base.as_ptr().wrapping_add(64)).unwrap();
    // SAFETY: the memory is not shared, and not used.
    let odd = unsafe { ExternalMemory::new(inside, 64, ()) };
    assert!(empty.unwrap_err().to_string().contains("0 bytes"));
    let error = odd.unwrap_err().to_string();
    assert!(error.contains(&format!("memory for an arena at {:#x}", base.addr().get() + 64)), "{error}");
    // SAFETY: the memory is not shared, and not used.
    let endless = unsafe { ExternalMemory::new(base, usize::MAX - (PAGE - 1), ()) };
    let error = endless.unwrap_err().to_string();
    assert!(error.contains("exceed the address space"), "{error}");
}

/// Bytes written to a buffer are in the application's memfd, whatever its pages are.
#[test]
#[cfg_attr(miri, ignore = "Miri has no memfds")]
fn a_memfd_of_the_application_works_as_an_arena() {
    for pages in [PagePolicy::Small, PagePolicy::Auto] {
        let config = ArenaConfig { bytes: 2 << 20, pages, name: "theirs", ..ArenaConfig::default() };
        let theirs = Arena::new(&config).unwrap();
        eprintln!("{}", theirs.report());
        let base = theirs.base();
        // SAFETY: the memory is mapped until its first arena is dropped, which has no pool.
        let ours = unsafe { ExternalMemory::new(base, theirs.len(), theirs.clone()) }.unwrap();
        let pool = Pool::of_pages(Arena::from_external(ours, "ours"), Class { size: PAGE, count: 512 }).unwrap();
        let mut page = pool.alloc(3).unwrap();
        page.copy_from_slice(b"abc");
        let (mut read, at) = ([0; 3], page.base_offset() as u64);
        rustix::io::pread(theirs.fd().unwrap(), &mut read, at).unwrap();
        assert_eq!(&read, b"abc");
    }
}
