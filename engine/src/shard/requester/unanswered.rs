//! Log of calls that have been without an answer for a second.
//!
//! Periodic checks of the connections age their calls, so that the message path reads no clock for them.

use log::Level;

use crate::fabric::Fabric;
use crate::service::ProcedureName;
use crate::shard::connection::Conn;
use crate::shard::context::Context;

/// Nanoseconds between two checks of a connection: a second.
const INTERVAL: u64 = 1_000_000_000;
/// Parts in which many connections are checked: a check of all at once would delay calls.
const PARTS: usize = 16;
/// Number of connections up to which all are checked at once.
const FEW: usize = 64;

/// Schedule of the checks.
#[derive(Debug, Default)]
pub(crate) struct UnansweredCalls {
    /// Time of each part's next check, in nanoseconds.
    due: [u64; PARTS],
    /// Next part.
    part: usize,
}

impl UnansweredCalls {
    /// Takes the next part, if it is due.
    fn take_due(&mut self, now: u64) -> Option<usize> {
        let part = self.part;
        if now < self.due[part] {
            return None;
        }
        self.due[part] = now.saturating_add(INTERVAL);
        self.part = (part + 1) % PARTS;
        Some(part)
    }

    /// Logs calls without an answer, by procedure. Part of a control-plane run.
    pub(crate) fn check<F: Fabric>(&mut self, cx: &mut Context<F>) {
        let now = cx.clock.read();
        let parts = if cx.conns.slots().len() <= FEW { PARTS } else { 1 };
        for _ in 0..parts {
            let Some(part) = self.take_due(now) else { return };
            cx.with_those(|slot| slot % PARTS == part, check);
        }
    }
}

/// Checks the calls on one connection.
fn check<F: Fabric>(cx: &mut Context<F>, conn: &mut Conn) {
    let mut old = conn.proto.age_calls();
    old.sort_unstable();
    for calls in old.chunk_by(|one, next| one == next) {
        log(cx, conn, calls[0], calls.len());
    }
}

/// Logs the calls of one procedure. Its number is known modulo 2^16, and its program is the one called last on the
/// connection, because storing both with each call would slow down all calls.
#[cold]
fn log<F: Fabric>(cx: &mut Context<F>, conn: &Conn, procedure: u16, calls: usize) {
    let (program, version) = conn.calls.program;
    let name = ProcedureName { program, version, procedure: procedure.into() };
    let line = format_args!(
        "{}: {calls} calls of {name} (the program called last on this connection) have had no answer for a second; \
         unanswered calls hold credits (ClientCall::timeout, limits.max_abandoned)",
        conn.who()
    );
    cx.log_of(Level::Warn, "calls without an answer for a second", Some(name), line);
}
