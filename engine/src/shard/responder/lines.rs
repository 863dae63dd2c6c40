//! Queues of calls that wait for memory.
//!
//! There is one line for each buffer size of the pool, in order of arrival. A call that waits for one size delays no
//! call that needs another.
//!
//! A call that needs several buffers would never get them if later calls took the freed ones. It would block later
//! calls without limit if it kept the line. So it holds the line up for [`HOLD_UP`], then steps aside. Others then pass
//! for [`LET_PAST`] times as long before the next hold-up. A call that stepped aside continues once there is enough.
//!
//! A call that needs several sizes waits in the line of a missing one. If it then lacks another size, it moves to that
//! line. It holds up the line that it leaves in the same way: otherwise later calls would take the freed buffer.

use std::collections::VecDeque;

use crate::service::Unready;

/// Nanoseconds for which a call with several needs holds up later ones.
const HOLD_UP: u64 = 1_000_000_000;
/// Factor of the time in which others pass before the next hold-up.
const LET_PAST: u64 = 4;
/// Nanoseconds for which an application may keep buffers that others wait for.
const PATIENCE: u64 = 1_000_000_000;
/// Nanoseconds between two checks of the buffers' users.
const LOOK_EVERY: u64 = PATIENCE / 100;
/// Nanoseconds after a refusal in which new hopeless waiters are refused, too.
const SOON: u64 = 10 * LOOK_EVERY;

#[derive(Debug)]
pub(super) struct Waiting {
    pub(super) call: Unready,
    /// Waiting since, in nanoseconds.
    pub(super) since: u64,
    /// Whether it was logged.
    pub(super) told: bool,
}

impl Waiting {
    pub(super) fn new(call: Unready, since: u64) -> Self {
        Self { call, since, told: false }
    }

    /// Tries to continue it by `go_on`, which returns a call that still waits.
    pub(super) fn try_with(self, go_on: impl FnOnce(Unready) -> Option<Unready>) -> Option<Self> {
        let Self { call, since, told } = self;
        go_on(call).map(|call| Self { call, since, told })
    }

    /// Whether it has waited long enough to be logged, once.
    pub(super) fn is_to_be_told(&mut self, now: u64) -> bool {
        now >= self.since.saturating_add(PATIENCE) && !std::mem::replace(&mut self.told, true)
    }
}

#[derive(Debug, Default)]
pub(super) struct Lines {
    /// Lines by size.
    all: Vec<Line>,
    len: usize,
    /// Order of the lines, reused.
    order: Vec<(u64, usize)>,
}

/// Waiters for one size.
#[derive(Debug, Default)]
pub(super) struct Line {
    /// Bytes of the buffers.
    size: usize,
    calls: VecDeque<Waiting>,
    /// Calls that have stepped aside.
    aside: VecDeque<Waiting>,
    /// Next call of `aside` to try.
    next_aside: usize,
    hold: Option<Hold>,
    /// End of the time in which others pass.
    lets_past_until: u64,
    hope: Hope,
}

/// A hold-up by a call. Times are in nanoseconds.
#[derive(Clone, Copy, Debug)]
struct Hold {
    begun: u64,
    /// The call, by the start of its wait.
    who: u64,
    /// Whether it waits in another line now, and holds up the calls that arrived after it.
    left: bool,
}

/// Prospect that awaited buffers will be freed.
#[derive(Debug, Default)]
struct Hope {
    /// Start of the time without a user that would free them, in nanoseconds.
    none_since: Option<u64>,
    /// Next check.
    next_look: u64,
    /// Last refusal for lack of one.
    refused: u64,
    /// Progress of continued messages at the last check; changes with each part.
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

    /// Adds a waiter for buffers of `size` bytes.
    pub(super) fn push(&mut self, size: usize, waiting: Waiting, now: u64) {
        self.len += 1;
        let at = self.all.partition_point(|line| line.size < size);
        if self.all.get(at).is_none_or(|line| line.size != size) {
            self.all.insert(at, Line { size, ..Line::default() });
        }
        let line = &mut self.all[at];
        // Earlier waiters are gone, unless one was refused just now: new ones that its refusal admits are refused, too.
        if line.is_empty() && now > line.hope.refused.saturating_add(SOON) {
            line.hope.none_since = None;
        }
        line.insert(waiting);
    }

    /// Order of the lines by the wait of their first calls: its start, and the size. [Return](Self::keep_order) it.
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

    /// Sizes that new calls must not take, the shortest first.
    pub(super) fn awaited(&self, now: u64) -> impl Iterator<Item = usize> {
        self.awaited_before(u64::MAX, now)
    }

    /// Sizes that a call waiting since `since` must not take: others have waited longer.
    pub(super) fn awaited_before(&self, since: u64, now: u64) -> impl Iterator<Item = usize> {
        let closed = move |line: &&Line| {
            let before = |waiting: &Waiting| waiting.since < since;
            line.calls.front().is_some_and(before)
                || (line.is_held_by_a_departed_peer(now) && line.hold.is_some_and(|hold| hold.who < since))
                || (!line.lets_past(now) && line.aside.iter().any(before))
        };
        self.all.iter().filter(closed).map(|line| line.size)
    }

