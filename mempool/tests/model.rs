//! Random histories of a pool against a model: every buffer has exactly one holder, keeps its bytes while in use, and
//! all counts balance at the end.
#![cfg(not(loom))]
#![cfg_attr(not(loom), expect(unsafe_code, reason = "the end of a transfer"))]

use std::sync::mpsc;
use std::thread;

use proptest::prelude::*;
use rpcrdma_mempool::{ArenaConfig, Buf, Class, Frozen, Lent, PagePolicy, Pool, PoolConfig, Posted};

/// The sizes and counts of the pool.
const CLASSES: [(usize, usize); 3] = [(64, 4), (200, 3), (4096, 2)];

#[derive(Clone, Debug)]
enum Step {
    Alloc(usize),
    Drop(usize),
    /// Drop by another thread.
    DropRemote(usize),
    Freeze(usize),
    Lend(usize),
    Clone(usize),
    Reclaim(usize),
    Post(usize),
    Complete(usize),
    Write(usize, u8),
    Drain,
    ResetLowWater,
}

fn step() -> impl Strategy<Value = Step> {
    let n = 0..32usize;
    prop_oneof![
        6 => prop_oneof![0..300usize, 0..5000usize].prop_map(Step::Alloc),
        3 => n.clone().prop_map(Step::Drop),
        3 => n.clone().prop_map(Step::DropRemote),
        2 => n.clone().prop_map(Step::Freeze),
        2 => n.clone().prop_map(Step::Lend),
        2 => n.clone().prop_map(Step::Clone),
        2 => n.clone().prop_map(Step::Reclaim),
        1 => n.clone().prop_map(Step::Post),
        1 => n.clone().prop_map(Step::Complete),
        2 => (n, any::<u8>()).prop_map(|(n, byte)| Step::Write(n, byte)),
        2 => Just(Step::Drain),
        1 => Just(Step::ResetLowWater),
    ]
}

enum Handle {
    Buf(Buf),
    Frozen(Frozen),
    Lent(Lent),
    Posted(Posted),
}

/// A handle, the offset of its buffer, and the byte that fills its range.
struct Entry {
    held: Handle,
    place: usize,
    class: usize,
    byte: u8,
}

impl Entry {
    fn new(held: Handle, class: usize, byte: u8) -> Self {
        let place = match &held {
            Handle::Buf(buf) => buf.base_offset(),
            Handle::Frozen(frozen) => frozen.base_offset(),
            Handle::Lent(lent) => lent.base_offset(),
            Handle::Posted(posted) => posted.base_offset(),
        };
        Self { held, place, class, byte }
    }

    fn check(&self) {
        let assert_unchanged = |bytes: &[u8]| assert!(bytes.iter().all(|&b| b == self.byte), "the bytes are unchanged");
        match &self.held {
            Handle::Buf(buf) => assert_unchanged(buf),
            Handle::Frozen(frozen) => assert_unchanged(frozen),
            Handle::Lent(lent) => {
                let mut bytes = vec![0; lent.len()];
                assert!(lent.read_at(0, &mut bytes));
                assert_unchanged(&bytes);
            }
            Handle::Posted(_) => {}
        }
    }
}

/// A thread that drops the buffers it receives, and reports each drop.
struct RemoteThread {
    send: mpsc::Sender<Option<Sendable>>,
    done: mpsc::Receiver<()>,
    thread: thread::JoinHandle<()>,
}

/// A handle that may leave the thread.
enum Sendable {
    Buf(Buf),
    Frozen(Frozen),
}

impl RemoteThread {
    fn new() -> Self {
        let (send, receive) = mpsc::channel();
        let (report, done) = mpsc::channel();
        let thread = thread::spawn(move || {
            while let Ok(Some(held)) = receive.recv() {
                match held {
                    Sendable::Buf(buf) => drop(buf),
                    Sendable::Frozen(frozen) => drop(frozen),
                }
                report.send(()).unwrap();
            }
        });
        Self { send, done, thread }
    }

    fn drop(&self, held: Sendable) {
        self.send.send(Some(held)).unwrap();
        self.done.recv().unwrap();
    }
}

