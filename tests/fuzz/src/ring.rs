//! A connection of the software fabric with an arbitrary peer.
//!
//! The peer writes arbitrary bytes into all shared memory at any time. This side sends, receives, exposes memory, and
//! accesses the peer's memory. Every buffer returns to its pool, and every signaled request completes once. While the
//! peer obeys the rules, its messages arrive complete and in order. Each Receive is filled with a mark before it is
//! posted. The mark stands for old bytes of another peer's message, so no completion may deliver it.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::hash::{BuildHasher, Hasher, RandomState};

use rpcrdma::fabric::software::fuzz::{MAX_MESSAGE, Part, Peer, WINDOWS};
use rpcrdma::fabric::software::{SoftwareConfig, SoftwareFabric};
use rpcrdma::fabric::{
    Access, Completion, ConnectParams, ControlEvent, Fabric, Opcode, Posting, QpId, RemoteMemory, Source, Status,
    WindowId, WorkRequest,
};
use rpcrdma_mempool::{ArenaConfig, Buf, Class, Lent, PagePolicy, Pool, PoolConfig};

/// State that the scenarios of all inputs share.
struct Fixture {
    fabric: SoftwareFabric,
    peer: Peer,
    pool: Pool,
    exposed: Pool,
    /// Bytes that fill a Receive before it is posted. They are random, so no input contains them.
    mark: [u8; 8],
}

/// Buffers of each pool.
const BUFFERS: usize = 32;
/// Bytes of a Receive, fewer than the longest message has.
const RECEIVE_SIZE: usize = 1024;

fn create_pool() -> Pool {
    let arena = ArenaConfig { pages: PagePolicy::Small, ..ArenaConfig::default() };
    Pool::new(&PoolConfig { classes: vec![Class { size: MAX_MESSAGE, count: BUFFERS }], arena }).expect("a pool")
}

impl Fixture {
    fn new() -> Self {
        let config = SoftwareConfig { max_message: MAX_MESSAGE, shared_receives: 8, ..SoftwareConfig::default() };
        let mut fabric = SoftwareFabric::new(config).expect("a fabric");
        let (pool, exposed) = (create_pool(), create_pool());
        fabric.register(pool.arena(), Access::LOCAL).expect("the arena is registered");
        fabric.register(exposed.arena(), Access::REMOTE).expect("the arena is registered");
        let mark = RandomState::new().build_hasher().finish().to_ne_bytes();
        Self { fabric, peer: Peer::new(), pool, exposed, mark }
    }
}

thread_local! {
    static FIXTURE: RefCell<Fixture> = RefCell::new(Fixture::new());
}

pub fn run(data: &[u8]) {
    FIXTURE.with(|fixture| Scenario::new(&mut fixture.borrow_mut(), data).run());
}

struct Scenario<'t, 'd> {
    fixture: &'t mut Fixture,
    input: &'d [u8],
    qp: QpId,
    windows: Vec<WindowId>,
    /// Signaled requests without a completion.
    posted: Vec<u64>,
    /// Identifier of the last posted request.
    last_id: u64,
    /// Messages that the peer has sent and this side has not received. `None` once the peer has broken the rules.
    unreceived: Option<VecDeque<Vec<u8>>>,
    /// List for completions, kept for reuse.
    done: Vec<Completion>,
    /// Violations that the fabric had counted before this scenario.
    violations: u64,
    /// True once a request has failed, which ends the connection.
    ended: bool,
}

impl<'t, 'd> Scenario<'t, 'd> {
    fn new(fixture: &'t mut Fixture, data: &'d [u8]) -> Self {
        let (&mode, input) = data.split_first().unwrap_or((&0, &[]));
        let params = ConnectParams {
            send_queue_depth: 8,
            windows: WINDOWS,
            own_receive_queue: (mode & 1 != 0).then_some(4),
            rnr_retry: if mode & 2 != 0 { 0 } else { ConnectParams::UNLIMITED_RNR_RETRY },
            ..ConnectParams::default()
        };
        let Fixture { fabric, peer, exposed, .. } = fixture;
        let violations = fabric.stats().peer_violations;
        let qp = peer.join(fabric, exposed.arena().id(), &params);
        let windows = (0..WINDOWS).map(|_| fabric.alloc_window(qp).expect("a window")).collect();
        let (unreceived, done) = (Some(VecDeque::new()), Vec::new());
        Self { fixture, input, qp, windows, posted: Vec::new(), last_id: 0, unreceived, done, violations, ended: false }
    }

    fn byte(&mut self) -> u8 {
        let (first, rest) = self.input.split_first().unwrap_or((&0, &[]));
        self.input = rest;
        *first
    }

    fn word(&mut self) -> u32 {
        u32::from_le_bytes(std::array::from_fn(|_| self.byte()))
    }