    /// Moves a call to another line: its size is free, but it lacks another.
    pub(super) fn move_to(&mut self, other: usize, from: usize, waiting: Waiting, now: u64) {
        if let Some(line) = self.line(from) {
            line.holds_up(Hold { begun: now, who: waiting.since, left: true }, now);
        }
        self.push(other, waiting, now);
    }

    /// End of a hold-up of this line by a call that has left it, if any.
    pub(super) fn is_held_until(&mut self, size: usize, now: u64) -> Option<u64> {
        let line = self.line(size)?;
        line.take_back(now);
        let hold = line.hold.filter(|hold| hold.left)?;
        if line.is_held_by_a_departed_peer(now) {
            let later = line.calls.front().is_some_and(|first| first.since > hold.who);
            return later.then_some(hold.begun.saturating_add(HOLD_UP));
        }
        line.end_hold(now);
        None
    }

    /// Takes the first call in the line for this size. Return it, unless its wait ends.
    pub(super) fn take_first(&mut self, size: usize, now: u64) -> Option<Waiting> {
        let line = self.line(size)?;
        line.take_back(now);
        let first = line.calls.pop_front();
        self.len -= usize::from(first.is_some());
        first
    }

    /// Number of calls that have stepped aside.
    pub(super) fn aside(&mut self, size: usize) -> usize {
        self.line(size).map_or(0, |line| line.aside.len())
    }

    /// Takes the next call that has stepped aside, while others pass: each has its turn. Return it, unless its wait
    /// ends.
    pub(super) fn take_aside(&mut self, size: usize, now: u64) -> Option<Waiting> {
        let line = self.line(size).filter(|line| line.lets_past(now))?;
        if line.next_aside >= line.aside.len() {
            line.next_aside = 0;
        }
        let waiting = line.aside.remove(line.next_aside)?;
        self.len -= 1;
        Some(waiting)
    }

    /// Returns a call to those that stepped aside.
    pub(super) fn put_aside(&mut self, size: usize, waiting: Waiting) {
        if let Some(line) = self.line(size) {
            line.aside.insert(line.next_aside.min(line.aside.len()), waiting);
            line.next_aside += 1;
            self.len += 1;
        }
    }

    /// Returns a call to the front.
    pub(super) fn put_back(&mut self, size: usize, waiting: Waiting) {
        if let Some(line) = self.line(size) {
            line.calls.push_front(waiting);
            self.len += 1;
        }
    }

    /// Makes a call that needs more buffers than are free step aside, or hold others up first.
    ///
    /// # Errors
    /// The end of the hold-up.
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

    /// Records that the call of this line, waiting since `since`, has continued.
    pub(super) fn went_on(&mut self, size: usize, since: u64, now: u64) {
        self.waits_no_more(since, now);
        if let Some(line) = self.line(size) {
            line.hope.none_since = None;
        }
    }

    /// Ends hold-ups of the call waiting since `since`.
    pub(super) fn waits_no_more(&mut self, since: u64, now: u64) {
        let held = |line: &&mut Line| line.hold.is_some_and(|hold| hold.who == since);
        self.all.iter_mut().filter(held).for_each(|line| line.end_hold(now));
    }

    /// Whether a check is due.
    pub(super) fn is_to_be_looked_at(&mut self, size: usize, now: u64) -> bool {
        self.line(size).is_some_and(|line| now >= line.hope.next_look)
    }

    /// Whether buffers were hopeless for too long. `hope` is true if a user will free some; `parts` is the progress of
    /// continued messages.
    ///
    /// # Errors
    /// The time at which they may be.
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

    /// Removes calls by a predicate.
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

    /// All waiting calls.
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

    /// Returns calls that stepped aside to the line, unless others pass.
    fn take_back(&mut self, now: u64) {
        if !self.lets_past(now) {
            while let Some(waiting) = self.aside.pop_back() {
                self.insert(waiting);
            }
        }
    }

    /// Inserts a call in order of arrival.
    fn insert(&mut self, waiting: Waiting) {
        let behind = self.calls.partition_point(|other| other.since <= waiting.since);
        self.calls.insert(behind, waiting);
    }

    /// Whether a call that left for another line, and may need this one again, holds up later calls.
    fn is_held_by_a_departed_peer(&self, now: u64) -> bool {
        self.hold.is_some_and(|hold| hold.left && now < hold.begun.saturating_add(HOLD_UP))
    }

    /// Whether a call holds up later ones: the start of the hold-up. A hold-up begun by another call continues.
    fn holds_up(&mut self, hold: Hold, now: u64) -> Option<u64> {
        if self.lets_past(now) {
            return None;
        }
        let begun = self.hold.map_or(now, |before| before.begun);
        // The earliest call keeps it.
        let first = self.hold.filter(|before| before.left && before.who < hold.who);
        self.hold = Some(first.unwrap_or(Hold { begun, ..hold }));
        if now < begun.saturating_add(HOLD_UP) {
            return Some(begun);
        }
        self.end_hold(now);
        None
    }

    /// Ends a hold-up: others pass.
    fn end_hold(&mut self, now: u64) {
        if let Some(hold) = self.hold.take() {
            let took = now.saturating_sub(hold.begun).min(HOLD_UP);
            self.lets_past_until = hold.begun.saturating_add((1 + LET_PAST) * took);
        }
    }
}