struct Model {
    pool: Pool,
    remote_thread: RemoteThread,
    entries: Vec<Entry>,
    /// Free buffers of each class.
    free: [usize; 3],
    /// Buffers of each class in the list of remote frees.
    remote: [usize; 3],
    /// Fewest free buffers of each class.
    low: [usize; 3],
    failures: [u64; 3],
    next_byte: u8,
}

impl Model {
    fn new() -> Self {
        let classes = CLASSES.iter().map(|&(size, count)| Class { size, count }).collect();
        let arena = ArenaConfig { bytes: 0, pages: PagePolicy::Small, name: "model", ..ArenaConfig::default() };
        let all = CLASSES.map(|(_, count)| count);
        Self {
            pool: Pool::new(&PoolConfig { classes, arena }).unwrap(),
            remote_thread: RemoteThread::new(),
            entries: Vec::new(),
            free: all,
            remote: [0; 3],
            low: all,
            failures: [0; 3],
            next_byte: 0,
        }
    }

    /// Handles of the buffer at `place`.
    fn clones(&self, place: usize) -> usize {
        self.entries.iter().filter(|entry| entry.place == place).count()
    }

    fn alloc(&mut self, len: usize) {
        let expected = (0..3).filter(|&class| len <= CLASSES[class].0).find(|&class| {
            self.failures[class] += u64::from(self.free[class] == 0);
            self.free[class] > 0
        });
        let allocated = self.pool.alloc(len);
        assert_eq!(allocated.as_ref().map(Buf::capacity), expected.map(|class| CLASSES[class].0));
        if let (Some(mut buf), Some(class)) = (allocated, expected) {
            assert_eq!((buf.start(), buf.len()), (0, len));
            self.free[class] -= 1;
            self.low[class] = self.low[class].min(self.free[class]);
            self.next_byte = self.next_byte.wrapping_add(1);
            buf.fill(self.next_byte);
            let entry = Entry::new(Handle::Buf(buf), class, self.next_byte);
            assert_eq!(self.clones(entry.place), 0, "a buffer is allocated once");
            self.entries.push(entry);
        }
    }

    fn step(&mut self, step: &Step) {
        let index = match *step {
            Step::Alloc(len) => return self.alloc(len),
            Step::Drain => {
                assert_eq!(self.pool.drain_remote(), self.remote.iter().sum::<usize>());
                for (free, remote) in self.free.iter_mut().zip(&mut self.remote) {
                    *free += std::mem::take(remote);
                }
                return;
            }
            Step::ResetLowWater => {
                self.pool.reset_low_water();
                self.low = self.free;
                return;
            }
            Step::Drop(n)
            | Step::DropRemote(n)
            | Step::Freeze(n)
            | Step::Lend(n)
            | Step::Clone(n)
            | Step::Reclaim(n)
            | Step::Post(n)
            | Step::Complete(n)
            | Step::Write(n, _) => n,
        };
        if self.entries.is_empty() {
            return;
        }
        let index = index % self.entries.len();
        let Entry { held, place, class, byte } = self.entries.swap_remove(index);
        let is_last = self.clones(place) == 0;
        let held = match (step, held) {
            (Step::Drop(_), Handle::Buf(_) | Handle::Frozen(_) | Handle::Lent(_)) => {
                // The pattern does not bind the handle, so it is dropped with the tuple on return.
                self.free[class] += usize::from(is_last);
                return;
            }
            (Step::DropRemote(_), Handle::Buf(buf)) => {
                self.remote_thread.drop(Sendable::Buf(buf));
                self.remote[class] += 1;
                return;
            }
            (Step::DropRemote(_), Handle::Frozen(frozen)) => {
                self.remote_thread.drop(Sendable::Frozen(frozen));
                self.remote[class] += usize::from(is_last);
                return;
            }
            (Step::Freeze(_), Handle::Buf(buf)) => Handle::Frozen(buf.freeze()),
            (Step::Lend(_), Handle::Buf(buf)) => Handle::Lent(buf.lend().unwrap()),
            (Step::Post(_), Handle::Buf(buf)) => Handle::Posted(buf.post()),
            // SAFETY: there is no device.
            (Step::Complete(_), Handle::Posted(posted)) => Handle::Buf(unsafe { posted.complete() }),
            (Step::Clone(_), Handle::Frozen(frozen)) => {
                self.entries.push(Entry::new(Handle::Frozen(frozen.clone()), class, byte));
                Handle::Frozen(frozen)
            }
            (Step::Clone(_), Handle::Lent(lent)) => {
                self.entries.push(Entry::new(Handle::Lent(lent.clone()), class, byte));
                Handle::Lent(lent)
            }
            (Step::Reclaim(_), Handle::Lent(lent)) => match lent.reclaim() {
                Ok(buf) => {
                    assert!(is_last, "only the last clone is reclaimed");
                    Handle::Buf(buf)
                }
                Err(lent) => {
                    assert!(!is_last, "the last clone is reclaimed");
                    Handle::Lent(lent)
                }
            },
            (Step::Write(_, byte), Handle::Buf(mut buf)) => {
                buf.fill(*byte);
                self.entries.push(Entry::new(Handle::Buf(buf), class, *byte));
                return;
            }
            (_, held) => held,
        };
        self.entries.push(Entry::new(held, class, byte));
    }

