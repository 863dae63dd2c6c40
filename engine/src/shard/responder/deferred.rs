//! Deferred calls: hand-over to their handlers, and return.

use super::Responder;
use crate::fabric::Fabric;
use crate::service::{Answered, Call, CameHome, DeferredCall, Ready};
use crate::shard::conn::Conn;
use crate::shard::context::Context;

impl Responder {
    /// Gives a call to its handler. At the connection's limit of deferred calls, it waits for one to return.
    #[inline(always)]
    pub(super) fn hand_over<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn, call: Call<Ready>) {
        if conn.served.taken >= cx.config.limits.max_deferred {
            cx.stats.backpressure += 1;
            return conn.served.untaken.push_back(call);
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

    /// Gives a call to its handler.
    #[inline(always)]
    fn give<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn, call: Call<Ready>) {
        let Some(services) = &self.services else { return };
        let entry = services.entry(call.entry());
        let origin = conn.served.origin.get_or_insert_with(|| self.away.origin());
        self.away.give();
        conn.served.taken += 1;
        if let Some(task) = entry.take(DeferredCall::new(call, origin), |panic| tell_panic(cx, panic)) {
            self.away.begin(task, origin);
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
        if call.was_dropped() {
            self.count_dropped(cx, &call);
        }
        self.finish(cx, conn, call);
        if !conn.served.untaken.is_empty() {
            self.give_next(cx, conn);
        }
    }

    #[cold]
    fn give_next<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn) {
        if let Some(next) = conn.served.untaken.pop_front() {
            self.give(cx, conn, next);
        }
    }

    #[cold]
    fn count_dropped<F: Fabric>(&self, cx: &mut Context<F>, call: &Call<Answered>) {
        // A one-way call may be dropped.
        cx.stats.calls_dropped += u64::from(call.was_dropped() && !self.is_silent(call));
    }

    /// Ends the deferred calls of a closed connection, and drops the waiting ones.
    pub(super) fn abandon_taken(&mut self, conn: &mut Conn) {
        if let Some(origin) = conn.served.origin.take() {
            origin.end();
            self.away.abandon_futures();
        }
        for call in conn.served.untaken.drain(..) {
            self.boxes.put(call);
        }
    }
}

/// Logs a panic of a deferred handler, or of its future. Its calls are dropped, and reported as panics.
#[cold]
pub(super) fn tell_panic<F: Fabric>(cx: &mut Context<F>, panic: &str) {
    cx.error("handlers that panicked", format_args!("deferred handler panicked: {panic}"));
}
