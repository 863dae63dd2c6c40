//! Calls that get no results, or no answer.

use std::fmt;

use log::Level;

use super::Responder;
use super::header::{CallRefusal, Trouble};
use super::replies::reply_headroom;
use crate::fabric::Fabric;
use crate::proto::Refusal;
use crate::service::{Answered, Call, Refused};
use crate::shard::conn::Conn;
use crate::shard::context::Context;
use crate::wire::rpc::{AcceptStat, ReplyBody};
use crate::wire::{ErrorBody, Version};

impl Responder {
    /// Answers a call without results.
    #[cold]
    pub(super) fn refuse_call<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        conn: &mut Conn,
        call: Call<Refused>,
        refusal: CallRefusal,
    ) {
        if let CallRefusal::System(trouble) = refusal
            && Self::puts_off(conn, trouble)
        {
            return self.put_off(cx, conn, call, trouble);
        }
        cx.stats.calls_failed += 1;
        self.tally.refused(&call, &refusal);
        let id = call.id();
        if let CallRefusal::Undeclared { error, .. } = refusal {
            let name = call.name();
            let (peer, read, writes) = (conn.who(), call.chunks().read_bytes(), call.chunks().results());
            let line = format_args!(
                "{peer}: {error} to {name}: {read} bytes in Read chunks and {writes} Write chunks exceed its declaration \
                 (Procedure::read_chunks, Procedure::write_chunks)"
            );
            // The services have the procedure.
            cx.log_of(Level::Warn, "calls whose chunks their procedures do not declare", Some(name), line);
        }
        let body = match refusal {
            CallRefusal::Rpc(body) => {
                // Refusals of handlers and of one-way calls are logged elsewhere, or not at all.
                let told = |stat| matches!(stat, AcceptStat::SystemErr | AcceptStat::Success);
                if !matches!(body, ReplyBody::Accepted { stat, .. } if told(stat)) {
                    Self::tell_refused(cx, conn, &call, "calls refused by RPC", &body);
                }
                body
            }
            CallRefusal::NotACall => {
                conn.proto.forget(id);
                return self.boxes.put(call);
            }
            CallRefusal::System(trouble) => return self.answer_system(cx, conn, call, trouble),
            CallRefusal::TooLong { bytes, limit } => {
                let peer = conn.who();
                cx.log_of(
                    Level::Warn,
                    "calls that are too long",
                    None,
                    format_args!(
                        "{peer}: refused a call of {bytes} bytes: the limit is {limit} (wire.reassemble_up_to)"
                    ),
                );
                conn.proto.reply_error(id, ErrorBody::ReadChunks { max: 0 });
                return self.boxes.put(call);
            }
            CallRefusal::Transport(error) | CallRefusal::Undeclared { error, .. } => {
                // Version 1 has one error for all of them.
                Self::tell_refused(cx, conn, &call, "calls refused by the transport", &error);
                conn.proto.reply_error(id, error);
                return self.boxes.put(call);
            }
        };
        let at = reply_headroom(&call);
        match call.compose(body, at, |len| cx.alloc(len)) {
            Ok(call) => self.answer(cx, conn, call),
            Err(call) if Self::puts_off(conn, Trouble::NoBuffers(None)) => {
                self.put_off(cx, conn, call, Trouble::NoBuffers(None))
            }
            Err(call) => self.answer_system(cx, conn, call, Trouble::NoBuffers(None)),
        }
    }

    /// Logs a refused call whose caller gets the cause.
    fn tell_refused<F: Fabric>(
        cx: &mut Context<F>,
        conn: &Conn,
        call: &Call<Refused>,
        what: &'static str,
        why: &dyn fmt::Display,
    ) {
        let (peer, name) = (conn.who(), call.name());
        cx.log_of(Level::Info, what, call.known_name(), format_args!("{peer}: refused {name}: {why}"));
    }

    /// Whether the client has to retransmit such a call. Version 1 has no temporary error: ERR_CHUNK and SYSTEM_ERR
    /// become errors of the client's application. A client that loses its connection retransmits unanswered calls.
    pub(super) fn puts_off(conn: &Conn, trouble: Trouble) -> bool {
        trouble.passes() && conn.accepted().is_some() && conn.proto.terms().version == Version::V1
    }

    /// Leaves a call unanswered: closes its connection gracefully, so that its client retransmits it.
    #[cold]
    pub(super) fn put_off<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        conn: &mut Conn,
        call: Call<Refused>,
        trouble: Trouble,
    ) {
        cx.stats.calls_shed += 1;
        let (what, why) = trouble.words();
        if trouble != Trouble::Draining {
            let peer = conn.who();
            cx.warn(what, format_args!("{peer}: connection closed, so that its client retransmits: {why}"));
        }
        conn.proto.forget(call.id());
        self.boxes.put(call);
        conn.drain();
        cx.ready.add(conn);
    }

    /// Answers a call with ERR_SYSTEM; only the log has the cause.
    #[cold]
    fn answer_system<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        conn: &mut Conn,
        call: Call<Refused>,
        trouble: Trouble,
    ) {
        let (what, why) = trouble.words();
        let peer = conn.who();
        let line = format_args!("{peer}: ERR_SYSTEM to a call: {why}");
        // A drain is intended.
        let level = if trouble == Trouble::Draining { Level::Info } else { Level::Warn };
        cx.log_of(level, what, call.known_name(), line);
        conn.proto.reply_error(call.id(), ErrorBody::System);
        self.boxes.put(call);
    }

    /// Answers SYSTEM_ERR for a handler; only the log has the cause.
    #[cold]
    pub(super) fn tell_system_error<F: Fabric>(&self, cx: &mut Context<F>, conn: &Conn, call: &mut Call<Answered>) {
        let panic = call.take_panic();
        let (what, why) = match (&panic, call.outcome()) {
            (Some(panic), _) => ("handlers that panicked", format!("handler panicked: {panic}")),
            (None, Err(Refusal::NoReply)) => {
                ("handlers that did not answer", "handler returned Refusal::NoReply (Procedure::one_way)".to_owned())
            }
            (None, _) if call.was_dropped() => {
                ("calls dropped unanswered", "its DeferredCall was dropped unanswered".to_owned())
            }
            (None, Err(refusal @ Refusal::Failed { .. })) => ("results that could not be sent", refusal.cause()),
            (None, Err(refusal)) => ("calls that handlers refused", refusal.cause()),
            (None, Ok(())) => return,
        };
        let (peer, name) = (conn.who(), call.name());
        cx.log_of(Level::Error, what, Some(name), format_args!("{peer}: SYSTEM_ERR to {name}: {why}"));
    }
}
