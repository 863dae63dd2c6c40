//! The queue of waiting calls, in order of arrival.

use std::collections::{HashMap, VecDeque};

use log::Level;

use super::{Deficit, Demand, QuotaOwner};
use crate::fabric::{Fabric, QpId};
use crate::service::Unready;
use crate::shard::clock::nanoseconds;
use crate::shard::connection::{Conn, ConnRef};
use crate::shard::context::ShardContext;

/// Longest time for which a call reserves buffers, in nanoseconds.
const RESERVATION_TIME: u64 = 1_000_000_000;
/// Time without a reservation after one has ended, as a multiple of its duration.
const PAUSE_FACTOR: u64 = 4;
/// Initial pause for a host whose reservation ended before its call could start, in nanoseconds. Each further such
/// reservation doubles the pause.
const FIRST_HOST_PAUSE: u64 = PAUSE_FACTOR * RESERVATION_TIME;
/// Longest pause for a host, in nanoseconds.
const LAST_HOST_PAUSE: u64 = 16 * FIRST_HOST_PAUSE;
/// Time for which a call may be unservable until it is refused, and time of waiting until it is logged, in nanoseconds.
/// A call is unservable while no running call uses a suitable buffer, so that none is likely to be freed.
const WAIT_LIMIT: u64 = 1_000_000_000;
/// Nanoseconds between two searches for unservable calls.
const SEARCH_INTERVAL: u64 = WAIT_LIMIT / 100;

/// What a call waits for.
#[derive(Clone, Copy, Debug, thiserror::Error)]
pub(in crate::shard) enum WaitCause {
    /// RDMA Reads of its connection.
    #[error("its connection has as many outstanding RDMA Reads as allowed (limits.max_reads, limits.max_read_bytes)")]
    Reads,
    /// An earlier call of its connection, which is waiting, too.
    #[error("an earlier call of its connection waits")]
    Earlier(Deficit),
    /// The quota of its connection or host, for this buffer.
    #[error("buffers are scarce, and its connection or host has used its share of them: {0}")]
    Quota(Deficit),
    /// A buffer.
    #[error("{0}")]
    Buffer(Deficit),
}

impl WaitCause {
    /// Whether the call lacks a buffer, so that each turn has a pass. Any other call waits for work of its own
    /// connection or host, and only full passes try it.
    pub(in crate::shard) fn lacks_buffer(&self) -> bool {
        matches!(self, Self::Buffer(_))
    }
}

/// A waiting call.
#[derive(Debug)]
pub(in crate::shard) struct QueuedCall {
    pub(in crate::shard) call: Unready,
    pub(in crate::shard) cause: WaitCause,
    pub(in crate::shard) ticket: QueueTicket,
}

/// A call's place in the queue. Times are in nanoseconds.
#[derive(Clone, Copy, Debug)]
pub(in crate::shard) struct QueueTicket {
    /// Number in order of arrival.
    number: u64,
    since: u64,
    /// Time since which the call has been unservable; `None` if it is servable.
    unservable_since: Option<u64>,
    /// Whether its wait was logged.
    reported: bool,
}

/// Right of one call to take the last buffers of the sizes that it needs.
#[derive(Clone, Copy, Debug)]
struct BufferReservation {
    /// Number of the call.
    call: u64,
    owner: QuotaOwner,
    /// Start of the reservation, in nanoseconds.
    begun: u64,
}

/// Time in which the calls of a host get no reservation, because an earlier one ended before its call could start.
#[derive(Clone, Copy, Debug)]
struct HostPause {
    /// Nanoseconds.
    length: u64,
    /// End, in nanoseconds.
    until: u64,
}

/// A size with fewer free buffers than a call of the current pass needed.
#[derive(Clone, Copy, Debug)]
struct Shortfall {
    size: usize,
    /// Number of buffers that the call needed.
    needed_count: usize,
}

#[derive(Debug, Default)]
pub(in crate::shard) struct WaitQueue {
    calls: VecDeque<QueuedCall>,
    /// During a pass: the calls that the pass has not reached yet.
    remaining: VecDeque<QueuedCall>,
    /// Number of the next call.
    next: u64,
    /// Number of the current pass. Connections record the last pass in which one of their calls stayed blocked.
    pass: u32,
    /// Buffer sizes that calls wait for, and some that no call waits for any more.
    sizes: Vec<usize>,
    /// Whether the current pass, or the next one if none is running, also tries calls that wait for their own
    /// connection or host.
    is_full_pass: bool,
    /// Shortfalls that this pass has found.
    shortfalls: Vec<Shortfall>,
    /// Sizes of the buffers that waiting calls lacked before they started, since the last search.
    served_sizes: Vec<usize>,
    reservation: Option<BufferReservation>,
    /// End of the time without a reservation, in nanoseconds.
    paused_until: u64,
    host_pauses: HashMap<QuotaOwner, HostPause>,
    /// Next search for unservable calls, in nanoseconds.
    next_search: u64,
    /// Progress of continued messages at the last search, a value that changes with each part.
    parts: u64,
    /// Whether a call waits for a buffer.
    lacks_buffers: bool,
    /// Whether the next turn has a pass.
    due: bool,
}

