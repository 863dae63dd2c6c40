//! Calls that go away: hand-over to deferred handlers and workers, and return.

use std::sync::Arc;

use log::Level;

use super::futures::Panicked;
use super::parties::Sender;
use super::workers::{Job, WorkKey};
use super::{Responder, Served};
use crate::fabric::{Fabric, QpId};
use crate::service::{Answered, Call, CameHome, DeferredCall, LocalServices, Ready};
use crate::shard::clock::nanoseconds;
use crate::shard::conn::Conn;
use crate::shard::context::Context;

impl Responder {
    /// Gives a call to its handler, or to a worker. At the limit of the connection, or of its party, it waits for one
    /// to return.
    #[inline(always)]
    pub(super) fn hand_over<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn, call: Call<Ready>) {
        if conn.served.sender.is_none() {
            let account = self.shares.parties.account(conn);
            let origin = self.away.origin(account.party(), conn.who());
            conn.served.sender = Some(Box::new(Sender { origin, account }));
        }
        if self.must_stay(cx, &conn.served, &call) {
            return self.stay(cx, conn, call);
        }
        self.give(cx, conn, call);
        // It may be answered already.
        let mut came = self.away.take_answered();
        let Some(call) = came.next() else { return };
        if call.qp() == conn.qp() {
            self.came_home(cx, conn, call);
        } else {
            self.came_home_to_another(cx, call);
        }
        if !came.is_empty() {
            self.more_came_home(cx, conn, came);
        }
    }

    /// Answers others that returned with a call answered at once.
    #[cold]
    fn more_came_home<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn, came: CameHome) {
        for call in came {
            match call.qp() == conn.qp() {
                true => self.came_home(cx, conn, call),
                false => self.came_home_to_another(cx, call),
            }
        }
    }

    /// Whether a call waits for others to return.
    #[inline(always)]
    fn must_stay<F: Fabric>(&self, cx: &Context<F>, served: &Served, call: &Call<Ready>) -> bool {
        let parties = &self.shares.parties;
        let deferred = || self.services.as_ref().is_some_and(|all| all.entry(call.entry()).takes_calls());
        (served.taken >= cx.config.limits.max_deferred && deferred())
            || served.sender.as_ref().is_some_and(|sender| parties.is_full(&sender.account))
    }

    #[cold]
    fn stay<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn, call: Call<Ready>) {
        if let Some(sender) = &conn.served.sender
            && self.shares.parties.is_full(&sender.account)
        {
            let line = format_args!(
                "{}: call waits: handlers and workers have as many calls of its host as memory.receives leaves for \
                 others, {} of them of closed connections",
                conn.who(),
                sender.account.dead()
            );
            cx.warn("calls that wait for others of their host", line);
        }
        cx.stats.backpressure += 1;
        self.untaken += 1;
        conn.served.untaken.push_back(call);
        Self::try_soon(cx);
    }

    /// Gives a call to its handler, or to a worker.
    #[inline(always)]
    fn give<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn, call: Call<Ready>) {
        let (Some(services), Some(sender)) = (&self.services, &conn.served.sender) else { return };
        let (entry, origin) = (services.entry(call.entry()), &sender.origin);
        self.shares.parties.give(&sender.account);
        if !entry.takes_calls() {
            let (key, job) = (WorkKey::of(conn, &call), Job { call, origin: Arc::clone(origin) });
            conn.served.at_workers += 1;
            return self.away.send_to_workers(key, job);
        }
        self.away.give();
        conn.served.taken += 1;
        let at = call.entry();
        let panicked = |text| tell_panic(cx, Some(services), Panicked { origin: Arc::clone(origin), entry: at, text });
        if let Some(task) = entry.take(DeferredCall::new(call, origin), panicked) {
            self.away.begin(task, origin, at);
        }
    }

    /// Answers returned calls; returns their number.
    pub(super) fn collect_taken<F: Fabric>(&mut self, cx: &mut Context<F>) -> usize {
        self.away.take_answered().map(|call| self.came_home_to_another(cx, call)).count()
    }

    /// Answers a returned call of a connection in the table.
    #[inline(never)]
    fn came_home_to_another<F: Fabric>(&mut self, cx: &mut Context<F>, call: Call<Answered>) {
        let Some(conn) = cx.conns.take(call.qp()) else {
            // The connection has closed meanwhile, and the call with it.
            self.away.came_back();
            self.came_home_dead(cx, call.qp());
            self.count_dropped(cx, &call);
            return self.boxes.put(call);
        };
        cx.lend(conn, |cx, conn| {
            self.came_home(cx, conn, call);
            cx.ready.add(conn);
        });
    }

    #[inline(always)]
    fn came_home<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn, call: Call<Answered>) {
        self.away.came_back();
        conn.served.taken -= 1;
        self.came_back_to(conn);
        if call.was_dropped() {
            self.count_dropped(cx, &call);
        }
        self.finish(cx, conn, call);
        self.give_next(cx, conn);
    }

    /// Counts a call of an open connection that came home.
    #[inline(always)]
    pub(super) fn came_back_to(&mut self, conn: &Conn) {
        if let Some(sender) = &conn.served.sender {
            self.shares.parties.came_back(&sender.account);
        }
    }

    /// Counts a call of a closed connection that came home. Its receive may be promised again.
    pub(super) fn came_home_dead<F: Fabric>(&mut self, cx: &mut Context<F>, qp: QpId) {
        if self.shares.parties.came_back_dead(qp) {
            cx.receives.give_back(1);
        }
    }

    /// Gives away waiting calls of a connection, as far as its limits allow.
    #[inline(always)]
    pub(super) fn give_next<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn) {
        if !conn.served.untaken.is_empty() {
            self.give_waiting(cx, conn);
        }
    }

    #[cold]
    fn give_waiting<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn) {
        while let Some(next) = conn.served.untaken.pop_front() {
            if self.must_stay(cx, &conn.served, &next) {
                return conn.served.untaken.push_front(next);
            }
            self.untaken -= 1;
            self.give(cx, conn, next);
        }
    }

    /// Part of a control-plane run: calls of other connections may have come home.
    #[cold]
    pub(super) fn give_untaken<F: Fabric>(&mut self, cx: &mut Context<F>) {
        cx.with_each(|cx, conn| self.give_next(cx, conn));
        self.dispatch(cx);
        if self.untaken > 0 {
            Self::try_soon(cx);
        }
    }

    fn try_soon<F: Fabric>(cx: &mut Context<F>) {
        let soon = cx.clock.read() + nanoseconds(cx.config.poll.control_interval);
        cx.schedule.wake_by(soon);
    }

    #[cold]
    fn count_dropped<F: Fabric>(&self, cx: &mut Context<F>, call: &Call<Answered>) {
        // A one-way call may be dropped.
        cx.stats.calls_dropped += u64::from(call.was_dropped() && !self.is_silent(call));
    }

    /// Ends the calls away of a closed connection, and drops the waiting ones. Those away hold their receives.
    pub(super) fn abandon_taken<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn) {
        if let Some(sender) = conn.served.sender.take() {
            sender.origin.end();
            self.away.abandon_futures();
            let calls = (conn.served.taken + conn.served.at_workers) as usize;
            let with_chunks = conn.proto.inbound().with_chunks();
            self.shares.parties.close(conn.qp(), sender.account, calls, with_chunks);
            cx.receives.withhold(calls);
        }
        self.untaken -= conn.served.untaken.len();
        for call in conn.served.untaken.drain(..) {
            self.boxes.put(call.skipped());
        }
    }
}

/// Logs a panic of a deferred handler, or of its future. Its calls are dropped, and reported as panics.
#[cold]
pub(super) fn tell_panic<F: Fabric>(cx: &mut Context<F>, services: Option<&LocalServices>, panicked: Panicked) {
    let Panicked { origin, entry, text } = panicked;
    let (peer, name) = (origin.peer(), services.and_then(|all| all.name_of(entry)));
    let of = name.map_or_else(String::new, |name| format!(" of {name}"));
    let line = format_args!("{peer}: deferred handler{of} panicked: {text}");
    cx.log_of(Level::Error, "handlers that panicked", name, line);
}
