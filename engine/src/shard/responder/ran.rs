//! Procedures that have run on a shard lately.
//!
//! They are the candidates when the shard was blocked. Noting them costs a message of the procedure called last
//! nothing, and any other message one bit: the clock is not read for each call.

use std::cell::Cell;
use std::fmt::Write;
use std::time::Duration;

use log::Level;

use super::Responder;
use crate::fabric::Fabric;
use crate::service::{LocalServices, ProcedureName, RunOn};
use crate::shard::context::Context;

/// Most procedures that a log line names.
const MAX_NAMED: usize = 4;

/// Entries of procedures, each as one bit of its index modulo 64.
#[derive(Debug, Default)]
pub(super) struct Ran {
    bits: Cell<u64>,
    /// The bits before the last measurement of turns that is known here.
    before: Cell<u64>,
    /// Time of that measurement, and the completions by then and by the one before it.
    measured: Cell<u64>,
    completions: Cell<[u64; 2]>,
}

impl Ran {
    /// Adds the procedure with this entry.
    #[inline(always)]
    pub(super) fn add(&self, entry: usize) {
        self.bits.set(self.bits.get() | 1 << (entry % 64));
    }

    /// Whether the procedure with this entry may have run.
    pub(super) fn has(&self, entry: usize) -> bool {
        (self.bits.get() | self.before.get()) & (1 << (entry % 64)) != 0
    }

    /// Starts anew if the clock has measured the turns again, and keeps the procedures for one more measurement: those
    /// of the current turn are not measured yet.
    fn begin_anew(&self, measured: u64, completions: u64) {
        if self.measured.replace(measured) != measured {
            self.before.set(self.bits.take());
            let [last, _] = self.completions.get();
            self.completions.set([completions, last]);
        }
    }
}

impl Responder {
    /// Logs that the shard was blocked, with the procedures that may be the cause, and starts anew.
    pub(super) fn report_blocked<F: Fabric>(&mut self, cx: &mut Context<F>, has_task: bool) {
        if let Some(nanos) = cx.clock.take_blocked() {
            self.log_blocked(cx, Duration::from_nanos(nanos), has_task);
        }
        self.ran.begin_anew(cx.clock.measured(), cx.stats.completions);
    }

    #[cold]
    fn log_blocked<F: Fabric>(&self, cx: &mut Context<F>, time: Duration, has_task: bool) {
        // Calls of the procedure called last are not noted.
        if let Some(last) = self.last.as_ref().filter(|_| cx.stats.completions != self.ran.completions.get()[1]) {
            self.ran.add(last.entry());
        }
        let names: Vec<ProcedureName> = self.services.iter().flat_map(|all| self.candidates(all)).collect();
        let mut text = String::new();
        for (n, name) in names.iter().take(MAX_NAMED).enumerate() {
            let _ = write!(text, "{}{name}", if n > 0 { ", or " } else { "" });
        }
        if names.len() > MAX_NAMED {
            let _ = write!(text, ", or one of {} others", names.len() - MAX_NAMED);
        }
        if has_task {
            text += if names.is_empty() { "its task" } else { ", or its task" };
        }
        if text.is_empty() {
            // No code of the application ran: the system did not run the thread.
            return;
        }
        let one = names.first().copied().filter(|_| names.len() == 1);
        let line = format_args!(
            "shard was blocked for {time:.1?} by {text}, or did not get its core: long work belongs on workers \
             (Procedure::on_workers) or in other threads (Procedure::deferred)"
        );
        cx.log_of(Level::Warn, "shards blocked for a second or more", one, line);
    }

    /// Procedures that have run on the shard.
    fn candidates<'a>(&'a self, services: &'a LocalServices) -> impl Iterator<Item = ProcedureName> + 'a {
        let workers = self.has_workers();
        services.procedures().filter_map(move |(program, version, procedure, entry)| {
            let elsewhere = workers && services.entry(entry).run_on == RunOn::Workers;
            (self.ran.has(entry) && !elsewhere).then_some(ProcedureName { program, version, procedure })
        })
    }
}
