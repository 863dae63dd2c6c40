//! The software fabric between processes: data transfer and killed peers.
//!
//! The peer process is a second process of this test program, which runs only [`peer`].

use std::io::{BufRead, BufReader};
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use rpcrdma_fabric::software::{SoftwareConfig, SoftwareFabric};
use rpcrdma_fabric::{
    Access, Completion, ConnectParams, ControlEvent, Fabric, FabricAddress, FabricErrorKind, Opcode, Posting, QpId,
    RemoteMemory, Source, Status, WorkRequest,
};
use rpcrdma_mempool::{ArenaConfig, Buf, Class, Lent, PagePolicy, Pool, PoolConfig};
use rustix::process::{Resource, Rlimit};

/// Time-out of each awaited event.
const TIMEOUT: Duration = Duration::from_secs(20);
/// Environment variable with the function that the peer process runs.
const ROLE: &str = "FABRIC_PEER_ROLE";
/// Environment variable with the address that the peer process listens at or connects to.
const ADDRESS: &str = "FABRIC_PEER_ADDRESS";
/// Bytes of a buffer of exposed memory.
const SIZE: usize = 64 << 10;
/// Time for which the peer `scarce` lacks descriptors.
const SCARCE: Duration = Duration::from_millis(500);

/// Lets only one test run at a time, because tests count the descriptors of this process.
fn run_alone() -> MutexGuard<'static, ()> {
    static RUNNING: Mutex<()> = Mutex::new(());
    RUNNING.lock().unwrap_or_else(|e| e.into_inner())
}

/// Counts the open descriptors of this process. Returns the minimum of several counts, because the C library briefly
/// opens a file when a thread first allocates.
fn count_descriptors() -> usize {
    let check = |_| {
        std::thread::sleep(Duration::from_millis(1));
        std::fs::read_dir("/proc/self/fd").expect("/proc").count()
    };
    (0..10).map(check).min().unwrap_or(0)
}

/// Counts the mappings of shared memory in this process.
fn count_mappings() -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("/proc");
    maps.lines().filter(|l| l.contains("/memfd:")).count()
}

fn address(name: &str) -> FabricAddress {
    FabricAddress(format!("processes-{name}-{}", std::process::id()))
}

fn params() -> ConnectParams {
    ConnectParams { rnr_retry: ConnectParams::UNLIMITED_RNR_RETRY, ..ConnectParams::default() }
}

fn pattern(seed: u64, len: usize) -> Vec<u8> {
    (0..len as u64).map(|i| (seed.wrapping_mul(31) + i * 7) as u8).collect()
}

/// A fabric with its memory.
struct End {
    fabric: SoftwareFabric,
    pool: Pool,
    exposed: Pool,
    done: Vec<Completion>,
    events: Vec<ControlEvent>,
}

impl End {
    fn new() -> Self {
        let arena = || ArenaConfig { pages: PagePolicy::Small, prefault: false, ..ArenaConfig::default() };
        let pool = |size, count| {
            Pool::new(&PoolConfig { classes: vec![Class { size, count }], arena: arena() }).expect("a pool")
        };
        let (messages, exposed) = (pool(8192, 512), pool(SIZE, 16));
        let mut fabric = SoftwareFabric::new(SoftwareConfig::default()).expect("a fabric");
        fabric.register(messages.arena(), Access::LOCAL).expect("register");
        fabric.register(exposed.arena(), Access::REMOTE).expect("register");
        Self { fabric, pool: messages, exposed, done: Vec::new(), events: Vec::new() }
    }

    fn post_receives(&mut self, n: usize) {
        let mut bufs: Vec<Buf> = (0..n).map_while(|_| self.pool.alloc(8192)).collect();
        assert_eq!(self.fabric.post_recv(None, &mut bufs), n);
    }

    fn send(&mut self, qp: QpId, parts: &[&[u8]], invalidate: Option<u32>) -> bool {
        let bytes = parts.concat();
        let Some(mut buf) = self.pool.alloc(bytes.len()) else { return false };
        buf.copy_from_slice(&bytes);
        let wr = WorkRequest::Send { buf, invalidate, fence: false };
        self.fabric.post_send(qp, &mut vec![Posting { wr_id: 1, signaled: false, wr }]).is_ok()
    }

