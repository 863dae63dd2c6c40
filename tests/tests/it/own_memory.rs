#![expect(unsafe_code, reason = "gives the engine memory that the tests have mapped")]
//! Memory mapped by the application, and servers that send from it.

use std::ffi::c_void;
use std::fs::File;
use std::io::Write;
use std::ptr::{NonNull, null_mut};

use rpcrdma::fabric::{Fabric, FabricError, FabricErrorKind};
use rpcrdma_mempool::{ExternalMemory, Frozen};
use rpcrdma_tests::prelude::*;
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};

pub(super) const PAGE: usize = 4096;
/// Bytes of an arena, one hugetlb page.
const LEN: usize = 2 << 20;
/// A procedure that returns a page of the application's memory.
const GET_PAGE: u32 = 20;

/// A mapping of the application, whose drop unmaps it and sets a flag.
struct Mapping {
    base: NonNull<u8>,
    len: usize,
    unmapped: Arc<AtomicBool>,
}

// SAFETY: a mapping belongs to the process, so any thread may use and unmap it.
unsafe impl Send for Mapping {}
// SAFETY: a shared reference gives no access to the mapping.
unsafe impl Sync for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the owner drops the mapping once nothing uses it any more.
        unsafe { munmap(self.base.as_ptr().cast(), self.len) }.expect("munmap");
        self.unmapped.store(true, Ordering::SeqCst);
    }
}

impl Mapping {
    /// An anonymous mapping, in 2 MiB hugetlb pages or in small ones.
    fn anonymous(bytes: usize, pages: MapFlags) -> rustix::io::Result<Self> {
        // SAFETY: without MAP_FIXED the mapping overlaps no other.
        let base =
            unsafe { mmap_anonymous(null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | pages) };
        Ok(Self::new(base?, bytes))
    }

    /// A shared mapping of a file of `bytes` bytes.
    fn of_file(file: &File, bytes: usize) -> rustix::io::Result<Self> {
        // SAFETY: without MAP_FIXED the mapping overlaps no other.
        let base = unsafe { mmap(null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, file, 0) };
        Ok(Self::new(base?, bytes))
    }

    fn new(base: *mut c_void, len: usize) -> Self {
        Self { base: NonNull::new(base.cast()).expect("no mapping is at 0"), len, unmapped: Arc::default() }
    }

    /// Returns an arena over the mapping, and a flag that its unmapping sets.
    fn into_arena(self) -> (Arena, Arc<AtomicBool>) {
        let (base, len, unmapped) = (self.base, self.len, Arc::clone(&self.unmapped));
        // SAFETY: the memory stays mapped until its drop, and nothing else changes it: the file is neither written nor
        // truncated.
        let memory = unsafe { ExternalMemory::new(base, len, self) }.expect("a mapping");
        (memory.into_arena("own"), unmapped)
    }
}

/// Returns an arena over an anonymous mapping in small pages, and a flag that its unmapping sets.
pub(super) fn own_arena(bytes: usize) -> (Arena, Arc<AtomicBool>) {
    Mapping::anonymous(bytes, MapFlags::empty()).expect("memory").into_arena()
}

fn request_page(client: &mut LocalClient, token: u64) {
    client.send_call(token, |client| client.prepare_chunked_call(GET_PAGE, b"", &[], &[PAGE]));
}

/// All shards and workers send pages that one thread has filled.
#[test]
fn any_shard_sends_memory_mapped_by_the_application() {
    assert_page_sent(World::new("mapped"), own_arena(LEN), |page| pattern(7, page));
}

#[test]
fn results_are_sent_from_hugetlb_pages() {
    let world = World::new("hugetlb");
    match Mapping::anonymous(LEN, MapFlags::HUGETLB | MapFlags::HUGE_2MB) {
        Ok(mapping) => assert_page_sent(world, mapping.into_arena(), |page| pattern(7, page)),
        Err(error) => println!("not run: no hugetlb pages ({error}; sysctl vm.nr_hugepages)"),
    }
}

/// The server sends data that was written to a file. No buffer holds a copy.
#[test]
fn results_are_sent_from_a_memfd() {
    let world = World::new("memfd");
    let mut file = File::from(memfd_create("own", MemfdFlags::CLOEXEC).expect("a memfd"));
    let page = data_of(7, PAGE);
    for _ in 0..LEN / PAGE {
        file.write_all(&page).expect("memory");
    }
    let mapping = Mapping::of_file(&file, LEN).expect("a mapping");
    drop(file);
    assert_page_sent(world, mapping.into_arena(), |_| {});
}

