//! The lines in which calls wait for memory: one for each size of the pool's buffers, in the order in which they came.
//!
//! Who waits for one size is in nobody's way who needs another. Within a line a call that needs several buffers would
//! have to wait for ever if each that came free went to those behind it, and would hold all of them up for ever if none
//! did, as others may keep some for long. So it holds the line up for [`HOLD_UP`], then steps aside, and does so
//! again [`LET_PAST`] later. Meanwhile it goes on as soon as there is enough.

use std::collections::VecDeque;

use crate::service::OwnedCall;

/// Nanoseconds that a call which needs several buffers holds up those behind it.
const HOLD_UP: u64 = 1_000_000_000;
/// Nanoseconds until it may again.
const LET_PAST: u64 = 4 * HOLD_UP;
/// Nanoseconds that an application may keep what others wait for.
const PATIENCE: u64 = 1_000_000_000;
/// Nanoseconds between two looks at who has it.
const LOOK_EVERY: u64 = PATIENCE / 100;

/// A call that waits.
#[derive(Debug)]
pub(super) struct Waiting {
    call: Box<OwnedCall>,
    /// In nanoseconds.
    since: u64,
    /// The log was told.
    told: bool,
}

impl Waiting {
    /// One that begins to wait.
    pub(super) fn new(call: Box<OwnedCall>, since: u64) -> Self {
        Self { call, since, told: false }
    }

    /// What waits.
    pub(super) fn call(&self) -> &OwnedCall {
        &self.call
    }

    /// It waits no more.
    pub(super) fn end(self) -> Box<OwnedCall> {
        self.call
    }

    /// Tries to go on with it: whoever tries gives the call back that waits on.
    pub(super) fn try_with(self, go_on: impl FnOnce(Box<OwnedCall>) -> Option<Box<OwnedCall>>) -> Option<Self> {
        let Self { call, since, told } = self;
        go_on(call).map(|call| Self { call, since, told })
    }

    /// Since when, in nanoseconds.
    pub(super) fn since(&self) -> u64 {
        self.since
    }

    /// The log was told.
    #[cfg(test)]
    pub(super) fn is_told(&self) -> bool {
        self.told
    }

    /// It has waited for so long that the log is to be told, once.
    pub(super) fn is_to_be_told(&mut self, now: u64) -> bool {
        now >= self.since.saturating_add(PATIENCE) && !std::mem::replace(&mut self.told, true)
    }
}

/// All lines.
#[derive(Debug, Default)]
pub(super) struct Lines {
    /// By size.
    all: Vec<Line>,
    len: usize,
    /// In which order they are gone through, to be used again.
    order: Vec<(u64, usize)>,
}

/// Those that wait for one size.
#[derive(Debug, Default)]
pub(super) struct Line {
    /// Bytes of the buffers.
    size: usize,
    calls: VecDeque<Waiting>,
    /// Those that have stepped aside.
    aside: VecDeque<Waiting>,
    /// Since when the first holds up others, in nanoseconds.
    holds_up_since: Option<u64>,
    /// Others are let past until then.
    lets_past_until: u64,
    hope: Hope,
}

/// Whether what is waited for will come home.
#[derive(Debug, Default)]
struct Hope {
    /// Since when nobody has been known who would bring it home, in nanoseconds.
    none_since: Option<u64>,
    /// When that is looked at again.
    next_look: u64,
    /// When a call was last refused for that.
    refused: u64,
    /// Bytes that had come of messages in parts at the last look.
    parts: usize,
}

impl Lines {
    #[inline(always)]
    pub(super) fn is_empty(&self) -> bool {
        self.len == 0
    }

    #[inline(always)]
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// One more waits, for buffers of `size` bytes.
    pub(super) fn push(&mut self, size: usize, waiting: Waiting, now: u64) {
        self.len += 1;
        let at = self.all.partition_point(|line| line.size < size);
        if self.all.get(at).is_none_or(|line| line.size != size) {
            self.all.insert(at, Line { size, ..Line::default() });
        }
        let line = &mut self.all[at];
        // Whoever waited before is gone: unless he was refused just now, as those are that his refusal lets go on.
        if line.is_empty() {
            line.holds_up_since = None;
            if now > line.hope.refused.saturating_add(PATIENCE) {
                line.hope.none_since = None;
            }
        }
        let behind = line.calls.partition_point(|other| other.since <= waiting.since);
        line.calls.insert(behind, waiting);
    }

    /// The lines by how long the first of each has waited: since when, and for which size. To be
    /// [given back](Self::keep_order).
    pub(super) fn take_order(&mut self) -> Vec<(u64, usize)> {
        let mut order = std::mem::take(&mut self.order);
        let first = |line: &Line| line.aside.front().or(line.calls.front()).map(|waiting| (waiting.since, line.size));
        order.extend(self.all.iter().filter_map(first));
        order.sort_unstable();
        order
    }

    pub(super) fn keep_order(&mut self, mut order: Vec<(u64, usize)>) {
        order.clear();
        self.order = order;
    }

