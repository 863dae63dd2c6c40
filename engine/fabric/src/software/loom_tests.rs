//! Protocols between two processes, explored by loom. Run `RUSTFLAGS="--cfg loom" cargo test -p rpcrdma-fabric
//! --release --lib loom_`.

use loom::sync::Arc;
use loom::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
use loom::sync::atomic::{AtomicU64, fence};
use loom::thread;

use super::doorbell::{Doorbell, WakeReason};
use super::memory::{RingMemory, Word};
use super::ring::{RecordHeader, RingConsumer, RingProducer};
use super::window::model::WindowModel;

/// Shared memory in which loom observes every word.
struct Words(Vec<AtomicU64>);

impl Words {
    fn new() -> Self {
        Self((0..BYTES / 8).map(|_| AtomicU64::new(0)).collect())
    }

    fn word(&self, at: usize) -> &AtomicU64 {
        assert_eq!(at % 8, 0, "a word at {at}");
        &self.0[at / 8]
    }

    /// The word with the consumer's head.
    fn report(&self) -> &AtomicU64 {
        self.word(REPORT)
    }

    fn bell(&self) -> Doorbell<'_, AtomicU64> {
        Doorbell(self.word(BELL))
    }
}

impl Word for AtomicU64 {
    fn acquire(&self) -> u64 {
        self.load(Acquire)
    }

    fn get(&self) -> u64 {
        self.load(Relaxed)
    }

    fn set(&self, value: u64) {
        self.store(value, Relaxed);
    }

    fn publish(&self, value: u64) {
        self.store(value, Release);
    }

    fn exchange(&self, value: u64) -> u64 {
        self.swap(value, AcqRel)
    }

    fn newest(&self) -> u64 {
        self.fetch_and(u64::MAX, AcqRel)
    }

    fn full_fence() {
        fence(SeqCst);
    }
}

/// The ring of this many bytes at the start of the memory.
struct Ring<'a>(&'a Words, u32);

impl RingMemory for Ring<'_> {
    type Word = AtomicU64;

    fn word(&self, position: u64) -> &AtomicU64 {
        self.0.word((position % u64::from(self.1)) as usize)
    }

    fn read(&self, position: u64, to: &mut [u8]) -> bool {
        for (position, chunk) in (position..).step_by(8).zip(to.chunks_mut(8)) {
            chunk.copy_from_slice(&self.word(position).get().to_le_bytes()[..chunk.len()]);
        }
        true
    }

    fn write(&self, position: u64, from: &[u8]) -> bool {
        for (position, chunk) in (position..).step_by(8).zip(from.chunks(8)) {
            let mut bytes = [0; 8];
            bytes[..chunk.len()].copy_from_slice(chunk);
            self.word(position).set(u64::from_le_bytes(bytes));
        }
        true
    }
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

/// A visible record is complete and followed by a zero word. Room is reused only once it is free.
#[test]
fn visible_records_are_complete_and_in_order() {
    explore(|| records_arrive(RING, 5));
}

#[test]
fn records_stay_in_order_while_a_ring_grows() {
    explore(|| records_arrive(RING / 2, 4));
}

/// Runs the model of a ring with this initial size.
fn records_arrive(mut bytes: u32, records: u64) {
    let memory = Arc::new(Words::new());
    let other = Arc::clone(&memory);
    let producer = thread::spawn(move || {
        let mut tx = RingProducer::new(bytes, RING);
        for i in 0..records {
            while !tx.has_room(8) {
                if let Some(larger) = tx.larger(8) {
                    bytes = larger;
                    tx.grow(&Ring(&other, bytes), bytes);
                    continue;
                }
                assert!(tx.acknowledge(other.report().acquire()), "an invalid head");
                thread::yield_now();
            }
            assert!(tx.push(&Ring(&other, bytes), &(i + 100).to_le_bytes(), || RecordHeader::message(8, None, i)));
        }
    });
    let mut rx = RingConsumer::new(bytes, RING, 8);
    let mut taken = 0;
    while taken < records {
        let ring = Ring(&memory, bytes);
        let Some(header) = rx.next_header(&ring) else {
            thread::yield_now();
            continue;
        };
        if !rx.admits(header) {
            bytes = rx.grow(header).unwrap_or_else(|| panic!("{header:?}"));
            continue;
        }
        assert_eq!((header.len(), header.head()), (8, taken));
        let mut payload = [0; 8];
        assert!(rx.copy(&ring, &mut payload));
        assert_eq!(u64::from_le_bytes(payload), taken + 100);
        rx.advance(8);
        memory.report().publish(rx.report());
        taken += 1;
    }
    producer.join().expect("producer");
    assert_eq!(rx.peek(&Ring(&memory, bytes)), 0, "a record that was never sent");
}

/// A message that arrives while the receiver falls asleep is seen or wakes the receiver, also in a second sleep.
#[test]
fn a_message_reaches_a_receiver_that_falls_asleep() {
    explore(|| {
        let memory = Arc::new(Words::new());
        let other = Arc::clone(&memory);
        let sender = thread::spawn(move || {
            let mut rings = 0;
            let mut tx = RingProducer::new(RING, RING);
            for _ in 0..2 {
                assert!(tx.push(&Ring(&other, RING), &[], || RecordHeader::message(0, None, 0)));
                rings += u32::from(other.bell().take());
            }
            rings
        });
        // A first sleep that ends by itself, then the sleep under test.
        memory.bell().set(WakeReason::Message);
        memory.bell().clear();
        memory.bell().set(WakeReason::Message);
        let mut rx = RingConsumer::new(RING, RING, 8);
        let mut seen = 0;
        while seen < 2 && rx.peek(&Ring(&memory, RING)) != 0 {
            rx.advance(0);
            seen += 1;
        }
        let rings = sender.join().expect("sender");
        assert!(seen == 2 || rings > 0, "asleep with {seen} of 2 messages seen");
    });
}

/// A message still wakes a sleeper that waits for messages only.
#[test]
fn a_report_wakes_only_a_sleeper_that_waits_for_it() {
    for waits in [WakeReason::Message, WakeReason::Anything] {
        explore(move || {
            let memory = Arc::new(Words::new());
            let other = Arc::clone(&memory);
            let peer = thread::spawn(move || {
                other.report().publish(64);
                let for_report = other.bell().take_if_anything();
                let mut tx = RingProducer::new(RING, RING);
                assert!(tx.push(&Ring(&other, RING), &[], || RecordHeader::message(0, None, 0)));
                (for_report, other.bell().take())
            });
            memory.bell().set(waits);
            let reported = memory.report().acquire() != 0;
            let rx = RingConsumer::new(RING, RING, 8);
            let message = rx.peek(&Ring(&memory, RING)) != 0;
            let (for_report, for_message) = peer.join().expect("peer");
            assert!(message || for_report || for_message, "asleep with a message");
            assert!(waits == WakeReason::Message || reported || for_report || for_message, "asleep with a report");
            assert!(waits == WakeReason::Anything || !for_report, "woken for a report without a waiter");
        });
    }
}

/// After a revocation the peer's copy has ended, and no other copy begins.
#[test]
fn a_revoked_window_is_not_accessed() {
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
        // The memory is no longer exposed: loom fails if the peer may access it at the same time.
        exposed.with_mut(|_| ());
        peer.join().expect("peer");
        assert!(!window.claim(7), "a revoked key still works");
    });
}

/// This also holds when the window is bound again.
#[test]
fn a_reader_of_a_key_sees_the_fields_of_its_bind() {
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
