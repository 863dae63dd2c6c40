//! The protocols between two processes, explored by loom: `RUSTFLAGS="--cfg loom" cargo test -p
//! rpcrdma-fabric --release --lib model`.

use loom::sync::Arc;
use loom::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
use loom::sync::atomic::{AtomicU64, fence};
use loom::thread;

use super::doorbell::{Doorbell, Waits};
use super::memory::{Memory, RingMemory};
use super::ring::{Consumer, Header, Producer};
use super::window::model::WindowModel;

/// Shared memory of which loom watches every word.
pub(super) struct Words(Vec<AtomicU64>);

impl Words {
    pub(super) fn new(bytes: usize) -> Self {
        Self((0..bytes / 8).map(|_| AtomicU64::new(0)).collect())
    }

    fn word(&self, at: usize) -> &AtomicU64 {
        assert_eq!(at % 8, 0, "a word at {at}");
        &self.0[at / 8]
    }
}

impl Memory for Words {
    fn load(&self, at: usize) -> u64 {
        self.word(at).load(Acquire)
    }

    fn load_relaxed(&self, at: usize) -> u64 {
        self.word(at).load(Relaxed)
    }

    fn store_relaxed(&self, at: usize, value: u64) {
        self.word(at).store(value, Relaxed);
    }

    fn publish(&self, at: usize, value: u64) {
        self.word(at).store(value, Release);
    }

    fn swap(&self, at: usize, value: u64) -> u64 {
        self.word(at).swap(value, AcqRel)
    }

    fn settle(&self) {
        fence(SeqCst);
    }

    fn newest(&self, at: usize) -> u64 {
        self.word(at).fetch_and(u64::MAX, AcqRel)
    }
}

/// The ring at the start of it, of so many bytes.
struct Ring<'a>(&'a Words, u32);

impl Ring<'_> {
    fn word(&self, position: u64) -> &AtomicU64 {
        self.0.word((position % u64::from(self.1)) as usize)
    }
}

impl RingMemory for Ring<'_> {
    fn load(&self, position: u64) -> u64 {
        self.word(position).load(Acquire)
    }

    fn load_relaxed(&self, position: u64) -> u64 {
        self.word(position).load(Relaxed)
    }

    fn store_relaxed(&self, position: u64, value: u64) {
        self.word(position).store(value, Relaxed);
    }

    fn publish(&self, position: u64, value: u64) {
        self.word(position).store(value, Release);
    }

    fn read(&self, position: u64, to: &mut [u8]) {
        for (position, chunk) in (position..).step_by(8).zip(to.chunks_mut(8)) {
            chunk.copy_from_slice(&self.load_relaxed(position).to_le_bytes()[..chunk.len()]);
        }
    }

    fn write(&self, position: u64, from: &[u8]) {
        for (position, chunk) in (position..).step_by(8).zip(from.chunks(8)) {
            let mut bytes = [0; 8];
            bytes[..chunk.len()].copy_from_slice(chunk);
            self.store_relaxed(position, u64::from_le_bytes(bytes));
        }
    }

    fn prefetch(&self, _: u64) {}
}

/// The word for the consumer's head lies behind the smallest ring that has room for two records.
const RING: u32 = 256;
const REPORT: usize = 256;
const BELL: usize = 264;
const BYTES: usize = 272;

fn explore(test: impl Fn() + Sync + Send + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(test);
}

/// Whoever sees a record sees all of it, and nothing but zero behind it; room is only used again once it is
/// free.
#[test]
fn ring() {
    explore(|| records_arrive(RING, 5));
}

/// The same while the ring grows.
#[test]
fn growth() {
    explore(|| records_arrive(RING / 2, 4));
}

/// Of a ring that begins with so many bytes.
fn records_arrive(mut bytes: u32, records: u64) {
    let memory = Arc::new(Words::new(BYTES));
    let other = Arc::clone(&memory);
    let producer = thread::spawn(move || {
        let mut tx = Producer::new(bytes, RING);
        for i in 0..records {
            while !tx.has_room(8) {
                if let Some(larger) = tx.larger(8) {
                    bytes = larger;
                    tx.grow(&Ring(&other, bytes), bytes);
                    continue;
                }
                assert!(tx.acknowledge(other.load(REPORT)), "a head that cannot be");
                thread::yield_now();
            }
            tx.push(&Ring(&other, bytes), Header::message(8, None, i), &(i + 100).to_le_bytes());
        }
    });
    let mut rx = Consumer::new(bytes, RING);
    let mut taken = 0;
    while taken < records {
        let ring = Ring(&memory, bytes);
        let first = match rx.peek(&ring) {
            0 => {
                thread::yield_now();
                continue;
            }
            first => first,
        };
        let header = rx.header(&ring, first);
        if !header.is_valid(8) {
            bytes = rx.grow(header).unwrap_or_else(|| panic!("{header:?}"));
            continue;
        }
        assert_eq!((header.len(), header.head()), (8, taken));
        let mut payload = [0; 8];
        rx.copy(&ring, &mut payload);
        assert_eq!(u64::from_le_bytes(payload), taken + 100);
        rx.advance(8);
        memory.publish(REPORT, rx.report());
        taken += 1;
    }
    producer.join().expect("producer");
    assert_eq!(rx.peek(&Ring(&memory, bytes)), 0, "a record that nobody sent");
}

