//! Handling of peers' calls: check, allocate, run, reply.

use log::Level;

use super::Responder;
use super::header::{CallRefusal, Trouble, check_position_zero, read_lists, reply_body};
use super::landing::Fetching;
use super::parties::quota_owner;
use super::replies::{fits_inline, reply_headroom, reply_room};
use crate::config::HEADROOM_PLAIN;
use crate::fabric::{Fabric, ReceivedBuf};
use crate::proto::{Failing, InboundId, Refusal};
use crate::service::duplicate_requests::Lookup;
use crate::service::{
    Admitted, Answered, Arrived, Call, Header, Ready, ReplyMessage, Replying, ResultMemory, RpcMessage, RunOn, Unready,
};
use crate::shard::clock::nanoseconds;
use crate::shard::conn::Conn;
use crate::shard::context::Context;
use crate::shard::stage::Stage;
use crate::wire::rpc::{OpaqueAuth, ReplyBody};
use crate::wire::{ErrorBody, Head, HeaderType, Version, View};

impl Responder {
    /// Handles a call of a connection.
    #[inline(always)]
    pub(in crate::shard) fn take_call<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        conn: &Conn,
        id: InboundId,
    ) -> Call<Arrived> {
        let mut call = self.boxes.take(conn.qp(), id);
        call.comes_from(conn.host(), conn.served.reply_room);
        if let Some(arrived) = cx.sample() {
            call.stamp(arrived);
        }
        call
    }

    /// Handles a call without chunks in this message: decodes it, allocates its memory if permitted, and runs it.
    #[inline(always)]
    pub(in crate::shard) fn serve_plain<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        conn: &mut Conn,
        mut call: Call<Arrived>,
        head: &Head,
        message: ReceivedBuf,
    ) {
        call.set_head(head.xid, head.inv_handle);
        match self.read_again(head, &message) {
            Some(header) => {
                self.serve_admitted(cx, conn, call.admit(RpcMessage { buf: message, at: head.len }, header));
            }
            None => self.serve_other(cx, conn, call, RpcMessage { buf: message, at: head.len }),
        }
    }

    /// As above, for a call unlike the previous one.
    #[inline(never)]
    fn serve_other<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        conn: &mut Conn,
        call: Call<Arrived>,
        message: RpcMessage,
    ) {
        let read = self.read_rpc(message.bytes(), &call);
        self.serve(cx, conn, call, read, message);
    }

    /// Handles a decoded call: allocates its memory if permitted, and runs it.
    #[inline(always)]
    pub(in crate::shard) fn serve<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        conn: &mut Conn,
        call: Call<Arrived>,
        read: Result<Header, CallRefusal>,
        message: RpcMessage,
    ) {
        match read {
            Ok(header) => self.serve_admitted(cx, conn, call.admit(message, header)),
            Err(refusal) => self.refuse_call(cx, conn, call.refuse_message(message), refusal),
        }
    }

    /// As above, for a known procedure.
    #[inline(always)]
    pub(in crate::shard) fn serve_admitted<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        conn: &mut Conn,
        mut call: Call<Admitted>,
    ) {
        if !conn.served.plain
            && let Err(refusal) = Self::look_twice(conn, &mut call)
        {
            return self.refuse_call(cx, conn, call.refuse(), refusal);
        }
        // Most calls need only a buffer for their reply.
        if call.is_short()
            && let Some(services) = &self.services
        {
            let entry = services.entry(call.entry());
            let (results_at, len) = reply_room(&call, entry);
            if let Some(reply) = self.shares.alloc(cx, conn, len) {
                return match entry.run_here(call.give_reply(reply, results_at)) {
                    Ok(call) => self.finish(cx, conn, call),
                    Err(call) => self.run_elsewhere(cx, conn, call),
                };
            }
        }
        self.serve_in_turn(cx, conn, Unready::Admitted(call));
    }

    /// As above, for a call that needs more, or may have to wait.
    #[inline(never)]
    fn serve_in_turn<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn, call: Unready) {
        match self.must_wait(cx, conn, &call) {
            true => self.hold_back(cx, conn, call),
            false => self.start(cx, conn, call),
        }
    }

    /// Allocates for a call and continues it, or queues it.
    #[inline(always)]
    pub(super) fn start<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn, call: Unready) {
        // Awaited buffers go to the calls in their order.
        let in_turn = !cx.awaits_some() || self.is_in_turn(cx, &call);
        match if in_turn { self.begin(cx, conn, call) } else { Err(call) } {
            Ok(()) => {}
            Err(call) => self.wait_for_memory(cx, conn, call),
        }
    }

    /// Allocates the memory of a call, and continues it. Returns it without enough memory.
    #[inline(always)]
    pub(super) fn begin<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        conn: &mut Conn,
        call: Unready,
    ) -> Result<(), Unready> {
        let call = match call {
            // The message of a long call is not read yet: its further needs are unknown.
            Unready::Long(call) => return self.fetch(cx, conn, Fetching::Long(call)),
            Unready::Admitted(call) => self.prepare(cx, call).map_err(Unready::Admitted)?,
        };
        if call.fetches() {
            return self.fetch(cx, conn, Fetching::Ready(call));
        }
        self.run(cx, conn, call);
        Ok(())
    }

    /// Checks a call on a draining connection, or of a named peer.
    #[cold]
    fn look_twice(conn: &Conn, call: &mut Call<Admitted>) -> Result<(), CallRefusal> {
        // A draining server finishes its calls, and starts none.
        if conn.stage() == Stage::Draining {
            return Err(CallRefusal::System(Trouble::Draining));
        }
        if let Some(peer) = &conn.peer() {
            call.name_peer(peer);
        }
        Ok(())
    }

    /// Allocates the memory that the procedure declares; returns the call without enough memory.
    #[inline(always)]
    fn prepare<F: Fabric>(&self, cx: &Context<F>, call: Call<Admitted>) -> Result<Call<Ready>, Call<Admitted>> {
        let Some(services) = self.services.as_ref() else { return Err(call) };
        let entry = services.entry(call.entry());
        let (results_at, len) = reply_room(&call, entry);
        let reply = cx.pool.alloc_within(len, cx.longest_for_reply(len)).map(|reply| (reply, results_at));
        let longest_result = u32::try_from(entry.binding.results.max_len).unwrap_or(u32::MAX);
        let pool = entry.result_memory == ResultMemory::Pool;
        call.prepare(reply, longest_result, pool.then_some(|len| cx.alloc_chunk(len)))
    }

    /// Handles a call whose RPC message is in a chunk, or arrived in parts.
    #[cold]
    pub(in crate::shard) fn serve_unusual<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        conn: &mut Conn,
        mut call: Call<Arrived>,
        view: &View<'_>,
    ) {
        call.set_head(view.xid(), view.inv_handle());
        let read = read_lists(conn, view, &mut call);
        if view.htype() == HeaderType::Nomsg {
            let longest = cx.config.wire.reassemble_up_to as u64;
            if let Err(refusal) = read.and_then(|()| check_position_zero(call.chunks(), longest)) {
                return self.refuse_call(cx, conn, call.unnamed().refuse(), refusal);
            }
            return self.serve_in_turn(cx, conn, Unready::Long(call.unnamed()));
        }
        let Some(message) = cx.assemble_last(conn, view.payload()) else {
            return self.refuse_call(cx, conn, call.unnamed().refuse(), CallRefusal::System(Trouble::NoParts));
        };
        call.put_together();
        let read = read.and_then(|()| self.read_rpc(&message, &call));
        self.serve(cx, conn, call, read, RpcMessage { buf: ReceivedBuf::whole(message), at: 0 });
    }

    /// Runs a call, here or on a worker.
    pub(super) fn run<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn, call: Call<Ready>) {
        let Some(services) = self.services.as_ref() else { return };
        match services.entry(call.entry()).run_here(call) {
            Ok(call) => self.finish(cx, conn, call),
            Err(call) => self.run_elsewhere(cx, conn, call),
        }
    }

    /// Runs a call of a procedure on workers, with a duplicate request cache, or with deferred calls.
    #[inline(never)]
    fn run_elsewhere<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn, mut call: Call<Ready>) {
        let Some(services) = self.services.as_ref() else { return };
        let entry = services.entry(call.entry());
        match entry.cached.as_ref().map_or(Ok(None), |cache| cache.look_up(&mut call, &quota_owner(conn))) {
            Ok(None) => {}
            Ok(Some(Lookup::Nobody)) => {
                let (peer, name) = (conn.who(), call.name());
                let line = format_args!(
                    "{peer}: {name} is cached, but its caller has no identity: a retransmission runs again \
                     (ClientConfig::credential, or another function of Procedure::cached or typed::Cache)"
                );
                cx.log_of(Level::Warn, "calls without an identity", Some(name), line);
            }
            Ok(Some(known)) => {
                let silent = entry.silent;
                return self.run_before(cx, conn, call, known, silent);
            }
            // Its caller is unknown: it must not run, as it may have run before.
            Err(panic) => {
                let (peer, name) = (conn.who(), call.name());
                let line = format_args!("{peer}: {name}: its caller's identification panicked: {panic}");
                cx.log_of(Level::Error, "panics of identification", Some(name), line);
                let silent = entry.silent;
                return self.run_before(cx, conn, call, Lookup::Lost, silent);
            }
        }
        if entry.takes_calls() || (entry.run_on == RunOn::Workers && self.away.has_workers()) {
            return self.hand_over(cx, conn, call);
        }
        let call = entry.run(call);
        self.finish(cx, conn, call);
    }

    /// Handles a retransmitted call, which must not run again.
    fn run_before<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        conn: &mut Conn,
        mut call: Call<Ready>,
        known: Lookup,
        silent: bool,
    ) {
        match known {
            Lookup::Done(reply) => {
                let OpaqueAuth { flavor, body } = reply.verifier();
                let view = call.view_mut();
                // The first reply passed this check.
                let _ = view.set_verifier(flavor, body);
                let given = view.reply_writer().put(&reply);
                self.finish(cx, conn, call.answered(given.map_err(|_| Refusal::SystemError)));
            }
            Lookup::Full if !silent => {
                self.refuse_call(cx, conn, call.refuse(), CallRefusal::System(Trouble::CacheFull));
            }
            Lookup::Lost if !silent => {
                self.refuse_call(cx, conn, call.refuse(), CallRefusal::Rpc(reply_body(Refusal::SystemError)));
            }
            Lookup::InProgress if !silent && !conn.proto.inbound().is_double(call.id()) => {
                self.repeats.push_back(call);
                cx.schedule.control_now();
            }
            // The original is answered here, or no caller waits for it. (It is not new: checked before.)
            Lookup::InProgress | Lookup::Lost | Lookup::Full | Lookup::Nobody | Lookup::New(_) => {
                conn.proto.forget(call.id());
                self.boxes.put(call);
                cx.ready.add(conn);
            }
        }
    }

    /// Answers retransmissions of running calls, after a reconnect. The originals, perhaps on another shard, have to
    /// finish first.
    #[cold]
    pub(super) fn answer_repeats<F: Fabric>(&mut self, cx: &mut Context<F>) {
        for call in std::mem::take(&mut self.repeats) {
            let Some(conn) = cx.conns.take(call.qp()) else {
                self.boxes.put(call);
                continue;
            };
            cx.lend(conn, |cx, conn| {
                let once = self.services.as_ref().and_then(|all| all.entry(call.entry()).cached.as_ref());
                if once.is_some_and(|cache| cache.still_runs(&call)) {
                    let soon = cx.clock.read() + nanoseconds(cx.config.poll.control_interval);
                    cx.schedule.wake_by(soon);
                    self.repeats.push_back(call);
                } else {
                    self.run_elsewhere(cx, conn, call);
                    cx.ready.add(conn);
                }
            });
        }
    }

    /// Sends or queues the reply after the handler.
    #[inline(always)]
    pub(super) fn finish<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn, call: Call<Answered>) {
        cx.stats.calls += 1;
        match call.complete_plain(HEADROOM_PLAIN) {
            Ok((call, reply)) => self.answer_plain(cx, conn, call, reply),
            Err(call) => self.finish_unusual(cx, conn, call),
        }
    }

    /// As above, with more checks than the reply's length.
    #[inline(never)]
    fn finish_unusual<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn, mut call: Call<Answered>) {
        call.note_bytes();
        match self.look_at_outcome(cx, conn, &mut call) {
            Ok(()) => {
                if let Some(call) = self.hold_reply(cx, conn, call.complete()) {
                    self.answer(cx, conn, call);
                }
            }
            Err(Some(refusal)) => self.refuse_call(cx, conn, call.refuse(), refusal),
            Err(None) => self.end_one_way(cx, conn, call),
        }
    }

    /// Checks the outcome: returns the refusal of a call, or `None` for a call without an answer.
    #[inline(always)]
    fn look_at_outcome<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        conn: &Conn,
        call: &mut Call<Answered>,
    ) -> Result<(), Option<CallRefusal>> {
        match call.outcome() {
            Ok(()) => {}
            Err(Refusal::NoReply) if self.is_silent(call) => return Err(None),
            Err(_) if call.was_dropped() && self.is_silent(call) => return Err(None),
            Err(Refusal::ShortChunk { index, needed }) => {
                let error = ErrorBody::WriteResource { chunk_index: index.saturating_add(1), length_needed: needed };
                return Err(Some(CallRefusal::Transport(error)));
            }
            Err(Refusal::Failed { what: Failing::NoChunk, needed, .. }) if self.declares_result(call, needed) => {
                return Err(Some(CallRefusal::Rpc(reply_body(Refusal::GarbageArguments))));
            }
            Err(refusal) => {
                if matches!(refusal, Refusal::SystemError | Refusal::Failed { .. } | Refusal::NoReply) {
                    self.tell_system_error(cx, conn, call);
                }
                return Err(Some(CallRefusal::Rpc(reply_body(refusal))));
            }
        }
        // The device would close the connection.
        if let Some(arena) = call.arenas().find(|&arena| !cx.knows(arena)) {
            let (peer, name) = (conn.who(), call.name());
            let line =
                format_args!("{peer}: SYSTEM_ERR to {name}: result in unregistered arena {arena} (memory.arenas)");
            cx.log_of(Level::Error, "results in foreign arenas", Some(name), line);
            return Err(Some(CallRefusal::Rpc(reply_body(Refusal::SystemError))));
        }
        if call.has_verifier() {
            let results_at = reply_headroom(call) + call.header_len();
            if !call.move_results(results_at, |len| cx.pool.alloc(len)) {
                return Err(Some(CallRefusal::System(Trouble::NoBuffers(None))));
            }
        }
        Ok(())
    }

    /// Whether the procedure is one-way.
    pub(super) fn is_silent(&self, call: &Call<Answered>) -> bool {
        self.services.as_ref().is_some_and(|all| all.entry(call.entry()).silent)
    }

    /// Whether the procedure declares a Write chunk of this index.
    fn declares_result(&self, call: &Call<Answered>, index: u32) -> bool {
        let count = self.services.as_ref().map(|all| all.entry(call.entry()).binding.results.count);
        count.is_some_and(|count| (index as usize) < count)
    }

    /// Ends an unanswered call. In version 1 its caller would otherwise wait for the credit without limit.
    #[cold]
    fn end_one_way<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn, mut call: Call<Answered>) {
        if conn.proto.terms().version == Version::V1 {
            let nothing = ReplyBody::SUCCESS;
            return self.refuse_call(cx, conn, call.refuse(), CallRefusal::Rpc(nothing));
        }
        if let Some(stamp) = call.take_stamp() {
            self.time(cx, Some(call.entry()), &stamp);
        }
        conn.proto.forget(call.id());
        self.boxes.put(call);
        // Its slot is free: the peer may get a grant.
        cx.ready.add(conn);
    }

    /// Sends an ordinary reply now, if possible; [`answer`](Self::answer) sends one that may need another form.
    #[inline(always)]
    fn answer_plain<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        conn: &mut Conn,
        mut call: Call<Replying>,
        reply: ReplyMessage,
    ) {
        if !fits_inline(conn, &reply) {
            call.put_reply(reply);
            return self.answer_later(cx, conn, call);
        }
        if !Self::may_reply(cx, conn, call.id()) {
            call.put_reply(reply);
            return Self::keep_reply(conn, call);
        }
        self.transmit_plain(cx, conn, call, reply);
        if !cx.config.debug.batch {
            cx.post_chain(conn);
        }
    }

    #[inline(never)]
    fn answer_later<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn, call: Call<Replying>) {
        self.answer(cx, conn, call);
    }

    /// Sends the reply now, or once there is a credit for it. The caller posts the connection's chain.
    #[inline(always)]
    pub(super) fn answer<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn, call: Call<Replying>) {
        match Self::may_reply(cx, conn, call.id()) {
            true => self.transmit_reply(cx, conn, call),
            false => Self::keep_reply(conn, call),
        }
        if !cx.config.debug.batch {
            cx.post_chain(conn);
        }
    }

    /// Whether a reply is to be sent now. Otherwise it is queued.
    #[inline(always)]
    fn may_reply<F: Fabric>(cx: &mut Context<F>, conn: &mut Conn, id: InboundId) -> bool {
        cx.check_receives(conn);
        let backlogged = conn.is_backlogged(cx.config.debug.signal_every);
        conn.proto.reply(id, !backlogged)
    }

    /// Keeps a queued reply.
    #[inline(never)]
    fn keep_reply(conn: &mut Conn, mut call: Call<Replying>) {
        // Receives may need the call's buffer. (A header with chunks may be written into it.)
        if !call.returns() {
            drop(call.take_message());
        }
        let index = call.id().index();
        conn.served.replies[index] = Some(call);
    }
}
