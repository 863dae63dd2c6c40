//! Calls that get no results, or no answer.

use std::fmt;

use log::Level;

use super::check::{CallRefusal, InternalError};
use super::replies::Replies;
use crate::fabric::Fabric;
use crate::proto::Refusal;
use crate::service::{Answered, Call, Refused};
use crate::shard::admission::reply_headroom;
use crate::shard::connection::Conn;
use crate::shard::context::Context;
use crate::wire::rpc::{AcceptStat, ReplyBody};
use crate::wire::{ErrorBody, Version};

impl Replies {
    /// Answers a call without results.
    #[cold]
    pub(super) fn refuse<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        conn: &mut Conn,
        mut call: Call<Refused>,
        refusal: CallRefusal,
    ) {
        if let CallRefusal::System(error) = refusal
            && has_to_retransmit(conn, error)
        {
            return self.shed(cx, conn, call, error);
        }
        // In version 1 a call without a reply gets an empty one.
        let is_refused = !matches!(refusal, CallRefusal::Rpc(ReplyBody::SUCCESS));
        cx.stats.calls_failed += u64::from(is_refused);
        self.outcomes.record_refused(&call, &refusal);
        let (peer, name) = (conn.who(), call.name());
        let error = match refusal {
            CallRefusal::Rpc(body) => {
                // Refusals of handlers and of one-way calls are logged elsewhere, or not at all.
                let logged = |stat| matches!(stat, AcceptStat::SystemErr | AcceptStat::Success);
                if !matches!(body, ReplyBody::Accepted { stat, .. } if logged(stat)) {
                    log_refused(cx, conn, &call, "calls refused by RPC", &body);
                }
                let at = reply_headroom(&call);
                let error = InternalError::NoBuffers(None);
                match call.compose(body, at, |len| cx.memory.alloc(len)) {
                    Ok(call) => return self.send(cx, conn, call),
                    Err(call) if has_to_retransmit(conn, error) => return self.shed(cx, conn, call, error),
                    Err(back) => {
                        call = back;
                        log_error(cx, conn, &call, error)
                    }
                }
            }
            CallRefusal::NotACall => {
                conn.proto.forget(call.id());
                return self.boxes.put(call);
            }
            CallRefusal::System(error) => log_error(cx, conn, &call, error),
            CallRefusal::TooLong { bytes, limit } => {
                let line = format_args!(
                    "{peer}: refused a call of {bytes} bytes: the limit is {limit} (wire.reassemble_up_to)"
                );
                cx.log_of(Level::Warn, "calls that are too long", None, line);
                ErrorBody::ReadChunks { max: 0 }
            }
            CallRefusal::Undeclared { error, .. } => {
                let (read, writes) = (call.chunks().read_bytes(), call.chunks().results());
                let line = format_args!(
                    "{peer}: {error} to {name}: {read} bytes in Read chunks and {writes} Write chunks exceed its \
                     declaration (Procedure::read_chunks, Procedure::write_chunks)"
                );
                // The services have the procedure.
                cx.log_of(Level::Warn, "calls whose chunks their procedures do not declare", Some(name), line);
                log_refused(cx, conn, &call, "calls refused by the transport", &error);
                error
            }
            CallRefusal::Transport(error) => {
                // Version 1 has one error for all of them.
                log_refused(cx, conn, &call, "calls refused by the transport", &error);
                error
            }
        };
        conn.proto.reply_error(call.id(), error);
        self.boxes.put(call);
    }

    /// Leaves a call unanswered: closes its connection gracefully, so that its client retransmits it.
    #[cold]
    fn shed<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn, call: Call<Refused>, error: InternalError) {
        cx.stats.calls_shed += 1;
        let (what, why) = error.texts();
        if error != InternalError::Draining {
            let peer = conn.who();
            cx.warn(what, format_args!("{peer}: connection closed, so that its client retransmits: {why}"));
        }
        self.drop_unanswered(cx, conn, call);
        conn.drain();
    }

    /// Ends an unanswered call. In version 1 its caller would otherwise wait for the credit without limit.
    #[cold]
    pub(super) fn end_one_way<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn, mut call: Call<Answered>) {
        if conn.proto.terms().version == Version::V1 {
            let nothing = ReplyBody::SUCCESS;
            return self.refuse(cx, conn, call.refuse(), CallRefusal::Rpc(nothing));
        }
        if let Some(stamp) = call.take_stamp() {
            self.record_time(cx, Some(call.entry()), &stamp);
        }
        self.drop_unanswered(cx, conn, call);
    }

    /// Ends a call that needs no answer.
    pub(super) fn drop_unanswered<F: Fabric, S>(&mut self, cx: &mut Context<F>, conn: &mut Conn, call: Call<S>) {
        conn.proto.forget(call.id());
        self.boxes.put(call);
        // Its slot is free: the peer may get a grant.
        cx.ready.add(conn);
    }
}

/// Whether the client has to retransmit a call that met this error. Version 1 has no temporary error: ERR_CHUNK and
/// SYSTEM_ERR become errors of the client's application. A client that loses its connection retransmits unanswered
/// calls.
pub(super) fn has_to_retransmit(conn: &Conn, error: InternalError) -> bool {
    error.is_temporary() && conn.accepted.is_some() && conn.proto.terms().version == Version::V1
}

/// Logs the cause of ERR_SYSTEM, which the caller does not learn.
fn log_error<F: Fabric>(cx: &mut Context<F>, conn: &Conn, call: &Call<Refused>, error: InternalError) -> ErrorBody {
    let (what, why) = error.texts();
    let line = format_args!("{}: ERR_SYSTEM to a call: {why}", conn.who());
    // A drain is intended.
    let level = if error == InternalError::Draining { Level::Info } else { Level::Warn };
    cx.log_of(level, what, call.known_name(), line);
    ErrorBody::System
}

/// Logs a refused call whose caller gets the cause.
fn log_refused<F: Fabric>(
    cx: &mut Context<F>,
    conn: &Conn,
    call: &Call<Refused>,
    what: &'static str,
    why: &dyn fmt::Display,
) {
    let (peer, name) = (conn.who(), call.name());
    cx.log_of(Level::Info, what, call.known_name(), format_args!("{peer}: refused {name}: {why}"));
}

/// Logs why a handler's call gets SYSTEM_ERR: the caller does not learn the cause.
#[cold]
pub(super) fn log_system_error<F: Fabric>(cx: &mut Context<F>, conn: &Conn, call: &mut Call<Answered>) {
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
