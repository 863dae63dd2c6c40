//! Calls of the peer: check, give memory, run, reply.

use rpcrdma_mempool::ArenaId;

use super::Responder;
use super::header::{CallRefusal, Trouble, read_lists, read_position_zero, reply_body};
use super::replies::{reply_headroom, reply_room};
use super::workers::WorkKey;
use crate::fabric::{Fabric, ReceivedBuf};
use crate::proto::{InboundId, Refusal};
use crate::service::reply_cache::Lookup;
use crate::service::{NO_ENTRY, OwnedCall, ResultBytes, ResultChunk, ResultMemory, RunOn};
use crate::shard::clock::nanoseconds;
use crate::shard::conn::Conn;
use crate::shard::context::Context;
use crate::shard::stage::Stage;
use crate::wire::rpc::{OpaqueAuth, ProgramNumber, ReplyBody};
use crate::wire::{ErrorBody, HeaderType, Version, View};

impl Responder {
    /// A call has come, of which no more is known than whose it is.
    #[inline(always)]
    pub(in crate::shard) fn take_call<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        conn: &Conn,
        id: InboundId,
    ) -> Box<OwnedCall> {
        let mut call = self.boxes.take(conn.qp(), id);
        call.arrived = cx.sample();
        (call.host, call.inline_room) = (conn.host(), conn.served.inline_room);
        call
    }

    /// A call has arrived, and has been read: it gets memory, if it may have it, and runs.
    #[inline(always)]
    pub(in crate::shard) fn serve<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        conn: &mut Conn,
        mut call: Box<OwnedCall>,
        read: Result<(), CallRefusal>,
        message: ReceivedBuf,
    ) {
        call.message = Some(message);
        if let Err(refusal) = read {
            if !matches!(refusal, CallRefusal::Undeclared(_)) {
                call.entry = NO_ENTRY;
            }
            return self.refuse_call(cx, conn, call, refusal);
        }
        if !conn.served.plain
            && let Err(refusal) = Self::look_twice(conn, &mut call)
        {
            return self.refuse_call(cx, conn, call, refusal);
        }
        // Most need a buffer for their reply, and nothing else.
        if !call.returns
            && !call.fetches()
            && let Some(services) = &self.services
        {
            let entry = services.entry(call.entry);
            let (results_at, len) = reply_room(&call, entry);
            if let Some(reply) = self.shares.alloc(cx, conn, len) {
                call.give_reply(reply, results_at);
                return match entry.run_here(&mut *call) {
                    true => self.finish(cx, conn, call),
                    false => self.run_elsewhere(cx, conn, call),
                };
            }
        }
        self.serve_in_turn(cx, conn, call);
    }

    /// The same for a call that needs more, or may have to wait.
    #[inline(never)]
    fn serve_in_turn<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn, call: Box<OwnedCall>) {
        match self.must_wait(cx, conn, &call) {
            true => self.hold_back(cx, conn, call),
            false => self.start(cx, conn, call),
        }
    }

    /// A call may have memory.
    #[inline(always)]
    pub(super) fn start<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn, call: Box<OwnedCall>) {
        // What others wait for is got in turn.
        let in_turn = !cx.awaits_some() || self.is_in_turn(cx, &call);
        match if in_turn { self.begin(cx, conn, call) } else { Err(call) } {
            Ok(()) => {}
            Err(call) => self.wait_for_memory(cx, conn, call),
        }
    }

    /// Gives a call the memory that it needs, and goes on with it. Gives it back if there is not enough.
    #[inline(always)]
    pub(super) fn begin<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        conn: &mut Conn,
        mut call: Box<OwnedCall>,
    ) -> Result<(), Box<OwnedCall>> {
        // The message of a long call is yet to come: what it needs beside that is not known.
        if call.message.is_some() && !self.prepare(cx, &mut call) {
            return Err(call);
        }
        if !call.fetches() {
            self.run(cx, conn, call);
            return Ok(());
        }
        self.fetch(cx, conn, call)
    }

    /// A call on a connection that drains, or whose peer has a name.
    #[cold]
    fn look_twice(conn: &Conn, call: &mut OwnedCall) -> Result<(), CallRefusal> {
        // A server that drains ends what it has begun, and begins nothing.
        if conn.stage() == Stage::Draining {
            return Err(CallRefusal::System(Trouble::Draining));
        }
        if let Some(peer) = &conn.peer() {
            call.name_peer(peer);
        }
        Ok(())
    }

    /// Gives the call the memory that its procedure declared; false if there is not enough.
    #[inline(always)]
    pub(super) fn prepare<F: Fabric>(&mut self, cx: &mut Context<F>, call: &mut OwnedCall) -> bool {
        let Some(services) = self.services.as_ref() else { return false };
        let entry = services.entry(call.entry);
        let (results_at, len) = reply_room(call, entry);
        call.results_at = results_at;
        call.reply = cx.pool.alloc_within(len, cx.longest_for_reply(len));
        let mut enough = call.reply.is_some();
        for result in &mut call.results {
            result.capacity = result.capacity.min(u32::try_from(entry.binding.results.max_len).unwrap_or(u32::MAX));
            if entry.result_memory == ResultMemory::Pool && result.capacity > 0 {
                match cx.alloc_chunk(result.capacity as usize) {
                    Some(buf) => result.bytes = ResultBytes::Pool(buf),
                    None => enough = false,
                }
            }
        }
        enough
    }

    /// A call has arrived whose RPC message is in a chunk, or came in parts.
    #[cold]
    pub(in crate::shard) fn serve_unusual<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        conn: &mut Conn,
        mut call: Box<OwnedCall>,
        view: &View<'_>,
    ) {
        // What it calls is not known yet.
        call.entry = NO_ENTRY;
        call.xid = view.xid();
        call.inv_handle = view.inv_handle();
        let mut read = read_lists(view, &mut call);
        if view.htype() == HeaderType::Nomsg {
            let longest = cx.config.reassemble_up_to as u64;
            let read = read.and_then(|()| read_position_zero(&mut call, longest));
            if let Err(refusal) = read {
                return self.refuse_call(cx, conn, call, refusal);
            }
            if self.must_wait(cx, conn, &call) {
                self.hold_back(cx, conn, call);
            } else if let Err(call) = self.begin(cx, conn, call) {
                self.wait_for_memory(cx, conn, call);
            }
            return;
        }
        let Some(message) = cx.assemble_last(conn, view.payload()) else {
            return self.refuse_call(cx, conn, call, CallRefusal::System(Trouble::NoParts));
        };
        if read.is_ok() {
            read = self.read_rpc(&message, 0, &mut call);
        }
        call.put_together();
        self.serve(cx, conn, call, read, ReceivedBuf::whole(message));
    }

    /// Runs a call, here or on a worker.
    pub(super) fn run<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn, mut call: Box<OwnedCall>) {
        let Some(services) = self.services.as_ref() else { return };
        match services.entry(call.entry).run_here(&mut *call) {
            true => self.finish(cx, conn, call),
            false => self.run_elsewhere(cx, conn, call),
        }
    }

    /// Runs a call of a procedure that runs on workers, or once, or that takes its calls.
    #[inline(never)]
    fn run_elsewhere<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn, mut call: Box<OwnedCall>) {
        let Some(services) = self.services.as_ref() else { return };
        let entry = services.entry(call.entry);
        if let Some(known) = entry.cached.as_ref().and_then(|cache| cache.look_up(&mut *call)) {
            let silent = entry.silent;
            return self.run_before(cx, conn, call, known, silent);
        }
        if entry.takes_calls() {
            return self.hand_over(cx, conn, call);
        }
        if entry.run_on == RunOn::Workers && self.away.has_workers() {
            conn.served.at_workers += 1;
            return self.away.send_to_workers(WorkKey::of(conn, &call), call);
        }
        entry.run(&mut *call);
        self.finish(cx, conn, call);
    }

    /// A call has come that came before: it must not run again.
    fn run_before<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        conn: &mut Conn,
        mut call: Box<OwnedCall>,
        known: Lookup,
        silent: bool,
    ) {
        match known {
            Lookup::Done(reply) => {
                let OpaqueAuth { flavor, body } = reply.verifier();
                // It was taken the first time.
                let _ = call.set_verifier(flavor, body);
                let given = call.reply_writer().is_some_and(|mut results| results.put(&reply).is_ok());
                call.refusal = (!given).then_some(Refusal::SystemError);
                self.finish(cx, conn, call);
            }
            Lookup::Full if !silent => {
                self.refuse_call(cx, conn, call, CallRefusal::System(Trouble::CacheFull));
            }
            Lookup::Lost if !silent => {
                self.refuse_call(cx, conn, call, CallRefusal::Rpc(reply_body(Refusal::SystemError)));
            }
            Lookup::InProgress if !silent && !conn.proto.is_double(call.id) => {
                self.repeats.push_back(call);
                cx.schedule.control_now();
            }
            // The first one will be answered here, or nobody waits for an answer. (It is not new: that was
            // seen to before.)
            Lookup::InProgress | Lookup::Lost | Lookup::Full | Lookup::New(_) => {
                conn.proto.forget(call.id);
                self.boxes.put(call);
                cx.ready.add(conn);
            }
        }
    }

    /// Calls that came again while they ran, by a connection that was made again: they are answered as the
    /// first ones are when those are through, which may be on another self.
    #[cold]
    pub(super) fn answer_repeats<F: Fabric>(&mut self, cx: &mut Context<F>) {
        for call in std::mem::take(&mut self.repeats) {
            let Some(conn) = cx.conns.take(call.qp) else {
                self.boxes.put(call);
                continue;
            };
            cx.lend(conn, |cx, conn| {
                let once = self.services.as_ref().and_then(|all| all.entry(call.entry).cached.as_ref());
                if once.is_some_and(|cache| cache.still_runs(&*call)) {
                    let soon = cx.clock.read() + nanoseconds(cx.config.control_interval);
                    cx.schedule.wake_by(soon);
                    self.repeats.push_back(call);
                } else {
                    self.run_elsewhere(cx, conn, call);
                    cx.ready.add(conn);
                }
            });
        }
    }

    /// The handler is through: sends the reply, or queues it.
    #[inline(always)]
    pub(super) fn finish<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn, call: Box<OwnedCall>) {
        cx.stats.calls += 1;
        match call.refusal {
            None if !call.returns && !call.verifier.is_some() => self.answer(cx, conn, call, true),
            _ => self.finish_unusual(cx, conn, call),
        }
    }

    /// The same where there is more to look at than how long the reply is.
    #[inline(never)]
    fn finish_unusual<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn, mut call: Box<OwnedCall>) {
        match self.look_at_outcome(cx, &mut call) {
            Ok(()) => {
                if let Some(call) = self.hold_reply(cx, conn, call) {
                    self.answer(cx, conn, call, false);
                }
            }
            Err(Some(refusal)) => self.refuse_call(cx, conn, call, refusal),
            Err(None) => self.end_one_way(cx, conn, call),
        }
    }

    /// How a call is refused instead, or `None` if it is not answered at all.
    #[inline(always)]
    fn look_at_outcome<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        call: &mut OwnedCall,
    ) -> Result<(), Option<CallRefusal>> {
        match call.refusal {
            None => {}
            Some(Refusal::NoReply) if self.is_silent(call) => return Err(None),
            Some(Refusal::ShortChunk { index, needed }) => {
                let error = ErrorBody::WriteResource { chunk_index: index.saturating_add(1), length_needed: needed };
                return Err(Some(CallRefusal::Transport(error)));
            }
            Some(refusal) => {
                if matches!(refusal, Refusal::SystemError | Refusal::NoReply) {
                    self.tell_system_error(cx, call);
                }
                return Err(Some(CallRefusal::Rpc(reply_body(refusal))));
            }
        }
        if let Some(arena) = call.results.iter().find_map(|result| foreign_arena(cx, result)) {
            cx.error(
                "results in foreign arenas",
                format_args!(
                    "procedure {} of program {}: a result is in arena {arena}, which is not among `Config::arenas`",
                    call.procedure,
                    ProgramNumber(call.program)
                ),
            );
            return Err(Some(CallRefusal::Rpc(reply_body(Refusal::SystemError))));
        }
        if call.verifier.is_some() && !self.make_room_for_verifier(cx, call) {
            return Err(Some(CallRefusal::System(Trouble::NoBuffers(None))));
        }
        Ok(())
    }

    /// The procedure of a call is one that is not answered.
    pub(super) fn is_silent(&self, call: &OwnedCall) -> bool {
        self.services.as_ref().is_some_and(|all| all.entry(call.entry).silent)
    }

    /// Moves the results back, so that a longer RPC header has its place in front of them. False without
    /// memory for it.
    #[cold]
    fn make_room_for_verifier<F: Fabric>(&mut self, cx: &mut Context<F>, call: &mut OwnedCall) -> bool {
        let at = reply_headroom(call) + call.header_len();
        let (results, end) = (call.results_at..call.results_at + call.results_len, at + call.results_len);
        if at <= call.results_at {
            return true;
        }
        match &mut call.reply {
            Some(buf) if end <= buf.capacity() => buf.full_mut().copy_within(results, at),
            Some(buf) => {
                let Some(mut longer) = cx.pool.alloc(end) else { return false };
                longer[at..].copy_from_slice(&buf.full_mut()[results]);
                call.reply = Some(longer);
            }
            None => return false,
        }
        call.results_at = at;
        true
    }

    /// A call that is not answered is over. In version 1 its caller would wait for the credit for ever.
    #[cold]
    fn end_one_way<F: Fabric>(&mut self, cx: &mut Context<F>, conn: &mut Conn, mut call: Box<OwnedCall>) {
        if conn.proto.terms().version == Version::V1 {
            let nothing = ReplyBody::SUCCESS;
            return self.refuse_call(cx, conn, call, CallRefusal::Rpc(nothing));
        }
        self.time(cx, &mut call);
        conn.proto.forget(call.id);
        self.boxes.put(call);
        // Its place is free: the peer may be told.
        cx.ready.add(conn);
    }

    /// Sends the reply now, or when there is a credit for it. The caller sees to it that the connection's
    /// chain is posted. `plain`: it is known to be a success, with no verifier, that returns nothing.
    #[inline(always)]
    pub(super) fn answer<F: Fabric>(
        &mut self,
        cx: &mut Context<F>,
        conn: &mut Conn,
        mut call: Box<OwnedCall>,
        plain: bool,
    ) {
        let receives_ok = cx.receives_ok(conn);
        let backlogged = conn.is_backlogged(cx.config.signal_every);
        if backlogged {
            conn.proto.reply(call.id);
        }
        if !backlogged && conn.proto.reply_now(call.id, receives_ok) {
            self.transmit_reply(cx, conn, call, receives_ok, plain);
        } else {
            // What the call came in is what Receives may be short of. (A header with chunks may be written
            // into it.)
            if !call.returns {
                call.message = None;
            }
            let index = call.id.index();
            conn.served.replies[index] = Some(call);
        }
        if !cx.config.batch {
            cx.post_chain(conn);
        }
    }
}

/// The arena of a handler's own memory that this shard's fabric does not know: it would end the connection.
fn foreign_arena<F: Fabric>(cx: &Context<F>, result: &ResultChunk) -> Option<ArenaId> {
    let ResultBytes::Shared(bytes) = &result.bytes else { return None };
    (!cx.knows(bytes.arena())).then(|| bytes.arena())
}