impl WaitQueue {
    #[inline]
    pub(in crate::shard) fn is_empty(&self) -> bool {
        self.calls.is_empty()
    }

    pub(in crate::shard) fn len(&self) -> usize {
        self.calls.len() + self.remaining.len()
    }

    /// Whether the next turn has a pass.
    #[inline]
    pub(in crate::shard) fn is_due(&self) -> bool {
        self.due
    }

    /// Requests a pass: memory, a quota or RDMA Reads may have become available.
    pub(in crate::shard) fn request_pass(&mut self) {
        self.is_full_pass |= !self.is_empty();
        self.due |= !self.is_empty();
    }

    /// Start of the longest wait, in nanoseconds.
    pub(in crate::shard) fn waiting_since(&self) -> Option<u64> {
        self.calls.front().map(|first| first.ticket.since)
    }

    /// Whether a call waits for a buffer, and not for its own connection or host.
    pub(in crate::shard) fn lacks_buffers(&self) -> bool {
        self.lacks_buffers
    }

    /// Adds a call that starts to wait.
    pub(in crate::shard) fn push<F: Fabric>(
        &mut self,
        cx: &mut ShardContext<F>,
        conn: &mut Conn,
        call: Unready,
        cause: WaitCause,
        demand: &Demand,
    ) {
        let since = cx.clock.read();
        let ticket = QueueTicket { number: self.next, since, unservable_since: None, reported: false };
        self.next += 1;
        self.lacks_buffers |= cause.lacks_buffer();
        self.keep(cx, conn, QueuedCall { call, cause, ticket }, demand, since);
        self.due = true;
    }

    /// Begins a pass, and releases all withheld sizes, because the pass decides anew which to withhold.
    pub(in crate::shard) fn begin_pass<F: Fabric>(&mut self, cx: &mut ShardContext<F>, now: u64) {
        cx.memory.release_sizes();
        self.pass = self.pass.wrapping_add(1);
        self.shortfalls.clear();
        if self.is_full_pass {
            self.sizes.clear();
        }
        if self.reservation.is_some_and(|reservation| now >= reservation.begun + RESERVATION_TIME) {
            self.end_reservation(now);
        }
        std::mem::swap(&mut self.calls, &mut self.remaining);
    }

    /// Takes the next call that may get memory. The caller [keeps](Self::keep) it, or lets it [start](Self::start).
    ///
    /// A pass that is not full ends once all sizes are withheld, so that its cost does not grow with the queue.
    pub(in crate::shard) fn next_candidate<F: Fabric>(&mut self, cx: &ShardContext<F>) -> Option<QueuedCall> {
        loop {
            if !self.is_full_pass && self.sizes.iter().all(|&size| cx.memory.is_size_withheld(size)) {
                while let Some(waiting) = self.calls.pop_back() {
                    self.remaining.push_front(waiting);
                }
                std::mem::swap(&mut self.calls, &mut self.remaining);
                return None;
            }
            let waiting = self.remaining.pop_front()?;
            let must_skip = match &waiting.cause {
                WaitCause::Buffer(Deficit { size, needed_count, .. }) => {
                    self.add_size(*size);
                    // An earlier call needs the same buffers, or fewer of them.
                    cx.memory.is_size_withheld(*size)
                        || self
                            .shortfalls
                            .iter()
                            .any(|earlier| earlier.size == *size && earlier.needed_count <= *needed_count)
                }
                _ if !self.is_full_pass => true,
                // An earlier call of the connection is blocked.
                _ => {
                    let conn = cx.conns.get(ConnRef(waiting.call.qp()));
                    conn.is_some_and(|conn| conn.served.blocked_in() == Some(self.pass))
                }
            };
            if !must_skip {
                return Some(waiting);
            }
            self.calls.push_back(waiting);
        }
    }

    fn add_size(&mut self, size: usize) {
        if !self.sizes.contains(&size) {
            self.sizes.push(size);
        }
    }

