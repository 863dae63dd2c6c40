//! Translation of the device's completions.

#![forbid(unsafe_code)]

use std::collections::VecDeque;

use super::number_map::NumberMap;
use super::qp::{VerbsQp, VerbsQpState};
use super::quirks::Quirks;
use super::receives::SharedReceives;
use super::sys::WorkCompletion;
use super::work_queues::PostContext;
use super::wr_id::{Owner, WrId};
use crate::qp_table::QpTable;
use crate::{Completion, Disconnect, FabricStats, Opcode, QpId, Status};

/// State that completions change.
pub(super) struct CompletionState {
    pub(super) table: QpTable<VerbsQp>,
    pub(super) shared: SharedReceives,
    /// Slots by queue pair number.
    pub(super) by_number: NumberMap<u32>,
    /// The last lookup in `by_number`: number and slot.
    last_lookup: (u32, u32),
    /// Completions ready for delivery.
    pub(super) ready: VecDeque<Completion>,
    /// Slots that connection management must process.
    pub(super) attention: Vec<u32>,
    pub(super) stats: FabricStats,
    /// Polls that found the device's completion queue empty.
    pub(super) empty_polls: u64,
    /// Free entries of the completion queue.
    pub(super) room: usize,
    /// Whether the port has no link, so that no peer answers.
    pub(super) is_port_down: bool,
    /// Flags of completions that mark an invalidated key.
    pub(super) invalidated_flags: u32,
}

impl CompletionState {
    pub(super) fn new(shared: SharedReceives, room: usize, quirks: &Quirks) -> Self {
        Self {
            table: QpTable::default(),
            shared,
            by_number: NumberMap::default(),
            last_lookup: (u32::MAX, u32::MAX),
            ready: VecDeque::with_capacity(64),
            attention: Vec::new(),
            stats: FabricStats::default(),
            empty_polls: 0,
            room,
            is_port_down: false,
            invalidated_flags: quirks.invalidated_flags,
        }
    }

    /// Removes a queue pair, and its number.
    pub(super) fn remove(&mut self, id: QpId) -> Option<Box<VerbsQp>> {
        let qp = self.table.remove(id)?;
        self.by_number.remove(&qp.queues.number());
        self.last_lookup = (u32::MAX, u32::MAX);
        Some(qp)
    }

    /// Ends all connections for this cause.
    #[cold]
    pub(super) fn fail_all(&mut self, cause: Disconnect, reason: impl Fn() -> String) {
        let attention = &mut self.attention;
        self.table.iter_mut().for_each(|qp| qp.fail(attention, cause, &reason));
    }

    /// Posts a marker to a send queue. Its completion proves that all earlier requests have ended.
    pub(super) fn post_marker(&mut self, id: QpId, context: &mut PostContext) {
        if self.table.get_mut(id).is_some_and(|qp| qp.queues.post_marker(context)) {
            self.room = self.room.saturating_sub(1);
        }
    }

    #[inline]
    pub(super) fn complete(&mut self, done: &WorkCompletion, out: &mut Vec<Completion>) {
        if WrId(done.wr_id).is_receive() { self.complete_receive(done, out) } else { self.complete_send(done, out) }
    }

    #[inline]
    fn complete_send(&mut self, done: &WorkCompletion, out: &mut Vec<Completion>) {
        let mut status = status(done.status);
        if !status.is_ok() {
            status = with_port_state(status, self.is_port_down);
        }
        let Some(qp) = self.table.get_by_slot_mut(WrId(done.wr_id).slot()) else { return };
        let Some(count) = qp.queues.retire(done, status, out) else { return };
        self.room += count;
        if !status.is_ok() {
            self.stats.access_refused += u64::from(status == Status::RemoteAccess);
            record_failure(qp, &mut self.attention, "a work request", status, done.vendor_err);
        }
    }

