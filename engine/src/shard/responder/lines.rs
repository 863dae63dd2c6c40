//! The lines in which calls wait for memory: one for each size of the pool's buffers, in the order in which they came.
//!
//! Who waits for one size is in nobody's way who needs another. Within a line a call that needs several buffers would
//! have to wait for ever if each that came free went to those behind it, and would hold all of them up for ever if none
//! did, as others may keep some for long. So it holds the line up for [`HOLD_UP`], then steps aside. However a hold-up
//! ends, others are let past for [`LET_PAST`] times as long before there is another one: lines flow for four fifths of the
//! time. Who has stepped aside goes on as soon as there is enough.
//!
//! Who needs buffers of several sizes waits in the line of one that there is too little of. When that one is there, and
//! another is not, it moves to the other's line, and holds up the one that it leaves in the same way: else the buffer
//! that came home for it would go to those behind it, each time.

use std::collections::VecDeque;

use crate::service::Unready;

/// Nanoseconds that a call which needs several buffers holds up those behind it.
const HOLD_UP: u64 = 1_000_000_000;
/// For so many times as long as it did others are let past before one does again.
const LET_PAST: u64 = 4;
/// Nanoseconds that an application may keep what others wait for.
const PATIENCE: u64 = 1_000_000_000;
/// Nanoseconds between two looks at who has it.
const LOOK_EVERY: u64 = PATIENCE / 100;
/// Nanoseconds in which those that a refusal lets go on come, who wait for the same in vain.
const SOON: u64 = 10 * LOOK_EVERY;

/// A call that waits.
#[derive(Debug)]
pub(super) struct Waiting {
    call: Unready,
    /// In nanoseconds.
    since: u64,
    /// The log was told.
    told: bool,
}

impl Waiting {
    /// One that begins to wait.
    pub(super) fn new(call: Unready, since: u64) -> Self {
        Self { call, since, told: false }
    }

    /// What waits.
    pub(super) fn call(&self) -> &Unready {
        &self.call
    }

    /// It waits no more.
    pub(super) fn end(self) -> Unready {
        self.call
    }

    /// Tries to go on with it: whoever tries gives the call back that waits on.
    pub(super) fn try_with(self, go_on: impl FnOnce(Unready) -> Option<Unready>) -> Option<Self> {
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
    /// Which of them is tried next.
    next_aside: usize,
    hold: Option<Hold>,
    /// Others are let past until then.
    lets_past_until: u64,
    hope: Hope,
}

/// A call holds up those behind it. Times are in nanoseconds.
#[derive(Clone, Copy, Debug)]
struct Hold {
    begun: u64,
    /// Which one: since when it waits.
    who: u64,
    /// It waits in another line by now, and holds up those that came after it.
    left: bool,
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
    /// What had come of messages in parts at the last look: another number once more has.
    parts: u64,
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
        if line.is_empty() && now > line.hope.refused.saturating_add(SOON) {
            line.hope.none_since = None;
        }
        line.insert(waiting);
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
        self.awaited_before(u64::MAX, now)
    }

    /// Those that whoever waits since then is to leave alone: others have waited for longer.
    pub(super) fn awaited_before(&self, since: u64, now: u64) -> impl Iterator<Item = usize> {
        let closed = move |line: &&Line| {
            let before = |waiting: &Waiting| waiting.since < since;
            line.calls.front().is_some_and(before)
                || (line.is_held_by_who_left(now) && line.hold.is_some_and(|hold| hold.who < since))
                || (!line.lets_past(now) && line.aside.iter().any(before))
        };
        self.all.iter().filter(closed).map(|line| line.size)
    }

    /// A call of this line moves to another one's: what it waited for is there, and something else is not.
    pub(super) fn move_to(&mut self, other: usize, from: usize, waiting: Waiting, now: u64) {
        if let Some(line) = self.line(from) {
            line.holds_up(Hold { begun: now, who: waiting.since, left: true }, now);
        }
        self.push(other, waiting, now);
    }

    /// Until when the line for this size is held up by one that has left it, if it is.
    pub(super) fn is_held_until(&mut self, size: usize, now: u64) -> Option<u64> {
        let line = self.line(size)?;
        line.take_back(now);
        let hold = line.hold.filter(|hold| hold.left)?;
        if line.is_held_by_who_left(now) {
            let later = line.calls.front().is_some_and(|first| first.since > hold.who);
            return later.then_some(hold.begun.saturating_add(HOLD_UP));
        }
        line.end_hold(now);
        None
    }

    /// The first in the line for this size. It is to come back, unless it waits no more.
    pub(super) fn take_first(&mut self, size: usize, now: u64) -> Option<Waiting> {
        let line = self.line(size)?;
        line.take_back(now);
        let first = line.calls.pop_front();
        self.len -= usize::from(first.is_some());
        first
    }

