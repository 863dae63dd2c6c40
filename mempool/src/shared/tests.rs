use std::sync::atomic::Ordering;
use std::thread;

use rustix::fs::MemfdFlags;

use super::*;
use crate::error::MemErrorCause;
use crate::{Arena, ArenaConfig, PagePolicy};

fn memfd(bytes: u64, seals: SealFlags) -> OwnedFd {
    let fd = rustix::fs::memfd_create("peer", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&fd, bytes).unwrap();
    rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
    fd
}

fn refusal(fd: OwnedFd) -> String {
    match PeerMapping::map(fd, 1 << 20) {
        Err(error) if matches!(*error.0, MemErrorCause::Invalid(_)) => error.to_string(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn both_sides_see_the_same_bytes() {
    let ours = SharedMapping::create(5000, "ring").unwrap();
    assert_eq!(ours.len(), 8192);
    let theirs = PeerMapping::map(ours.fd().try_clone_to_owned().unwrap(), 8192).unwrap();
    assert_eq!(theirs.len(), 8192);
    assert!(ours.write(8190, b"ab"));
    let mut seen = [0; 3];
    assert!(theirs.read(8189, &mut seen));
    assert_eq!(seen, *b"\0ab");
    ours.line(64).unwrap()[1].store(7, Ordering::Release);
    let other = thread::spawn(move || {
        assert_eq!(theirs.line(64).unwrap()[1].load(Ordering::Acquire), 7);
        theirs.line(64).unwrap()[7].store(9, Ordering::Release);
    });
    other.join().unwrap();
    assert_eq!(ours.line(64).unwrap()[7].load(Ordering::Acquire), 9);
    assert!(ours.read(64 + 56, &mut seen));
    assert_eq!(seen, [9, 0, 0]);
}

#[test]
fn an_arena_can_be_mapped_by_a_peer() {
    let config = ArenaConfig { bytes: 4096, pages: PagePolicy::Small, ..ArenaConfig::default() };
    let arena = Arena::new(&config).unwrap();
    let pool = crate::Pool::in_arena(arena.clone(), &[crate::Class { size: 64, count: 4 }]).unwrap();
    let mut buf = pool.alloc(3).unwrap();
    buf.copy_from_slice(b"abc");
    let lent = buf.lend().unwrap();
    let peer = PeerMapping::map(arena.fd().unwrap().try_clone_to_owned().unwrap(), arena.len()).unwrap();
    let mut seen = [0; 3];
    assert!(peer.read(lent.offset(), &mut seen));
    assert_eq!(seen, *b"abc");
    assert!(peer.write(lent.offset() + 1, b"X"));
    assert_eq!(*lent.reclaim().unwrap(), *b"aXc");
}

#[test]
fn every_access_is_bounded() {
    let map = SharedMapping::create(4096, "bounds").unwrap();
    let mut byte = [0; 1];
    for offset in [4096, 4097, usize::MAX, usize::MAX - 1, isize::MAX as usize] {
        assert!(!map.read(offset, &mut byte) && !map.write(offset, &byte), "{offset}");
        assert!(map.line(offset).is_none());
    }
    assert!(map.read(4095, &mut byte) && map.write(4095, &byte));
    assert!(map.read(4096, &mut []) && !map.read(4097, &mut []));
    assert!(!map.read(4095, &mut [0; 2]) && !map.write(0, &[0; 4097]));
    assert!(map.line(4032).is_some() && map.line(8).is_none() && map.line(4088).is_none());
    for bytes in [0, usize::MAX] {
        assert!(
            matches!(SharedMapping::create(bytes, "none"), Err(error) if matches!(*error.0, MemErrorCause::Invalid(_)))
        );
    }
}

#[test]
fn memory_that_could_shrink_is_refused() {
    assert!(refusal(memfd(4096, SealFlags::empty())).contains("F_SEAL_SHRINK"));
    assert!(refusal(memfd(4096, SealFlags::GROW | SealFlags::SEAL)).contains("F_SEAL_SHRINK"));
    let file = std::fs::File::open("/proc/self/exe").unwrap();
    assert!(refusal(file.into()).contains("not a memfd"));
}

#[test]
fn too_long_or_empty_memory_is_refused() {
    for bytes in [0, (1 << 20) + 1, 1 << 50] {
        let text = refusal(memfd(bytes, SealFlags::SHRINK));
        assert!(text.contains(&format!("{bytes} bytes")) && text.contains("1048576"), "{text}");
    }
    assert_eq!(PeerMapping::map(memfd(1 << 20, SealFlags::SHRINK), 1 << 20).unwrap().len(), 1 << 20);
}

#[test]
fn read_only_memory_is_refused() {
    let text = refusal(memfd(4096, SealFlags::SHRINK | SealFlags::WRITE));
    assert!(text.contains("open for writing"), "{text}");
}

/// A descriptor of hugetlb memory needs no free page.
#[test]
fn pages_that_the_peer_can_take_back_are_refused() {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
    let Ok(fd) = rustix::fs::memfd_create("peer", flags) else {
        eprintln!("this kernel has no hugetlb memory: nothing to refuse");
        return;
    };
    rustix::fs::ftruncate(&fd, 2 << 20).unwrap();
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK).unwrap();
    let again = fd.try_clone().unwrap();
    assert!(refusal(fd).contains("hugetlb"));
    // Trusted memory is mapped if a page is free, and an error otherwise.
    match PeerMapping::map_trusted(again, 2 << 20) {
        Ok(map) => assert_eq!(map.len(), 2 << 20),
        Err(error) => assert!(matches!(*error.0, MemErrorCause::System { call: "mmap", .. }), "{error}"),
    }
}