/// News that come while the other side falls asleep are seen by it, or it is woken: also in the second sleep.
#[test]
fn doorbell() {
    explore(|| {
        let memory = Arc::new(Words::new(BYTES));
        let other = Arc::clone(&memory);
        let bell = Doorbell(BELL);
        let sender = thread::spawn(move || {
            let mut rings = 0;
            let mut tx = Producer::new(RING, RING);
            for _ in 0..2 {
                tx.push(&Ring(&other, RING), Header::message(0, None, 0), &[]);
                rings += u32::from(bell.take(&*other));
            }
            rings
        });
        // A first sleep that ends by itself, then the one that counts.
        bell.set(&*memory, Waits::Message);
        bell.clear(&*memory);
        bell.set(&*memory, Waits::Message);
        let mut rx = Consumer::new(RING, RING);
        let mut seen = 0;
        while seen < 2 && rx.peek(&Ring(&memory, RING)) != 0 {
            rx.advance(0);
            seen += 1;
        }
        let rings = sender.join().expect("sender");
        assert!(seen == 2 || rings > 0, "asleep with {seen} of 2 messages seen");
    });
}

/// A report wakes only who waits for it, and who waits for messages only is still woken by the next one.
#[test]
fn doorbell_of_reports() {
    for waits in [Waits::Message, Waits::Anything] {
        explore(move || {
            let memory = Arc::new(Words::new(BYTES));
            let other = Arc::clone(&memory);
            let bell = Doorbell(BELL);
            let peer = thread::spawn(move || {
                other.publish(REPORT, 64);
                let for_report = bell.take_if_anything(&*other);
                let mut tx = Producer::new(RING, RING);
                tx.push(&Ring(&other, RING), Header::message(0, None, 0), &[]);
                (for_report, bell.take(&*other))
            });
            bell.set(&*memory, waits);
            let reported = memory.load(REPORT) != 0;
            let rx = Consumer::new(RING, RING);
            let message = rx.peek(&Ring(&memory, RING)) != 0;
            let (for_report, for_message) = peer.join().expect("peer");
            assert!(message || for_report || for_message, "asleep with a message");
            assert!(waits == Waits::Message || reported || for_report || for_message, "asleep with a report");
            assert!(waits == Waits::Anything || !for_report, "woken for a report that nobody waits for");
        });
    }
}

/// Once a revocation is done, the peer's copy is over, and no other begins.
#[test]
fn window() {
    explore(|| {
        let window = Arc::new(WindowModel::new());
        let exposed = Arc::new(loom::cell::UnsafeCell::new(0u32));
        window.bind(7);
        let (peer_window, peer_exposed) = (Arc::clone(&window), Arc::clone(&exposed));
        let peer = thread::spawn(move || {
            for _ in 0..2 {
                if peer_window.claim(7) {
                    peer_exposed.with_mut(|_| ());
                    peer_window.release();
                }
            }
        });
        while !window.revoke(7) {
            thread::yield_now();
        }
        // The memory is ours again: loom objects if the peer's access may happen at the same time.
        exposed.with_mut(|_| ());
        peer.join().expect("peer");
        assert!(!window.claim(7), "a revoked key still works");
    });
}

/// Who finds a key finds what was bound with it, also when the window is bound anew.
#[test]
fn window_fields() {
    explore(|| {
        let window = Arc::new(WindowModel::new());
        let other = Arc::clone(&window);
        let owner = thread::spawn(move || {
            other.bind(1);
            while !other.revoke(1) {
                thread::yield_now();
            }
            other.bind(2);
        });
        for rkey in [1, 2] {
            if window.claim(rkey) {
                window.release();
            }
        }
        owner.join().expect("owner");
        assert!(window.claim(2), "the last key does not work");
    });
}