    fn bytes(&mut self, len: usize) -> &'d [u8] {
        let (front, rest) = self.input.split_at(len.min(self.input.len()));
        self.input = rest;
        front
    }

    fn run(mut self) {
        while !self.input.is_empty() && !self.ended {
            let step = self.byte();
            self.step(step & 15, step >> 4);
        }
        self.check_resources();
    }

    /// Performs an action of either side. `argument` varies it.
    fn step(&mut self, step: u8, argument: u8) {
        match step {
            0..=2 => self.poll(1 + usize::from(argument)),
            3 => {
                let own = argument & 1 != 0;
                let mut bufs: Vec<Buf> =
                    (0..=argument >> 2).map_while(|_| self.fixture.pool.alloc(RECEIVE_SIZE)).collect();
                for place in bufs.iter_mut().flat_map(|buf| buf.full_mut().as_chunks_mut().0) {
                    *place = self.fixture.mark;
                }
                let _ = self.fixture.fabric.post_recv(own.then_some(self.qp), &mut bufs);
            }
            4 | 5 => self.send_from_peer(argument),
            6 => self.poke(argument),
            7 => {
                // The peer writes an aligned word, as headers, progress reports, doorbells and table entries are.
                let part = [Part::Rings, Part::Table, Part::Ours, Part::Rings][usize::from(argument & 3)];
                let at = 8 * usize::from(self.byte()) * if argument & 4 != 0 { 8 } else { 1 };
                let (low, high) = (u64::from(self.word()), u64::from(self.byte()));
                self.break_rules(part);
                let _ = self.fixture.peer.poke(part, at, &(low | high << 32).to_ne_bytes());
            }
            8 => {
                // The peer reports any progress, or refuses a message.
                let (head, refusal) = (64 * u64::from(self.byte()), u64::from(argument >> 2));
                let at = self.fixture.peer.report();
                self.unreceived = None;
                assert!(self.fixture.peer.poke(Part::Rings, at, &head.to_ne_bytes()));
                assert!(self.fixture.peer.poke(Part::Rings, at + 8, &refusal.to_ne_bytes()));
            }
            9 | 10 => self.send(argument),
            11 => self.access_peer(argument),
            12 => self.expose(argument),
            13 => {
                let window = self.windows[usize::from(argument) % self.windows.len()];
                self.post(WorkRequest::LocalInvalidate { window }, argument & 4 != 0);
            }
            14 if argument == 0 => self.fixture.fabric.arm(),
            14 if argument == 1 => self.fixture.fabric.disconnect(self.qp),
            14 if argument == 2 => {
                let len = self.word() & 0xFFF;
                self.break_rules(Part::Rings);
                self.fixture.peer.announce(len);
            }
            _ => {
                self.fixture.fabric.poll_control(&mut Vec::new());
                self.poll(64);
            }
        }
    }

    /// Records that the peer breaks the rules by writing to this part. Only writes to exposed memory are allowed.
    fn break_rules(&mut self, part: Part) {
        if part != Part::Exposed {
            self.unreceived = None;
        }
    }

    /// Lets the peer write bytes to any part of the shared memory.
    fn poke(&mut self, argument: u8) {
        let part = [Part::Rings, Part::Table, Part::Ours, Part::Exposed][usize::from(argument & 3)];
        let at = usize::from(self.byte()) << (argument >> 2 & 3) << 3;
        let len = usize::from(self.byte() & 63);
        let bytes = self.bytes(len);
        self.break_rules(part);
        let _ = self.fixture.peer.poke(part, at % self.fixture.peer.len(part), bytes);
    }

    /// Lets the peer send a message by the rules, except that it may invalidate any key.
    fn send_from_peer(&mut self, argument: u8) {
        let len = usize::from(self.byte()) << (argument & 3);
        let invalidate = if argument & 12 == 4 {
            let window = self.windows[usize::from(argument) % self.windows.len()];
            // The current key of the window if bit 4 is clear, else the next one.
            Some(self.fixture.fabric.next_rkey(window).wrapping_sub(u32::from(argument & 16 == 0)))
        } else {
            None
        };
        let mut payload = vec![argument; len.min(MAX_MESSAGE)];
        let front = self.bytes(len.min(4));
        payload[..front.len()].copy_from_slice(front);
        let sent = self.fixture.peer.send(&payload, invalidate, 0);
        match &mut self.unreceived {
            // The key may be unbound, and invalidating an unbound key breaks the rules.
            Some(_) if invalidate.is_some() => self.unreceived = None,
            Some(queue) if sent => queue.push_back(payload),
            _ => {}
        }
    }

    fn post(&mut self, wr: WorkRequest, signaled: bool) {
        self.last_id += 1;
        let mut chain = vec![Posting { wr_id: self.last_id, signaled, wr }];
        if self.fixture.fabric.post_send(self.qp, &mut chain).is_ok() && chain.is_empty() && signaled {
            self.posted.push(self.last_id);
        }
    }

    fn send(&mut self, argument: u8) {
        let Some(mut buf) = self.fixture.pool.alloc(MAX_MESSAGE) else { return };
        let len = usize::from(self.byte()) << (argument & 3);
        buf.set_window(0, len.min(MAX_MESSAGE));
        let invalidate = (argument & 4 != 0).then_some(7);
        self.post(WorkRequest::Send { buf, invalidate, fence: false }, argument & 8 != 0);
    }

    /// Posts an RDMA Read or Write of this side.
    fn access_peer(&mut self, argument: u8) {
        let Some(buf) = self.fixture.pool.alloc(MAX_MESSAGE) else { return };
        let remote = RemoteMemory { rkey: self.word(), address: u64::from(self.word()) };
        let len = usize::from(self.byte()) << (argument & 3);
        let wr = match argument >> 2 & 3 {
            0 => match buf.lend() {
                Ok(dst) => WorkRequest::Read { dst, offset: 0, len, remote },
                Err(_) => return,
            },
            1 => match buf.lend() {
                Ok(src) => WorkRequest::Write { src: Source::Lent(src), offset: 0, len, remote },
                Err(_) => return,
            },
            _ => WorkRequest::Write { src: Source::Frozen(buf.freeze()), offset: 0, len, remote },
        };
        self.post(wr, argument & 1 != 0);
    }

    fn expose(&mut self, argument: u8) {
        let mem: Lent = match self.fixture.exposed.alloc(MAX_MESSAGE).map(Buf::lend) {
            Some(Ok(mem)) => mem,
            _ => return,
        };
        let window = self.windows[usize::from(argument) % self.windows.len()];
        let len = 1 + usize::from(self.byte());
        let access = [Access::REMOTE, Access::REMOTE_READ][usize::from(argument >> 2 & 1)];
        self.post(WorkRequest::Bind { window, mem, offset: 0, len, access }, argument & 8 != 0);
    }

    fn poll(&mut self, limit: usize) {
        let mut done = std::mem::take(&mut self.done);
        let new = self.fixture.fabric.poll_cq(&mut done, limit);
        assert!(new <= limit && new == done.len());
        for completion in done.drain(..) {
            self.handle_completion(completion);
        }
        self.done = done;
    }

    fn handle_completion(&mut self, completion: Completion) {
        assert_eq!(completion.qp, self.qp);
        if completion.opcode != Opcode::Recv {
            assert!(completion.buf.is_none());
            let at = self.posted.iter().position(|id| *id == completion.wr_id);
            match at {
                Some(at) => _ = self.posted.remove(at),
                // A failed request completes even if it is not signaled.
                None => assert!(!completion.status.is_ok()),
            }
            self.ended |= !completion.status.is_ok();
            return;
        }
        let buf = completion.buf.expect("a Receive has a buffer");
        if completion.status != Status::Success {
            self.ended = true;
            return;
        }
        assert!(buf.len() <= MAX_MESSAGE);
        assert!(
            buf.windows(8).all(|bytes| bytes != self.fixture.mark),
            "a Receive contains only bytes that the peer has sent"
        );
        if let Some(queue) = &mut self.unreceived {
            let sent = queue.pop_front().expect("the peer has sent this message");
            assert_eq!(sent[..], buf[..]);
        }
    }

    /// Checks that all resources are returned.
    fn check_resources(mut self) {
        if self.unreceived.is_some() && !self.ended {
            assert_eq!(
                self.fixture.fabric.stats().peer_violations,
                self.violations,
                "a peer that obeys the rules is not reported"
            );
        }
        self.fixture.fabric.destroy_qp(self.qp);
        loop {
            self.poll(64);
            if self.done.is_empty() && self.fixture.fabric.poll_cq(&mut self.done, 64) == 0 {
                break;
            }
            for completion in std::mem::take(&mut self.done) {
                self.handle_completion(completion);
            }
        }
        assert!(self.posted.is_empty(), "every signaled request completes, but these did not: {:?}", self.posted);
        let mut events = Vec::new();
        self.fixture.fabric.poll_control(&mut events);
        assert!(!events.iter().any(|event| matches!(event, ControlEvent::Established { .. })));
        // The peer may claim that it still copies from buffers. The second poll frees them, because no socket shows
        // that the peer is alive.
        self.fixture.fabric.poll_control(&mut events);
        let free = |pool: &Pool| pool.stats().classes[0].free;
        assert_eq!(free(&self.fixture.exposed), BUFFERS, "all exposed memory is returned");
        // The shared receive queue keeps up to eight buffers.
        assert!(free(&self.fixture.pool) + 8 >= BUFFERS, "all other buffers are returned");
    }
}
