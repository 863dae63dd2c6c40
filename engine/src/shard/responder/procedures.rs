//! The procedures of a shard: which one a call is for, and which have run recently.
//!
//! Procedures that have run recently are the candidates when the shard was blocked, because the clock is not read for
//! each call. Recording costs nothing for a call of the procedure called last, and sets one bit for any other call.

use std::cell::Cell;
use std::fmt::Write;
use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;

use log::Level;

use super::chunks::check_chunks;
use super::replies::CallRefusal;
use crate::fabric::Fabric;
use crate::service::{Arrived, CallParts, LocalProcedure, LocalServices, ParsedHeader, ProcedureName, ServedCall};
use crate::shard::context::ShardContext;
use crate::wire::rpc;
use crate::wire::{ErrorBody, Head};

/// Maximum procedures that a log line names.
const MAX_NAMED: usize = 4;

/// Offsets of program, version and procedure in the RPC message of a call.
const NAME: Range<usize> = 12..24;

/// The procedure called last, as in the RPC header of a call.
struct LastCalled {
    name: [u8; 12],
    entry: usize,
}

/// Procedures that have run recently, as one bit for each entry modulo 64.
#[derive(Debug, Default)]
pub(super) struct RecentProcedures {
    bits: Cell<u64>,
    /// The bits before the last recorded measurement of turns.
    before: Cell<u64>,
}

impl RecentProcedures {
    /// Adds the procedure with this entry.
    #[inline]
    pub(super) fn add(&self, entry: usize) {
        self.bits.set(self.bits.get() | 1 << (entry % 64));
    }

    fn has(&self, entry: usize) -> bool {
        (self.bits.get() | self.before.get()) & (1 << (entry % 64)) != 0
    }
}

#[derive(Default)]
pub(super) struct Procedures {
    services: LocalServices,
    /// Whether services are set, even if they have no procedures.
    serves: bool,
    last: Option<LastCalled>,
    recent: Rc<RecentProcedures>,
    /// Time of the last recorded measurement of turns, and the completions until it and until the one before it.
    measured: u64,
    completions: [u64; 2],
}

impl Procedures {
    pub(super) fn set_services(&mut self, services: LocalServices) {
        (self.services, self.serves, self.last) = (services, true, None);
    }

    pub(super) fn serves(&self) -> bool {
        self.serves
    }

    pub(super) fn services(&self) -> &LocalServices {
        &self.services
    }

    pub(super) fn recent(&self) -> &Rc<RecentProcedures> {
        &self.recent
    }

    /// The procedure with this entry.
    #[inline]
    pub(super) fn entry(&self, entry: usize) -> &LocalProcedure {
        self.services.entry(entry)
    }

    /// The procedure of a call; `None` if its message has not been read yet.
    #[inline]
    pub(super) fn entry_of(&self, call: &CallParts) -> Option<&LocalProcedure> {
        call.known_entry().map(|entry| self.services.entry(entry))
    }

    /// Decodes the RPC header of a call without chunks in this message, if it is ordinary: AUTH_NONE, and the procedure
    /// called last. `None` for any other call, which needs a [full decode](Self::decode).
    #[inline]
    pub(super) fn decode_repeated(&self, head: &Head, message: &[u8]) -> Option<ParsedHeader> {
        let message = message.get(head.len..)?;
        let header = rpc::CallHeader::read_anonymous(message)?;
        let last = self.last.as_ref()?;
        let is_repeated = header.xid == head.xid && message.get(NAME)? == last.name;
        is_repeated.then_some(ParsedHeader { entry: last.entry, len: rpc::ANONYMOUS_CALL_LEN })
    }

    /// Decodes the RPC message of a call, and checks its chunks against the procedure's declaration.
    #[inline(always)]
    pub(super) fn decode(&mut self, message: &[u8], call: &ServedCall<Arrived>) -> Result<ParsedHeader, CallRefusal> {
        // Most headers have a known layout and length.
        let (header, len) = match rpc::CallHeader::read_anonymous(message) {
            Some(header) => (header, rpc::ANONYMOUS_CALL_LEN),
            None => rpc::CallHeader::parse(message).map_err(|error| {
                // A wrong or missing XID is a transport error, whatever else is wrong (RFC 8166 §4.5.2, version 2
                // §6.4.1).
                match message.first_chunk().map(|xid| u32::from_be_bytes(*xid)) {
                    Some(xid) if xid == call.xid() => error.answer().map_or(CallRefusal::NotACall, CallRefusal::Rpc),
                    _ => CallRefusal::Transport(ErrorBody::BadXdr),
                }
            })?,
        };
        if header.xid != call.xid() {
            // RFC 8166 §4.1 requires equal XIDs; otherwise the caller could not match a reply.
            return Err(CallRefusal::Transport(ErrorBody::BadXdr));
        }
        let found = self.services.find(header.program, header.version, header.procedure);
        let entry = found.map_err(CallRefusal::from)?;
        if call.returns_chunks() || call.needs_reads() {
            check_chunks(header.credential, self.services.entry(entry), (len, message.len()), call.chunks())
                .map_err(|error| CallRefusal::Undeclared { entry, error })?;
        }
        let name = message.get(NAME).and_then(<[u8]>::first_chunk);
        self.last = name.map(|&name| LastCalled { name, entry });
        self.recent.add(entry);
        Ok(ParsedHeader { entry, len })
    }

    /// Logs that the shard was blocked, with the procedures that may be the cause, and starts a new record. The old one
    /// is kept for one more measurement of turns, because the current turn is not measured yet.
    pub(super) fn report_blocked<F: Fabric>(&mut self, cx: &mut ShardContext<F>, has_workers: bool, has_task: bool) {
        if let Some(nanos) = cx.clock.take_blocked() {
            self.log_blocked(cx, Duration::from_nanos(nanos), has_workers, has_task);
        }
        let measured = cx.clock.measured();
        if std::mem::replace(&mut self.measured, measured) != measured {
            self.recent.before.set(self.recent.bits.take());
            self.completions = [cx.stats.completions, self.completions[0]];
        }
    }

    #[cold]
    fn log_blocked<F: Fabric>(&self, cx: &mut ShardContext<F>, time: Duration, has_workers: bool, has_task: bool) {
        // Calls of the procedure called last are not recorded.
        if let Some(last) = self.last.as_ref().filter(|_| cx.stats.completions != self.completions[1]) {
            self.recent.add(last.entry);
        }
        let candidates = self.services.procedures().filter_map(|(name, entry)| {
            let elsewhere = has_workers && self.entry(entry).on_workers;
            (self.recent.has(entry) && !elsewhere).then_some(name)
        });
        let names: Vec<ProcedureName> = candidates.collect();
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
            // No code of the application ran, so the system did not run the thread.
            return;
        }
        let only = names.first().copied().filter(|_| names.len() == 1);
        let line = format_args!(
            "shard was blocked for {time:.1?} by {text}, or did not get its core: long work belongs on workers \
             (Procedure::on_workers) or in other threads (Procedure::deferred)"
        );
        cx.log_for_procedure(Level::Warn, "shards blocked for a second or more", only, line);
    }
}
