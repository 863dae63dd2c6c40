use std::os::fd::AsRawFd;

use rustix::fs::SealFlags;

use super::*;

fn config(bytes: usize, pages: PagePolicy) -> ArenaConfig {
    ArenaConfig { bytes, pages, name: "arena-test", ..ArenaConfig::default() }
}

fn map_of(arena: &Arena) -> &RawMap {
    match &arena.0.memory {
        ArenaMemory::Memfd { map, .. } => map,
        ArenaMemory::External(_) => panic!("the arena is a memfd"),
    }
}

#[test]
fn an_arena_in_small_pages_is_rounded_up_and_has_no_advice() {
    let arena = Arena::new(&config(5000, PagePolicy::Small)).unwrap();
    assert_eq!(arena.len(), 8192);
    assert_eq!(arena.report().pages, Some(PageSize::Small));
    assert_eq!(arena.report().advice, None, "no larger pages were requested");
    assert_eq!(arena.report().to_string(), "arena arena-test: 8 KiB in 4 KiB pages, any NUMA node, prefaulted");
    let other = Arena::new(&config(1, PagePolicy::Small)).unwrap();
    assert_ne!(arena.id(), other.id());
    assert_ne!(arena.base_address(), other.base_address());
    assert_eq!(arena.clone().id(), arena.id());
}

#[test]
fn the_memfd_is_sealed() {
    let arena = Arena::new(&config(8192, PagePolicy::Small)).unwrap();
    let seals = rustix::fs::fcntl_get_seals(arena.fd().unwrap()).unwrap();
    assert!(seals.contains(SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL), "{seals:?}");
    assert!(rustix::fs::ftruncate(arena.fd().unwrap(), 0).is_err());
    assert!(rustix::fs::ftruncate(arena.fd().unwrap(), 1 << 20).is_err());
    let name = std::fs::read_link(format!("/proc/self/fd/{}", arena.fd().unwrap().as_raw_fd())).unwrap();
    assert!(name.to_string_lossy().contains("arena-test"), "{name:?}");
}

/// The host decides which pages the arena gets, and the report must match them.
#[test]
fn auto_reports_its_pages_and_a_remedy() {
    let bytes = 8 << 20;
    let arena = Arena::new(&config(bytes, PagePolicy::Auto)).unwrap();
    let report = arena.report();
    assert_eq!((report.bytes, report.prefaulted), (bytes, true));
    let line = report.to_string();
    assert!(!line.contains('\n'), "{line}");
    match report.pages.unwrap() {
        PageSize::Huge2M => {
            // Other processes may use such pages, too.
            let pool = HugePool::read(PageSize::Huge2M, None);
            assert!(pool.total - pool.free >= 4, "{line}");
        }
        PageSize::Transparent => assert!(host::huge_shmem_bytes(arena.base_address()) > 0, "{line}"),
        PageSize::Small => {
            assert_eq!(host::huge_shmem_bytes(arena.base_address()), 0);
            assert!(line.contains("4 pages are needed, ") && line.contains("nr_hugepages"), "{line}");
            if host::shmem_enabled() == "never" {
                assert!(line.contains("echo advise | sudo tee") && line.contains("shmem_enabled"), "{line}");
            }
        }
        PageSize::Huge1G => panic!("8 MiB do not fill a 1 GiB page: {line}"),
    }
}

#[test]
fn no_hugetlb_never_uses_hugetlb_pages() {
    let arena = Arena::new(&config(8 << 20, PagePolicy::NoHugetlb)).unwrap();
    let line = arena.report().to_string();
    assert!(!arena.report().pages.unwrap().is_hugetlb() && !line.contains("nr_hugepages"), "{line}");
    if host::shmem_enabled() == "never" {
        assert!(line.contains("; for transparent huge pages allow them: `echo advise"), "{line}");
    }
    crate::PeerMapping::map(arena.fd().unwrap().try_clone_to_owned().unwrap(), 8 << 20).unwrap();
}

#[test]
fn auto_does_not_waste_large_pages_on_small_arenas() {
    let arena = Arena::new(&config(64 << 10, PagePolicy::Auto)).unwrap();
    assert_eq!((arena.len(), arena.report().pages), (64 << 10, Some(PageSize::Small)));
    assert_eq!(arena.report().advice, None);
}