    /// Keeps a call that still waits, and withholds buffers for it from later calls.
    pub(in crate::shard) fn keep<F: Fabric>(
        &mut self,
        cx: &mut ShardContext<F>,
        conn: &mut Conn,
        waiting: QueuedCall,
        demand: &Demand,
        now: u64,
    ) {
        match &waiting.cause {
            WaitCause::Buffer(deficit) => {
                self.add_size(deficit.size);
                let contested = demand.contested(&cx.memory);
                if deficit.free == 0 {
                    // Rule 3, order: later calls must not take the next buffer of this size.
                    cx.memory.withhold_size(deficit.size);
                } else {
                    // Later calls of this pass that need as many of these buffers cannot start either.
                    self.shortfalls.push(Shortfall { size: deficit.size, needed_count: deficit.needed_count });
                }
                // Rule 4, reservation: for a call that could get a part of its demand.
                let could_get_part = contested.iter().any(|&(_, free)| free > 0);
                if could_get_part && self.may_reserve(waiting.ticket, conn.quota_owner(), now) {
                    contested.iter().for_each(|&(size, _)| cx.memory.withhold_size(size));
                }
            }
            WaitCause::Reads | WaitCause::Earlier(_) | WaitCause::Quota(_) => {
                conn.served.block(&waiting.call, self.pass)
            }
        }
        // Unsignaled Sends of the connection may hold buffers that the call needs, although they have completed.
        cx.request_completion(conn);
        self.calls.push_back(waiting);
    }

    /// Records the start of a call that waited for this cause.
    pub(in crate::shard) fn start(&mut self, ticket: QueueTicket, cause: &WaitCause, now: u64) {
        if let WaitCause::Buffer(Deficit { size, .. }) = cause
            && !self.served_sizes.contains(size)
        {
            self.served_sizes.push(*size);
        }
        if let Some(reservation) = self.end_reservation_of(ticket, now) {
            self.host_pauses.remove(&reservation.owner);
        }
    }

    /// Ends the reservation of a call that no longer waits, if it has one, and returns it.
    fn end_reservation_of(&mut self, ticket: QueueTicket, now: u64) -> Option<BufferReservation> {
        let is_its_own = self.reservation.is_some_and(|reservation| reservation.call == ticket.number);
        if is_its_own { self.end_reservation(now) } else { None }
    }

    /// Ends a pass.
    pub(in crate::shard) fn end_pass<F: Fabric>(&mut self, cx: &mut ShardContext<F>, now: u64) {
        self.lacks_buffers = self.calls.iter().any(|waiting| waiting.cause.lacks_buffer());
        (self.due, self.is_full_pass) = (self.lacks_buffers, false);
        if !self.is_empty() {
            cx.schedule.wake_by(now + nanoseconds(cx.config.poll.control_interval));
        }
        if let Some(reservation) = self.reservation {
            cx.schedule.wake_by(reservation.begun + RESERVATION_TIME);
        }
    }

    /// Removes the calls that have been unservable for a second, and logs long waits.
    pub(in crate::shard) fn take_unservable<F: Fabric>(
        &mut self,
        cx: &mut ShardContext<F>,
        now: u64,
    ) -> Vec<QueuedCall> {
        if now < self.next_search || self.is_empty() {
            return Vec::new();
        }
        self.report_long_waits(cx, now);
        self.next_search = now + SEARCH_INTERVAL;
        let frees_memory = self.update_progress(cx);
        let in_use: Vec<usize> =
            cx.memory.pool.sizes().filter(|&size| frees_memory || self.is_in_use(cx, size)).collect();
        let mut unservable = Vec::new();
        for (at, QueuedCall { cause, ticket, .. }) in self.calls.iter_mut().enumerate() {
            // The time limit also runs for a call that waits behind an unservable one of its connection or host.
            let range = match cause {
                WaitCause::Buffer(deficit) | WaitCause::Quota(deficit) | WaitCause::Earlier(deficit) => deficit.range,
                WaitCause::Reads => continue,
            };
            if in_use.iter().chain(&self.served_sizes).any(|size| (range.0..=range.1).contains(size)) {
                ticket.unservable_since = None;
                continue;
            }
            let refused_at = *ticket.unservable_since.get_or_insert(now) + WAIT_LIMIT;
            if now < refused_at {
                self.next_search = self.next_search.min(refused_at);
            } else if cause.lacks_buffer() {
                unservable.push(at);
            }
        }
        self.served_sizes.clear();
        cx.schedule.wake_by(self.next_search);
        let mut unservable: Vec<_> = unservable.into_iter().rev().filter_map(|at| self.calls.remove(at)).collect();
        unservable.reverse();
        for waiting in &unservable {
            self.end_reservation_of(waiting.ticket, now);
        }
        unservable
    }