    fn lend(&self) -> Lent {
        self.exposed.alloc(SIZE).expect("memory").lend().expect("lend")
    }

    fn turn(&mut self) {
        self.fabric.poll_cq(&mut self.done, 64);
        self.fabric.poll_control(&mut self.events);
    }

    /// Takes the payload and the invalidated key of the next message. Reposts its Receive to the shared queue.
    fn take_message(&mut self, qp: QpId) -> Option<(Vec<u8>, Option<u32>)> {
        self.take_from(qp, None)
    }

    /// Takes the next message, and reposts its Receive to `queue`.
    fn take_from(&mut self, qp: QpId, queue: Option<QpId>) -> Option<(Vec<u8>, Option<u32>)> {
        let at = self.done.iter().position(|d| d.qp == qp && d.opcode == Opcode::Recv && d.status.is_ok())?;
        let done = self.done.remove(at);
        let buf = done.buf.expect("a message");
        let bytes = buf.to_vec();
        self.fabric.post_recv(queue, &mut vec![buf.into_buf()]);
        Some((bytes, done.invalidated))
    }

    fn poll_until<T>(&mut self, what: &str, mut check: impl FnMut(&mut Self) -> Option<T>) -> T {
        let start = Instant::now();
        loop {
            if let Some(found) = check(self) {
                return found;
            }
            assert!(
                start.elapsed() < TIMEOUT,
                "{what} within {TIMEOUT:?}: pending are {} completions and the events {:?}",
                self.done.len(),
                self.events
            );
            self.turn();
            // Both processes may share one core.
            std::thread::yield_now();
        }
    }

    fn connect(&mut self, to: &FabricAddress) -> QpId {
        let start = Instant::now();
        let qp = loop {
            match self.fabric.connect(to, &params()) {
                Ok(qp) => break qp,
                Err(error) if error.kind() == FabricErrorKind::Unreachable && start.elapsed() < TIMEOUT => {
                    std::thread::yield_now()
                }
                Err(error) => panic!("{error}"),
            }
        };
        self.wait_until_established(qp);
        qp
    }

    fn wait_until_established(&mut self, qp: QpId) {
        self.poll_until("the connection is established", |e| {
            let at =
                e.events.iter().position(|e| matches!(e, ControlEvent::Established { qp: id, .. } if *id == qp))?;
            Some(e.events.remove(at))
        });
    }

    fn has_ended(&mut self, qp: QpId) -> bool {
        self.events.iter().any(|e| matches!(e, ControlEvent::Disconnected { qp: id, .. } if *id == qp))
    }

    /// Sends a pattern and checks its echo.
    fn echo(&mut self, qp: QpId, seed: u64, len: usize) {
        let bytes = pattern(seed, len);
        assert!(self.send(qp, &[b"E", &bytes], None), "post");
        let (got, _) = self.poll_until("the echo", |e| e.take_message(qp));
        assert!(got == bytes, "the echo equals the sent bytes");
    }

    /// Checks that all memory returns to the pools.
    fn close(self) {
        let Self { fabric, pool, exposed, done, .. } = self;
        drop(done);
        drop(fabric);
        pool.close().expect("all message buffers are returned");
        exposed.close().expect("all exposed memory is returned");
    }
}

/// A peer process. The drop kills it.
struct Peer(Child);