    fn check(&self) {
        self.entries.iter().for_each(Entry::check);
        let stats = self.pool.stats();
        for (index, class) in stats.classes.iter().enumerate() {
            assert_eq!((class.size, class.count), CLASSES[index]);
            assert_eq!(class.free, self.free[index]);
            assert_eq!(class.outstanding, CLASSES[index].1 - self.free[index]);
            assert_eq!(class.low_water, self.low[index]);
            assert_eq!(class.failures, self.failures[index]);
        }
    }

    /// Outstanding buffers, by class and type: held, frozen, lent, posted.
    fn outstanding(&self) -> [[usize; 4]; 3] {
        let mut counts = [[0; 4]; 3];
        let mut seen = std::collections::HashSet::new();
        for entry in self.entries.iter().filter(|entry| seen.insert(entry.place)) {
            let kind = match entry.held {
                Handle::Buf(_) => 0,
                Handle::Frozen(_) => 1,
                Handle::Lent(_) => 2,
                Handle::Posted(_) => 3,
            };
            counts[entry.class][kind] += 1;
        }
        counts
    }

    /// Ends the pool with outstanding buffers, and then drops the buffers.
    fn finish(self) {
        let outstanding = self.outstanding();
        let census = self.pool.census();
        for (class, outstanding) in census.classes.iter().zip(&outstanding) {
            assert_eq!([class.held, class.frozen, class.lent, class.posted], *outstanding);
            assert_eq!(class.free + outstanding.iter().sum::<usize>(), class.count);
        }
        let arena = self.pool.arena().clone();
        let start = format!("{:x}-", arena.base_address());
        match self.pool.close() {
            Ok(()) => assert!(self.entries.is_empty()),
            Err(leak) => {
                let named: usize = leak.classes.iter().map(|class| class.outstanding()).sum();
                assert_eq!(named, outstanding.iter().flatten().sum::<usize>());
            }
        }
        drop(arena);
        for (i, entry) in self.entries.into_iter().enumerate() {
            entry.check();
            match entry.held {
                Handle::Buf(buf) if i % 2 == 0 => self.remote_thread.drop(Sendable::Buf(buf)),
                Handle::Frozen(frozen) if i % 2 == 0 => self.remote_thread.drop(Sendable::Frozen(frozen)),
                // SAFETY: there is no device.
                Handle::Posted(posted) => drop(unsafe { posted.complete() }),
                held => drop(held),
            }
        }
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        assert!(
            !maps.lines().any(|line| line.starts_with(&start) && line.contains("memfd:model")),
            "the last buffer unmaps the arena"
        );
        self.remote_thread.send.send(None).unwrap();
        self.remote_thread.thread.join().unwrap();
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn counts_balance_and_buffers_keep_their_bytes_in_any_history(steps in prop::collection::vec(step(), 0..120)) {
        let mut model = Model::new();
        for step in &steps {
            model.step(step);
            model.check();
        }
        model.finish();
    }
}