    /// Returns whether a connection will free memory: one with a call in progress, or with a continued message that has
    /// grown since the last search. Records the progress of these messages for the next search.
    fn update_progress<F: Fabric>(&mut self, cx: &mut ShardContext<F>) -> bool {
        let ShardContext { conns, fabric, .. } = cx;
        let parts = conns.iter().filter_map(|conn| conn.assembling.progress());
        let parts = parts.fold(0, u64::wrapping_add);
        // A connection also counts while the device sends from frozen buffers.
        std::mem::replace(&mut self.parts, parts) != parts || !conns.iter().all(|conn| conn.holds_nothing(fabric))
    }

    /// Whether running calls use buffers of this size, and not just waiting calls, the application, or unfinished
    /// messages.
    fn is_in_use<F: Fabric>(&self, cx: &ShardContext<F>, size: usize) -> bool {
        let waiting = self.calls.iter().filter(|waiting| waiting.call.message_capacity() == Some(size)).count();
        let of_size = |conn: &&Conn| conn.assembling.buf.as_ref().is_some_and(|buf| buf.capacity() == size);
        let unfinished = cx.conns.iter().filter(of_size).count();
        cx.memory.pool.busy_within(size, size) > waiting + unfinished + cx.memory.receives.waiting_of(size)
    }

    /// Logs the calls that have waited for a second, each once.
    fn report_long_waits<F: Fabric>(&mut self, cx: &mut ShardContext<F>, now: u64) {
        let all = self.calls.len();
        let is_long = |ticket: &QueueTicket| now >= ticket.since + WAIT_LIMIT && !ticket.reported;
        for waiting in self.calls.iter_mut().filter(|waiting| is_long(&waiting.ticket)) {
            waiting.ticket.reported = true;
            let peer = cx.conns.get(ConnRef(waiting.call.qp())).map(Conn::log_name).unwrap_or_default();
            let (name, cause) = (waiting.call.name(), &waiting.cause);
            let line = format_args!("{peer}: call of {name} has waited for 1 s ({all} calls wait): {cause}");
            let what = "calls that have waited for memory for a second";
            cx.log_for_procedure(Level::Warn, what, waiting.call.known_name(), line);
        }
    }

    /// Removes the calls of a connection.
    pub(in crate::shard) fn take_calls_of(&mut self, qp: QpId, now: u64) -> Vec<Unready> {
        // Most connections that close have no waiting calls.
        if !self.calls.iter().any(|waiting| waiting.call.qp() == qp) {
            return Vec::new();
        }
        let (removed, kept): (VecDeque<_>, _) =
            std::mem::take(&mut self.calls).into_iter().partition(|waiting| waiting.call.qp() == qp);
        self.calls = kept;
        // The next pass releases the sizes that were withheld for these calls.
        (self.is_full_pass, self.due) = (true, true);
        for waiting in &removed {
            self.end_reservation_of(waiting.ticket, now);
        }
        removed.into_iter().map(|waiting| waiting.call).collect()
    }

    /// Whether a call holds the reservation, or gets it now.
    fn may_reserve(&mut self, ticket: QueueTicket, owner: QuotaOwner, now: u64) -> bool {
        if self.reservation.is_none()
            && now >= self.paused_until
            && self.host_pauses.get(&owner).is_none_or(|pause| now >= pause.until)
        {
            self.reservation = Some(BufferReservation { call: ticket.number, owner, begun: now });
        }
        self.reservation.is_some_and(|reservation| reservation.call == ticket.number)
    }

    /// Ends the reservation. Its host has a longer pause than others, unless [`start`](Self::start) ends the pause.
    fn end_reservation(&mut self, now: u64) -> Option<BufferReservation> {
        let reservation = self.reservation.take()?;
        let BufferReservation { owner, begun, .. } = reservation;
        self.paused_until = begun + (1 + PAUSE_FACTOR) * (now - begun).min(RESERVATION_TIME);
        // The entry stays for another `length` after the pause, so that the host's next pause is twice as long.
        self.host_pauses.retain(|_, pause| now < pause.until + pause.length);
        let last = self.host_pauses.get(&owner).map(|pause| pause.length);
        let length = last.map_or(FIRST_HOST_PAUSE, |length| (2 * length).min(LAST_HOST_PAUSE));
        self.host_pauses.insert(owner, HostPause { length, until: now + length });
        Some(reservation)
    }

    /// The waiting calls.
    #[cfg(test)]
    pub(in crate::shard) fn iter(&self) -> impl Iterator<Item = &QueuedCall> {
        self.calls.iter()
    }

    /// Number of calls whose long wait was logged.
    #[cfg(test)]
    pub(in crate::shard) fn reported(&self) -> usize {
        self.calls.iter().filter(|waiting| waiting.ticket.reported).count()
    }
}