/// Checks that a server sends a page of the application's memory to four clients. `fill` writes pattern 7 unless the
/// memory already holds it.
fn assert_page_sent(mut world: World, (arena, unmapped): (Arena, Arc<AtomicBool>), fill: impl Fn(&mut [u8])) {
    let pool = Pool::of_pages(arena.clone(), Class { size: PAGE, count: 4 }).unwrap();
    let mut page = pool.alloc(PAGE).unwrap();
    fill(&mut page);
    let page = Mutex::new(page.freeze());
    let send_page = move |call: &mut ServerCall| Ok(call.set_result(0, page.lock().unwrap().clone())?);
    let procedure = Procedure::new(send_page).write_chunks(1, PAGE).results_from_handler();
    let services = standard_and([(GET_PAGE, procedure.on_workers())]);
    let shard = small_config().with(|c| c.memory.arenas = vec![arena]);
    let address = world.serve_with(ServerConfig { shards: 2, ..shard.with_workers(2) }, services);
    let mut clients: Vec<_> = (0..4).map(|_| world.client(&address, small_config())).collect();
    for client in &mut clients {
        request_page(client, 0);
        client.for_each_completion(1, |done| {
            assert!(has_pattern(7, done.result.expect("a page").chunk(0).expect("a chunk")))
        });
    }
    let served = world.server().stats();
    assert!(test_fabric::on_device() || served.iter().all(|shard| shard.calls > 0), "{served:?}");
    drop((clients, pool));
    assert!(!unmapped.load(Ordering::SeqCst), "the server still uses the memory");
    world.assert_server_clean();
    drop(world.take_server());
    assert!(unmapped.load(Ordering::SeqCst), "the memory is unmapped with the server");
}

/// The application has dropped its arena and its pool. The call keeps the memory of its results until they were sent.
#[test]
fn a_call_keeps_the_memory_that_it_sends() {
    let mut world = World::new("kept");
    let (arena, unmapped) = own_arena(PAGE);
    let shard = small_config().with(|c| {
        c.memory.arenas = vec![arena.clone()];
        // Checks of the peers' obligations would ask the device about all Sends.
        c.timeouts.progress = Duration::from_secs(3600);
    });
    let (send_call, calls) = channel();
    let deferred = Procedure::deferred(move |call| send_call.send(call).expect("the test waits"));
    let mut services = Services::new();
    services.add(PROGRAM, VERSION, GET_PAGE, deferred.write_chunks(1, PAGE).results_from_handler());
    let address = world.serve_with(shard, services);
    let mut client = world.client(&address, small_config());
    request_page(&mut client, 0);
    client.flush();
    let mut call = calls.recv().expect("the call");
    let pool = Pool::of_pages(arena, Class { size: PAGE, count: 1 }).unwrap();
    let mut page = pool.alloc(PAGE).unwrap();
    pattern(3, &mut page);
    // The owner is released once the page was sent, even if no further call follows on the connection.
    let owner = Arc::new(());
    let page: Frozen = page.freeze().with_owner(Arc::clone(&owner));
    drop(pool);
    call.set_result(0, page).expect("a chunk for the page");
    assert_eq!(Arc::strong_count(&owner), 2);
    call.answer(Ok(()));
    client.for_each_completion(1, |done| {
        assert!(has_pattern(3, done.result.expect("a page").chunk(0).expect("a chunk")))
    });
    client.poll_until(|_| Arc::strong_count(&owner) == 1);
    drop((client, calls));
    world.assert_server_clean();
    drop(world.take_server());
    assert!(unmapped.load(Ordering::SeqCst));
}

/// Peers of the software fabric map exposed memory by its descriptor; an anonymous mapping has none.
#[test]
fn memory_that_peers_cannot_map_is_not_registered_for_them() {
    let _world = World::new("not-shown");
    let (arena, _) = own_arena(PAGE);
    let mut fabric = test_fabric::open(&test_fabric::new_address("not-shown"));
    let registered = fabric.register(&arena, Access::REMOTE_READ);
    if test_fabric::on_device() {
        return assert_eq!(registered, Ok(()), "a device registers any pages");
    }
    assert_eq!(registered.as_ref().map_err(FabricError::kind), Err(FabricErrorKind::Unsupported));
    assert!(registered.unwrap_err().to_string().contains("`ArenaConfig::build`"), "the error names the remedy");
    assert_eq!(fabric.register(&arena, Access::LOCAL), Ok(()), "local access needs no descriptor");
}