    /// How many have stepped aside.
    pub(super) fn aside(&mut self, size: usize) -> usize {
        self.line(size).map_or(0, |line| line.aside.len())
    }

    /// The next of those that have stepped aside, while others are let past: all have their turn. It is to come back,
    /// unless it waits no more.
    pub(super) fn take_aside(&mut self, size: usize, now: u64) -> Option<Waiting> {
        let line = self.line(size).filter(|line| line.lets_past(now))?;
        if line.next_aside >= line.aside.len() {
            line.next_aside = 0;
        }
        let waiting = line.aside.remove(line.next_aside)?;
        self.len -= 1;
        Some(waiting)
    }

    /// It goes on waiting there.
    pub(super) fn put_aside(&mut self, size: usize, waiting: Waiting) {
        if let Some(line) = self.line(size) {
            line.aside.insert(line.next_aside.min(line.aside.len()), waiting);
            line.next_aside += 1;
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
        if let Some(begun) = line.holds_up(Hold { begun: now, who: waiting.since, left: false }, now) {
            line.calls.push_front(waiting);
            return Err(begun.saturating_add(HOLD_UP));
        }
        line.aside.push_back(waiting);
        Ok(())
    }

    /// One of this line goes on, that waited since then.
    pub(super) fn went_on(&mut self, size: usize, since: u64, now: u64) {
        self.waits_no_more(since, now);
        if let Some(line) = self.line(size) {
            line.hope.none_since = None;
        }
    }

    /// Who waited since then does not wait any more: it holds nobody up.
    pub(super) fn waits_no_more(&mut self, since: u64, now: u64) {
        let held = |line: &&mut Line| line.hold.is_some_and(|hold| hold.who == since);
        self.all.iter_mut().filter(held).for_each(|line| line.end_hold(now));
    }

    /// It is time to look whether there is hope.
    pub(super) fn is_to_be_looked_at(&mut self, size: usize, now: u64) -> bool {
        self.line(size).is_some_and(|line| now >= line.hope.next_look)
    }

    /// Whether there has been no hope for too long; `hope` if there is some now, `parts` says what has come of
    /// messages in parts.
    ///
    /// # Errors
    /// When that may be, if it goes on.
    pub(super) fn is_given_up(&mut self, size: usize, now: u64, hope: bool, parts: u64) -> Result<(), u64> {
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
    pub(super) fn retain(&mut self, now: u64, keeps: impl Fn(&Unready) -> bool, mut drop: impl FnMut(Unready)) {
        let mut gone = Vec::new();
        for line in &mut self.all {
            for calls in [&mut line.calls, &mut line.aside] {
                for waiting in std::mem::take(calls) {
                    match keeps(&waiting.call) {
                        true => calls.push_back(waiting),
                        false => {
                            self.len -= 1;
                            gone.push(waiting.since);
                            drop(waiting.call);
                        }
                    }
                }
            }
        }
        gone.into_iter().for_each(|since| self.waits_no_more(since, now));
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

    /// Those that have stepped aside are in the line again when nobody is let past.
    fn take_back(&mut self, now: u64) {
        if !self.lets_past(now) {
            while let Some(waiting) = self.aside.pop_back() {
                self.insert(waiting);
            }
        }
    }

    /// In the order in which they came.
    fn insert(&mut self, waiting: Waiting) {
        let behind = self.calls.partition_point(|other| other.since <= waiting.since);
        self.calls.insert(behind, waiting);
    }

    /// One that has left for another line, and may still come to need this one, holds up those that came after it.
    fn is_held_by_who_left(&self, now: u64) -> bool {
        self.hold.is_some_and(|hold| hold.left && now < hold.begun.saturating_add(HOLD_UP))
    }

    /// Whether a call holds up those behind it, and since when there is a hold-up: one that another one began goes on.
    fn holds_up(&mut self, hold: Hold, now: u64) -> Option<u64> {
        if self.lets_past(now) {
            return None;
        }
        let begun = self.hold.map_or(now, |before| before.begun);
        // Who came first keeps it.
        let first = self.hold.filter(|before| before.left && before.who < hold.who);
        self.hold = Some(first.unwrap_or(Hold { begun, ..hold }));
        if now < begun.saturating_add(HOLD_UP) {
            return Some(begun);
        }
        self.end_hold(now);
        None
    }

    /// It has ended, in whatever way: others are let past.
    fn end_hold(&mut self, now: u64) {
        if let Some(hold) = self.hold.take() {
            let took = now.saturating_sub(hold.begun).min(HOLD_UP);
            self.lets_past_until = hold.begun.saturating_add((1 + LET_PAST) * took);
        }
    }
}