    #[inline]
    fn complete_receive(&mut self, done: &WorkCompletion, out: &mut Vec<Completion>) {
        let mut status = status(done.status);
        let has_immediate = status.is_ok() && done.has_immediate();
        if has_immediate {
            status = Status::RemoteInvalidRequest;
        }
        let received = if status.is_ok() { done.byte_len as usize } else { 0 };
        let id = WrId(done.wr_id);
        let (mut qp, mut buf) = (self.table.get_by_slot_mut(id.slot()), None);
        if id.owner() == Owner::SHARED {
            buf = self.shared.table.complete(done, received);
            if self.last_lookup.0 != done.qp_num {
                self.last_lookup = (done.qp_num, self.by_number.get(&done.qp_num).copied().unwrap_or(u32::MAX));
            }
            qp = self.table.get_by_slot_mut(self.last_lookup.1);
        } else if let Some(qp) = &mut qp {
            buf = qp.queues.receives.as_mut().and_then(|table| table.complete(done, received));
        }
        // A completion of a destroyed receive queue names no buffer.
        let Some(buf) = buf else { return };
        self.room += 1;
        let Some(qp) = qp else {
            // The queue pair is already destroyed.
            out.push(Completion::failed_receive(QpId::NONE, Status::Flushed, buf.into_buf()));
            return;
        };
        let mut invalidated = None;
        if status.is_ok() {
            let rkey = done.invalidated_rkey();
            let is_revoked = done.wc_flags & self.invalidated_flags != 0 && qp.queues.windows.free_invalidated(rkey);
            invalidated = is_revoked.then_some(rkey);
            if qp.state == VerbsQpState::Accepting && !qp.received_early {
                qp.received_early = true;
                self.attention.push(qp.id.slot);
            }
        } else if has_immediate {
            self.stats.peer_violations += 1;
            refuse_immediate_data(qp, &mut self.attention);
        } else {
            record_failure(qp, &mut self.attention, "a Receive", status, done.vendor_err);
        }
        out.push(Completion { wr_id: 0, qp: qp.id, opcode: Opcode::Recv, status, buf: Some(buf), invalidated });
    }
}

/// Replaces a status by `PortDown` if a port without link explains it. Devices report only that an answer is missing
/// or, like soft-RoCE, that sending failed.
#[cold]
fn with_port_state(status: Status, is_port_down: bool) -> Status {
    match status {
        Status::RetryExceeded | Status::LocalQpOperation if is_port_down => Status::PortDown,
        other => other,
    }
}

#[cold]
fn record_failure(qp: &mut VerbsQp, attention: &mut Vec<u32>, what: &str, status: Status, vendor: u32) {
    let cause = if status == Status::PortDown { Disconnect::PortDown } else { Disconnect::Failure };
    qp.fail(attention, cause, || format!("{what} failed: {status} (vendor error {vendor:#x})"));
}

/// Puts a queue pair into error after immediate data. The device itself accepts such data and continues.
#[cold]
fn refuse_immediate_data(qp: &mut VerbsQp, attention: &mut Vec<u32>) {
    qp.enter_error();
    qp.fail(attention, Disconnect::Violation, || {
        "the peer sent immediate data, which the protocol does not use".to_owned()
    });
}

/// Maps a code of `ibv_wc_status`.
#[inline]
pub(super) fn status(code: u32) -> Status {
    match code {
        0 => Status::Success,
        1 => Status::LocalLength,
        2 | 3 => Status::LocalQpOperation,
        4 | 8 => Status::LocalProtection,
        5 => Status::Flushed,
        6 => Status::WindowBind,
        9 => Status::RemoteInvalidRequest,
        10 => Status::RemoteAccess,
        11 | 16 => Status::RemoteOperation,
        12 | 20 => Status::RetryExceeded,
        13 => Status::RnrRetryExceeded,
        19 => Status::Fatal,
        other => Status::Other(other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_while_the_port_is_down_name_it() {
        for failure in [Status::RetryExceeded, Status::LocalQpOperation] {
            assert_eq!((with_port_state(failure, true), with_port_state(failure, false)), (Status::PortDown, failure));
        }
        // A port without link does not cause these failures.
        for other in [Status::Flushed, Status::RemoteAccess, Status::RnrRetryExceeded] {
            assert_eq!(with_port_state(other, true), other);
        }
    }
}
