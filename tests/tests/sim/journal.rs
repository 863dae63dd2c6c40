//! The events of a run as one hash, and optionally as text.
//!
//! Two runs of a seed are equal if their hashes are equal.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fmt::{self, Write};
use std::rc::Rc;

use rpcrdma::fabric::testing::chaos::ChaosStats;
use rpcrdma::shard::SimulatedTime;

/// One participant's handle to the journal of a run.
///
/// Events must not contain keys of memory windows, because such keys are random.
#[derive(Clone, Debug)]
pub(crate) struct Journal {
    participant: Rc<str>,
    shared: Rc<Shared>,
}

#[derive(Debug)]
struct Shared {
    time: SimulatedTime,
    trace: bool,
    events: Cell<u64>,
    digest: Cell<u64>,
    tally: RefCell<Tally>,
}

/// Counts by event.
pub(crate) type Tally = BTreeMap<&'static str, u64>;

impl Journal {
    /// Creates an empty journal. With `trace`, the journal also prints each event.
    pub(crate) fn new(time: SimulatedTime, trace: bool) -> Self {
        let shared = Shared {
            time,
            trace,
            events: Cell::new(0),
            digest: Cell::new(0xcbf2_9ce4_8422_2325),
            tally: RefCell::default(),
        };
        Self { participant: "world".into(), shared: Rc::new(shared) }
    }

    /// Creates a handle for another participant.
    pub(crate) fn handle_for(&self, participant: &str) -> Self {
        Self { participant: participant.into(), shared: Rc::clone(&self.shared) }
    }

    pub(crate) fn participant(&self) -> &str {
        &self.participant
    }

    /// Records an event.
    pub(crate) fn note(&self, what: fmt::Arguments<'_>) {
        let Shared { time, trace, events, digest, .. } = &*self.shared;
        let mut hash = Fnv(digest.get());
        // The hash accepts any text.
        let _ = write!(hash, "{} {} {what}", time.now(), self.participant);
        digest.set(hash.0);
        events.set(events.get() + 1);
        if *trace {
            println!("{:>10} {:<8} {what}", time.now(), self.participant);
        }
    }

    /// Prints details of the last event if tracing is on. The hash does not include them.
    pub(crate) fn trace(&self, what: impl FnOnce() -> String) {
        if self.shared.trace {
            println!("{:>19}   {}", "", what());
        }
    }

    /// Counts an event for the coverage check.
    pub(crate) fn count(&self, what: &'static str, times: u64) {
        if times != 0 {
            *self.shared.tally.borrow_mut().entry(what).or_default() += times;
        }
    }

    /// Counts the faults that a device injected.
    pub(crate) fn count_chaos(&self, stats: &ChaosStats) {
        self.count("chaos: requests failed", stats.failed);
        self.count("chaos: completions delayed", stats.delayed);
        self.count("chaos: polls reordered", stats.reordered);
        self.count("chaos: connections broken", stats.disconnected);
        self.count("chaos: posts cut short", stats.cut_short);
    }

    /// Number of events, and their hash.
    pub(crate) fn digest(&self) -> (u64, u64) {
        (self.shared.events.get(), self.shared.digest.get())
    }

    pub(crate) fn tally(&self) -> Tally {
        self.shared.tally.borrow().clone()
    }
}

/// FNV-1a.
struct Fnv(u64);

impl Write for Fnv {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for byte in text.bytes() {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
        Ok(())
    }
}