impl Peer {
    fn start(role: &str, address: &FabricAddress) -> Self {
        let mut child = Command::new(std::env::current_exe().expect("the path of this program"))
            .args(["--ignored", "--exact", "processes::peer", "--nocapture", "--test-threads=1"])
            .env(ROLE, role)
            .env(ADDRESS, &address.0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("spawn");
        let mut lines = BufReader::new(child.stdout.take().expect("stdout")).lines();
        // The peer prints "ready" once it listens or is connected. Its later output is not read.
        let ready = lines.any(|line| line.expect("stdout").contains("ready"));
        assert!(ready, "the peer prints `ready`");
        Self(child)
    }

    fn kill(&mut self) {
        self.0.kill().expect("kill");
        self.0.wait().expect("wait");
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"))
}

fn transfer_request(kind: &[u8; 1], remote: RemoteMemory, len: usize, seed: u64) -> Vec<u8> {
    [
        &kind[..],
        &remote.rkey.to_le_bytes(),
        &remote.address.to_le_bytes(),
        &(len as u32).to_le_bytes(),
        &seed.to_le_bytes(),
    ]
    .concat()
}

/// The peer process. It runs until it is killed, or until the parent closes its standard input.
#[test]
#[ignore = "the peer process of the tests in this file"]
fn peer() {
    let (Ok(role), Ok(address)) = (std::env::var(ROLE), std::env::var(ADDRESS)) else {
        panic!("another test starts this one, with {ROLE} and {ADDRESS} set");
    };
    let address = FabricAddress(address);
    std::thread::spawn(exit_with_parent);
    match role.as_str() {
        "serve" => serve(&address),
        "storm" => storm(&address),
        "scarce" => serve_without_descriptors(&address),
        other => panic!("unknown role {other}"),
    }
}

/// Exits when the parent closes standard input, which carries no data.
fn exit_with_parent() {
    let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
    std::process::exit(0)
}

/// Listens, and serves requests: `E` echoes, `H` opens descriptors until none is free, `W` writes to the requester's
/// memory, and `R` reads it and sends the sum.
fn serve(address: &FabricAddress) -> ! {
    let mut end = End::new();
    let listener = SoftwareFabric::bind(address).expect("bind");
    end.fabric.listen(&listener).expect("listen");
    end.post_receives(256);
    println!("ready");
    run(end)
}

/// Serves with one free descriptor for `SCARCE`, and then with all.
fn serve_without_descriptors(address: &FabricAddress) -> ! {
    let mut end = End::new();
    let listener = SoftwareFabric::bind(address).expect("bind");
    end.fabric.listen(&listener).expect("listen");
    end.post_receives(256);
    let mut hoard = hoard_descriptors();
    // One descriptor suffices for the socket of a connection, but not for the two descriptors of its opening message.
    hoard.pop();
    println!("ready");
    let ready = Instant::now();
    while ready.elapsed() < SCARCE {
        end.turn();
        std::thread::yield_now();
    }
    drop(hoard);
    run(end)
}

/// Opens descriptors until none is free.
fn hoard_descriptors() -> Vec<OwnedFd> {
    let limit = rustix::process::getrlimit(Resource::Nofile);
    rustix::process::setrlimit(Resource::Nofile, Rlimit { current: Some(128), ..limit }).expect("a lower limit");
    std::iter::from_fn(|| std::io::stdin().as_fd().try_clone_to_owned().ok()).collect()
}

/// Serves the connections of a listener.
fn run(mut end: End) -> ! {
    let mut reads: Vec<(QpId, Lent, usize)> = Vec::new();
    let mut hoards = Vec::new();
    loop {
        end.turn();
        std::thread::yield_now();
        for event in std::mem::take(&mut end.events) {
            match event {
                ControlEvent::ConnectRequest { request, .. } => {
                    let _ = end.fabric.accept(request, &params());
                }
                ControlEvent::Disconnected { qp, .. } => end.fabric.destroy_qp(qp),
                _ => {}
            }
        }
        for done in std::mem::take(&mut end.done) {
            if done.opcode == Opcode::Read && done.status.is_ok() {
                let at = reads.iter().position(|r| r.0 == done.qp).expect("a read");
                let (qp, lent, len) = reads.remove(at);
                let mut bytes = vec![0; len];
                assert!(lent.read_at(0, &mut bytes));
                let sum: u64 = bytes.iter().map(|&b| u64::from(b)).sum();
                end.send(qp, &[&sum.to_le_bytes()], None);
            }
            let Some(buf) = done.buf else { continue };
            let bytes = buf.to_vec();
            end.fabric.post_recv(None, &mut vec![buf.into_buf()]);
            if !done.status.is_ok() {
                continue;
            }
            let qp = done.qp;
            if bytes[0] == b'H' {
                let hoard = hoard_descriptors();
                end.send(qp, &[&hoard.len().to_le_bytes()], None);
                hoards.push(hoard);
                continue;
            }
            if bytes[0] == b'E' {
                end.send(qp, &[&bytes[1..]], None);
                continue;
            }
            let remote = RemoteMemory { rkey: u32_at(&bytes, 1), address: u64_at(&bytes, 5) };
            let (len, seed) = (u32_at(&bytes, 13) as usize, u64_at(&bytes, 17));
            let mem = end.lend();
            let wr = if bytes[0] == b'W' {
                assert!(mem.write_at(0, &pattern(seed, len)));
                WorkRequest::Write { src: Source::Lent(mem), offset: 0, len, remote }
            } else {
                reads.push((qp, mem.clone(), len));
                WorkRequest::Read { dst: mem, offset: 0, len, remote }
            };
            let _ = end.fabric.post_send(qp, &mut vec![Posting { wr_id: 2, signaled: true, wr }]);
            if bytes[0] == b'W' {
                end.send(qp, &[b"written"], Some(remote.rkey));
            }
        }
    }
}

/// Connects, exposes memory with requests to write to it, and sends numbered messages without pause.
fn storm(address: &FabricAddress) -> ! {
    let mut end = End::new();
    end.post_receives(256);
    let qp = end.connect(address);
    println!("ready");
    let mut n = 0u64;
    loop {
        if let Ok(window) = end.fabric.alloc_window(qp) {
            let mem = end.exposed.alloc(SIZE).map(|b| b.lend().expect("lend"));
            if let Some(mem) = mem {
                let remote =
                    RemoteMemory { rkey: end.fabric.next_rkey(window), address: end.fabric.remote_address(&mem, 0) };
                let wr = WorkRequest::Bind { window, mem, offset: 0, len: SIZE, access: Access::REMOTE };
                let bind = Posting { wr_id: 3, signaled: false, wr };
                if end.fabric.post_send(qp, &mut vec![bind]).is_ok() {
                    end.send(qp, &[&transfer_request(b"W", remote, SIZE, 0)], None);
                }
            }
        }
        if end.send(qp, &[&(n + 1).to_le_bytes(), &pattern(n + 1, ((n + 1) * 131 % 4000) as usize)], None) {
            n += 1;
        }
        end.turn();
        end.done.clear();
    }
}

#[test]
fn messages_and_rdma_work_between_processes() {
    let _guard = run_alone();
    let before = count_descriptors();
    let to = address("data");
    let peer = Peer::start("serve", &to);
    let mut end = End::new();
    end.post_receives(64);
    let qp = end.connect(&to);
    for i in 0..2000u64 {
        end.echo(qp, i, (i as usize * 61) % 4096);
    }
    let window = end.fabric.alloc_window(qp).expect("window");
    for (i, len) in [1usize, 63, 64, 65, 4095, 4096, 4097, SIZE - 1, SIZE].into_iter().enumerate() {
        let mem = end.lend();
        let bind = |end: &mut End, access| {
            let remote =
                RemoteMemory { rkey: end.fabric.next_rkey(window), address: end.fabric.remote_address(&mem, 0) };
            let wr = WorkRequest::Bind { window, mem: mem.clone(), offset: 0, len, access };
            end.fabric.post_send(qp, &mut vec![Posting { wr_id: 5, signaled: false, wr }]).expect("bind");
            remote
        };
        let remote = bind(&mut end, Access::REMOTE_WRITE);
        end.send(qp, &[&transfer_request(b"W", remote, len, i as u64)], None);
        let (text, invalidated) = end.poll_until("the Write", |e| e.take_message(qp));
        assert_eq!((&text[..], invalidated), (&b"written"[..], Some(remote.rkey)));
        let mut got = vec![0; len];
        assert!(mem.read_at(0, &mut got));
        assert!(got == pattern(i as u64, len), "a Write of {len} bytes arrives complete");
        let remote = bind(&mut end, Access::REMOTE_READ);
        end.send(qp, &[&transfer_request(b"R", remote, len, 0)], None);
        let (sum, _) = end.poll_until("the Read", |e| e.take_message(qp));
        assert_eq!(u64_at(&sum, 0), got.iter().map(|&b| u64::from(b)).sum::<u64>(), "{len} bytes");
        let wr = WorkRequest::LocalInvalidate { window };
        end.fabric.post_send(qp, &mut vec![Posting { wr_id: 6, signaled: true, wr }]).expect("invalidate");
        end.poll_until("the invalidation", |e| {
            let at = e.done.iter().position(|d| d.opcode == Opcode::LocalInvalidate)?;
            Some(e.done.remove(at))
        });
        assert!(mem.reclaim().is_ok(), "invalidated memory is returned");
    }
    end.fabric.destroy_qp(qp);
    end.close();
    drop(peer);
    assert_eq!(count_descriptors(), before, "all descriptors are closed");
}

/// A server accepts a connection only once it has enough free descriptors to receive those of the connection.
#[test]
fn a_connection_waits_until_the_server_has_free_descriptors() {
    let _guard = run_alone();
    let to = address("scarce");
    let peer = Peer::start("scarce", &to);
    let mut end = End::new();
    end.post_receives(16);
    let qp = end.connect(&to);
    end.echo(qp, 1, 100);
    end.fabric.destroy_qp(qp);
    end.close();
    drop(peer);
}

/// A server without free descriptors keeps its connections, and accesses memory that their peers expose meanwhile.
#[test]
fn a_connected_peer_is_served_without_free_descriptors() {
    let _guard = run_alone();
    let to = address("hoard");
    let peer = Peer::start("serve", &to);
    let mut end = End::new();
    end.post_receives(16);
    let qp = end.connect(&to);
    end.send(qp, &[b"H"], None);
    let (hoarded, _) = end.poll_until("the hoard", |e| e.take_message(qp));
    assert!(u64_at(&hoarded, 0) > 0, "the server had free descriptors");
    let (window, mem) = (end.fabric.alloc_window(qp).expect("window"), end.lend());
    let remote = RemoteMemory { rkey: end.fabric.next_rkey(window), address: end.fabric.remote_address(&mem, 0) };
    let wr = WorkRequest::Bind { window, mem: mem.clone(), offset: 0, len: SIZE, access: Access::REMOTE_WRITE };
    end.fabric.post_send(qp, &mut vec![Posting { wr_id: 5, signaled: false, wr }]).expect("bind");
    end.send(qp, &[&transfer_request(b"W", remote, SIZE, 7)], None);
    end.poll_until("the Write", |e| e.take_message(qp));
    let mut got = vec![0; SIZE];
    assert!(mem.read_at(0, &mut got) && got == pattern(7, SIZE), "the Write arrives complete");
    end.fabric.destroy_qp(qp);
    drop(mem);
    end.close();
    drop(peer);
}

/// Kills a server at arbitrary instructions. The connection to it ends, and each posted request completes once. A
/// connection to another server stays intact.
#[test]
fn a_killed_server_ends_its_own_connection_only() {
    let _guard = run_alone();
    let (before, maps) = (count_descriptors(), count_mappings());
    let steady = address("steady");
    let other = Peer::start("serve", &steady);
    let mut end = End::new();
    end.post_receives(256);
    let steady_qp = end.connect(&steady);
    for round in 0..25u64 {
        let failing = address(&format!("failing-{round}"));
        let mut killed_peer = Peer::start("serve", &failing);
        let killed_qp = end.connect(&failing);
        let window = end.fabric.alloc_window(killed_qp).expect("window");
        let mut mem = Some(end.lend());
        let (mut posted, mut ended) = (0u64, 0u64);
        let mut killed = false;
        let mut turns = 0u64;
        end.poll_until("the end of the killed peer's connection", |end| {
            turns += 1;
            // Binds and Write requests are mixed with echoes, so that the kill may interrupt any of these operations.
            if turns % 3 == 1 && !end.has_ended(killed_qp) {
                let remote = RemoteMemory {
                    rkey: end.fabric.next_rkey(window),
                    address: end.fabric.remote_address(mem.as_ref()?, 0),
                };
                let wr = WorkRequest::Bind { window, mem: mem.clone()?, offset: 0, len: SIZE, access: Access::REMOTE };
                let bind = Posting { wr_id: 8, signaled: false, wr };
                if end.fabric.post_send(killed_qp, &mut vec![bind]).is_ok() {
                    end.send(killed_qp, &[&transfer_request(b"W", remote, SIZE, turns)], None);
                }
            }
            let buf = end.pool.alloc(1000)?;
            let wr = WorkRequest::Send { buf, invalidate: None, fence: false };
            let mut chain = vec![Posting { wr_id: 100 + posted, signaled: true, wr }];
            chain[0].wr = match std::mem::replace(&mut chain[0].wr, WorkRequest::LocalInvalidate { window }) {
                WorkRequest::Send { mut buf, .. } => {
                    buf[0] = b'E';
                    WorkRequest::Send { buf, invalidate: None, fence: false }
                }
                wr => wr,
            };
            if end.fabric.post_send(killed_qp, &mut chain).is_ok() {
                posted += 1;
            }
            if turns == 20 + round * 37 % 400 {
                killed_peer.kill();
                killed = true;
            }
            if turns.is_multiple_of(16) {
                end.echo(steady_qp, turns, 3000);
            }
            let mut i = 0;
            while i < end.done.len() {
                if end.done[i].qp == killed_qp && end.done[i].wr_id >= 100 {
                    assert_eq!(end.done[i].wr_id, 100 + ended, "each request completes once and in order");
                    ended += 1;
                    end.done.remove(i);
                } else if end.done[i].qp == killed_qp {
                    let done = end.done.remove(i);
                    if let Some(buf) = done.buf {
                        end.fabric.post_recv(None, &mut vec![buf.into_buf()]);
                    }
                } else {
                    i += 1;
                }
            }
            (killed && end.has_ended(killed_qp) && ended == posted).then_some(())
        });
        assert!(posted > 0);
        end.fabric.destroy_qp(killed_qp);
        let mut lent = mem.take();
        end.poll_until("the memory is returned", |_| match lent.take()?.reclaim() {
            Ok(_) => Some(()),
            Err(in_use) => {
                lent = Some(in_use);
                None
            }
        });
        end.events.clear();
        end.echo(steady_qp, round, 4000);
    }
    end.fabric.destroy_qp(steady_qp);
    end.close();
    drop(other);
    assert_eq!(count_descriptors(), before, "all descriptors are closed");
    assert_eq!(count_mappings(), maps, "all memory is unmapped");
}

/// Kills clients at arbitrary instructions, while this process serves them and writes to their memory.
#[test]
fn a_killed_client_ends_its_own_connection_only() {
    let _guard = run_alone();
    let (before, maps) = (count_descriptors(), count_mappings());
    let here = address("here");
    let mut end = End::new();
    end.post_receives(256);
    let steady = address("steady-too");
    let other = Peer::start("serve", &steady);
    let steady_qp = end.connect(&steady);
    let listener = SoftwareFabric::bind(&here).expect("bind");
    end.fabric.listen(&listener).expect("listen");
    for round in 0..25u64 {
        let start = std::thread::spawn({
            let here = here.clone();
            move || Peer::start("storm", &here)
        });
        let request = end.poll_until("a connect request", |end| {
            let at = end.events.iter().position(|e| matches!(e, ControlEvent::ConnectRequest { .. }))?;
            match end.events.remove(at) {
                ControlEvent::ConnectRequest { request, .. } => Some(request),
                _ => None,
            }
        });
        // A separate receive queue leaves the shared Receives to the other connections.
        let own = ConnectParams { own_receive_queue: Some(64), ..params() };
        let killed_qp = end.fabric.accept(request, &own).expect("accept");
        let mut bufs: Vec<Buf> = (0..64).map_while(|_| end.pool.alloc(8192)).collect();
        assert_eq!(end.fabric.post_recv(Some(killed_qp), &mut bufs), 64);
        let mut start = Some(start);
        let mut killed_peer = None;
        let (mut got, mut writes, mut kill_at) = (0u64, 0u64, u64::MAX);
        end.poll_until("the end of the killed peer's connection", |end| {
            if start.as_ref().is_some_and(|s| s.is_finished()) {
                killed_peer = start.take().map(|s| s.join().expect("start"));
                kill_at = got + 1 + round * 53 % 500;
            }
            while let Some((bytes, _)) = end.take_from(killed_qp, Some(killed_qp)) {
                if bytes[0] == b'W' && bytes.len() == 25 {
                    writes += 1;
                    let remote = RemoteMemory { rkey: u32_at(&bytes, 1), address: u64_at(&bytes, 5) };
                    if let Some(buf) = end.exposed.alloc(SIZE) {
                        let src = Source::Frozen(buf.freeze());
                        let wr = WorkRequest::Write { src, offset: 0, len: SIZE, remote };
                        let _ = end.fabric.post_send(killed_qp, &mut vec![Posting { wr_id: 1, signaled: true, wr }]);
                    }
                } else {
                    got += 1;
                    assert_eq!(u64_at(&bytes, 0), got, "each message arrives once and in order");
                    assert!(bytes[8..] == pattern(got, (got * 131 % 4000) as usize), "message {got} arrives unchanged");
                }
            }
            if got >= kill_at && writes > 0 {
                kill_at = u64::MAX;
                if let Some(killed_peer) = &mut killed_peer {
                    killed_peer.kill();
                }
            }
            if got.is_multiple_of(64) {
                end.echo(steady_qp, got, 3000);
            }
            end.has_ended(killed_qp).then_some(())
        });
        assert!(got > 0 && writes > 0, "{got} messages, {writes} requests for Writes");
        end.fabric.destroy_qp(killed_qp);
        end.turn();
        for done in std::mem::take(&mut end.done) {
            assert!(done.status == Status::Success || done.qp != steady_qp, "{done:?}");
        }
        end.events.clear();
        end.echo(steady_qp, round, 4000);
    }
    end.fabric.destroy_qp(steady_qp);
    end.fabric.unlisten();
    drop(listener);
    end.close();
    drop(other);
    assert_eq!(count_descriptors(), before, "all descriptors are closed");
    assert_eq!(count_mappings(), maps, "all memory is unmapped");
}

/// The socket file of a live process makes its address busy. The socket file of a dead process is replaced.
#[test]
fn stale_socket_files_are_replaced() {
    let _guard = run_alone();
    let directory = tempfile::tempdir().expect("directory");
    let path = directory.path().join("server");
    let to = FabricAddress(path.to_str().expect("utf-8").to_owned());
    let mut killed_peer = Peer::start("serve", &to);
    let mode = std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(&path).expect("socket").permissions());
    assert_eq!(mode & 0o777, 0o600);
    let mut end = End::new();
    end.post_receives(8);
    let qp = end.connect(&to);
    end.echo(qp, 1, 100);
    assert!(
        matches!(SoftwareFabric::bind(&to), Err(error) if error.kind() == FabricErrorKind::AddressInUse),
        "the address of a live server is busy"
    );
    killed_peer.kill();
    assert!(path.exists());
    assert!(matches!(end.fabric.connect(&to, &params()), Err(error) if error.kind() == FabricErrorKind::Unreachable));
    let listener = SoftwareFabric::bind(&to).expect("the address of a dead server is free");
    assert!(
        matches!(SoftwareFabric::bind(&to), Err(error) if error.kind() == FabricErrorKind::AddressInUse),
        "the address of this process's listener is busy"
    );
    drop(listener);
    assert!(!path.exists(), "the drop of the listener removes the file");
    // `bind` removes only sockets.
    std::fs::write(&path, b"precious").expect("write");
    let refused = SoftwareFabric::bind(&to).expect_err("refused");
    assert!(refused.kind() == FabricErrorKind::Address && refused.to_string().contains("not a socket"), "{refused}");
    assert_eq!(std::fs::read(&path).expect("read"), b"precious");
    end.close();
}

#[test]
fn malformed_addresses_are_refused() {
    let _guard = run_alone();
    for name in ["", "a\0b", "line\nbreak", "/tmp/", &"x".repeat(200), "/no/such/directory/here"] {
        let to = FabricAddress(name.to_owned());
        let bound = SoftwareFabric::bind(&to);
        assert!(matches!(&bound, Err(error) if error.kind() == FabricErrorKind::Address), "{name:?}: {bound:?}");
    }
}