/// Requires 1000 pages more than are free.
#[test]
fn missing_pages_are_an_error_with_a_remedy() {
    for page in [PageSize::Huge2M, PageSize::Huge1G] {
        let bytes = ((HugePool::read(page, None).free + 1000) as usize) * page.bytes();
        let error = Arena::new(&config(bytes, PagePolicy::Require(page))).unwrap_err();
        let text = error.to_string();
        assert!(matches!(*error.0, MemErrorCause::HugePages { .. }), "{text}");
        for part in [&format!("of {bytes} bytes in {page} pages failed"), "pages are needed", "are free", "sudo tee"] {
            assert!(text.contains(part), "{text:?} must contain {part:?}");
        }
        // With `Auto`, missing pages are not an error, but the report names them.
        if page == PageSize::Huge2M && HugePool::read(page, None).total == 0 {
            let arena = Arena::new(&config(4 << 20, PagePolicy::Auto)).unwrap();
            assert!(matches!(arena.report().pages, Some(PageSize::Small | PageSize::Transparent)));
            assert!(arena.report().advice.as_ref().is_some_and(|advice| advice.contains("echo 2 |")));
        }
    }
}

#[test]
fn required_transparent_pages_are_allocated_or_an_error() {
    match Arena::new(&config(8 << 20, PagePolicy::Require(PageSize::Transparent))) {
        Ok(arena) => assert!(host::huge_shmem_bytes(arena.base_address()) > 0),
        Err(error) if matches!(*error.0, MemErrorCause::Transparent { .. }) => {
            assert!(error.to_string().contains(&host::shmem_enabled()), "{error}");
        }
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn nodes_that_are_not_online_are_an_error() {
    let on = |node| ArenaConfig { node: Some(node), ..config(64 << 10, PagePolicy::Small) };
    let arena = Arena::new(&on(0)).unwrap();
    assert_eq!(arena.report().node, Some(0));
    assert!(arena.report().to_string().contains("NUMA node 0"));
    let error = Arena::new(&on(4000)).unwrap_err();
    assert!(error.to_string().contains("NUMA node 4000: no such node"), "{error}");
}

#[test]
fn binding_reaches_the_kernel() {
    let arena = Arena::new(&config(64 << 10, PagePolicy::Small)).unwrap();
    if let Err(error) = map_of(&arena).bind(0) {
        assert_eq!(host::online_nodes(), "0", "{error}");
        eprintln!("mbind is not available here: {error}");
        return;
    }
    let start = format!("{:x} ", arena.base_address());
    let maps = std::fs::read_to_string("/proc/self/numa_maps").unwrap();
    let line = maps.lines().find(|line| line.starts_with(&start)).unwrap();
    assert!(line.contains(" bind:0 "), "{line}");
    // No machine has node 900, whose bit is beyond the first word of the node mask. The kernel must refuse it, instead
    // of reading past the mask.
    assert!(map_of(&arena).bind(900).is_err());
}

#[test]
fn only_prefault_allocates_pages_ahead_of_use() {
    let allocated = |arena: &Arena| rustix::fs::fstat(arena.fd().unwrap()).unwrap().st_blocks as usize * 512;
    let eager = Arena::new(&config(1 << 20, PagePolicy::Small)).unwrap();
    assert_eq!(allocated(&eager), 1 << 20);
    let lazy = Arena::new(&ArenaConfig { prefault: false, ..config(1 << 20, PagePolicy::Small) }).unwrap();
    assert_eq!(allocated(&lazy), 0);
    assert!(lazy.report().to_string().ends_with("not prefaulted"));
}

#[test]
fn impossible_sizes_are_errors() {
    let error = Arena::new(&config(0, PagePolicy::Auto)).unwrap_err();
    assert!(error.to_string().contains("0 bytes"), "{error}");
    for bytes in [usize::MAX, isize::MAX as usize, 1 << 62] {
        for pages in [PagePolicy::Small, PagePolicy::Auto] {
            let error = Arena::new(&config(bytes, pages)).unwrap_err();
            assert!(matches!(*error.0, MemErrorCause::System { .. } | MemErrorCause::Short { .. }), "{error}");
        }
    }
}

#[test]
fn ranges_are_allocated_first_fit_and_reused_when_freed() {
    let arena = Arena::new(&config(4096, PagePolicy::Small)).unwrap();
    assert_eq!([100, 200, 300].map(|bytes| arena.alloc_range(bytes, 1).unwrap()), [0, 100, 300]);
    arena.free_range(100);
    assert_eq!(arena.alloc_range(150, 1).unwrap(), 100);
    assert_eq!(arena.alloc_range(50, 1).unwrap(), 250);
    assert_eq!(arena.alloc_range(1, 1).unwrap(), 600);
    let full = arena.alloc_range(4096, 1).unwrap_err();
    assert!(matches!(*full.0, MemErrorCause::ArenaFull { free: 3495, .. }), "{full}");
    assert_eq!(arena.alloc_range(1024, 1024).unwrap(), 1024, "601 is not a multiple of 1024");
    assert_eq!(arena.alloc_range(300, 64).unwrap(), 640, "the gap in front of it is still free");
    let full = arena.alloc_range(2049, 1024).unwrap_err();
    assert!(matches!(*full.0, MemErrorCause::ArenaFull { free: 2048, .. }), "only from 2048 on: {full}");
}