    /// Those sizes that whoever comes is to leave alone, the shortest first.
    pub(super) fn awaited(&self, now: u64) -> impl Iterator<Item = usize> {
        let closed = move |line: &&Line| !line.calls.is_empty() || !(line.aside.is_empty() || line.lets_past(now));
        self.all.iter().filter(closed).map(|line| line.size)
    }

    /// The first in the line for this size. It is to come back, unless it waits no more.
    pub(super) fn take_first(&mut self, size: usize, now: u64) -> Option<Waiting> {
        let line = self.line(size)?;
        if !line.lets_past(now) {
            // In the order in which they came.
            while let Some(waiting) = line.aside.pop_back() {
                line.calls.push_front(waiting);
            }
        }
        let first = line.calls.pop_front();
        self.len -= usize::from(first.is_some());
        first
    }

    /// The first of those that have stepped aside, while others are let past. It is to come back, unless it waits no more.
    pub(super) fn take_aside(&mut self, size: usize, now: u64) -> Option<Waiting> {
        let first = self.line(size).filter(|line| line.lets_past(now))?.aside.pop_front()?;
        self.len -= 1;
        Some(first)
    }

    /// It goes on waiting there.
    pub(super) fn put_aside(&mut self, size: usize, waiting: Waiting) {
        if let Some(line) = self.line(size) {
            line.aside.push_front(waiting);
            self.len += 1;
        }
    }

    /// It goes on waiting, as the first.
    pub(super) fn put_back(&mut self, size: usize, waiting: Waiting) {
        if let Some(line) = self.line(size) {
            line.calls.push_front(waiting);
            self.len += 1;
        }
    }

    /// It needs more buffers than are free, and others may need fewer: it steps aside, or holds them up until then.
    ///
    /// # Errors
    /// The latter.
    pub(super) fn step_aside(&mut self, size: usize, waiting: Waiting, now: u64) -> Result<(), u64> {
        self.len += 1;
        let Some(line) = self.line(size) else { return Ok(()) };
        if line.holds_up(now) {
            line.calls.push_front(waiting);
            return Err(line.holds_up_since.unwrap_or(now).saturating_add(HOLD_UP));
        }
        line.aside.push_back(waiting);
        Ok(())
    }

    /// One of this line goes on.
    pub(super) fn went_on(&mut self, size: usize) {
        if let Some(line) = self.line(size) {
            line.holds_up_since = None;
            line.hope.none_since = None;
        }
    }

    /// It is time to look whether there is hope.
    pub(super) fn is_to_be_looked_at(&mut self, size: usize, now: u64) -> bool {
        self.line(size).is_some_and(|line| now >= line.hope.next_look)
    }

    /// Whether there has been no hope for too long; `hope` if there is some now, `parts` bytes of messages in parts have
    /// come so far.
    ///
    /// # Errors
    /// When that may be, if it goes on.
    pub(super) fn is_given_up(&mut self, size: usize, now: u64, hope: bool, parts: usize) -> Result<(), u64> {
        let Some(Line { hope: of, .. }) = self.line(size) else { return Err(u64::MAX) };
        of.next_look = now.saturating_add(LOOK_EVERY);
        if hope || std::mem::replace(&mut of.parts, parts) != parts {
            of.none_since = None;
            return Err(u64::MAX);
        }
        let refused_at = of.none_since.get_or_insert(now).saturating_add(PATIENCE);
        if now < refused_at {
            of.next_look = of.next_look.min(refused_at);
            return Err(refused_at);
        }
        of.refused = now;
        of.next_look = now;
        Ok(())
    }

    /// Takes away those that are not to be kept.
    pub(super) fn retain(&mut self, keeps: impl Fn(&OwnedCall) -> bool, mut drop: impl FnMut(Box<OwnedCall>)) {
        for line in &mut self.all {
            for calls in [&mut line.calls, &mut line.aside] {
                for waiting in std::mem::take(calls) {
                    match keeps(&waiting.call) {
                        true => calls.push_back(waiting),
                        false => {
                            self.len -= 1;
                            drop(waiting.call);
                        }
                    }
                }
            }
        }
    }

    /// All that wait.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Waiting> {
        self.all.iter().flat_map(|line| line.aside.iter().chain(&line.calls))
    }

    fn line(&mut self, size: usize) -> Option<&mut Line> {
        self.all.iter_mut().find(|line| line.size == size)
    }
}

impl Line {
    fn is_empty(&self) -> bool {
        self.calls.is_empty() && self.aside.is_empty()
    }

    fn lets_past(&self, now: u64) -> bool {
        now < self.lets_past_until
    }

    /// Whether the first, which needs more than there is, holds up those behind it.
    fn holds_up(&mut self, now: u64) -> bool {
        if self.lets_past(now) {
            return false;
        }
        let holds_up = now < self.holds_up_since.get_or_insert(now).saturating_add(HOLD_UP);
        if !holds_up {
            self.holds_up_since = None;
            self.lets_past_until = now.saturating_add(LET_PAST);
        }
        holds_up
    }
}
