//! Translation of the device's completions.

#![forbid(unsafe_code)]

use std::collections::VecDeque;

use super::map::NumberMap;
use super::qp::{Qp, State};
use super::quirks::Quirks;
use super::receives::SharedReceives;
use super::sys::WorkCompletion;
use super::wr_id::{Owner, WrId};
use crate::table::Table;
use crate::{Completion, Disconnect, FabricStats, Opcode, QpId, Status};

/// State that completions change.
pub(super) struct CompletionState {
    pub(super) table: Table<Qp>,
    pub(super) shared: SharedReceives,
    /// Slot by queue pair number.
    pub(super) by_number: NumberMap<u32>,
    /// Cache of the last lookup: number and slot.
    last: (u32, u32),
    /// Completions ready for delivery.
    pub(super) ready: VecDeque<Completion>,
    /// Slots that connection management must process.
    pub(super) attention: Vec<u32>,
    pub(super) stats: FabricStats,
    /// Polls that found the device's completion queue empty.
    pub(super) empty_polls: u64,
    /// Free entries of the completion queue.
    pub(super) room: usize,
    /// The port has no link, so no peer answers.
    pub(super) is_port_down: bool,
    invalidated_flags: u32,
}

impl CompletionState {
    pub(super) fn new(shared: SharedReceives, room: usize, quirks: &Quirks) -> Self {
        Self {
            table: Table::default(),
            shared,
            by_number: NumberMap::default(),
            last: (u32::MAX, u32::MAX),
            ready: VecDeque::with_capacity(64),
            attention: Vec::new(),
            stats: FabricStats::default(),
            empty_polls: 0,
            room,
            is_port_down: false,
            invalidated_flags: quirks.invalidated_flags,
        }
    }

    /// Continues with a reopened device. Counters and queue pair names stay.
    pub(super) fn resume(&mut self, shared: SharedReceives, room: usize, quirks: &Quirks) {
        (self.shared, self.room, self.is_port_down) = (shared, room, false);
        self.invalidated_flags = quirks.invalidated_flags;
    }

    pub(super) fn add_number(&mut self, number: u32, slot: u32) {
        self.by_number.insert(number, slot);
    }

    pub(super) fn remove_number(&mut self, number: u32) {
        self.by_number.remove(&number);
        self.last = (u32::MAX, u32::MAX);
    }

    #[inline]
    pub(super) fn complete(&mut self, done: &WorkCompletion, out: &mut Vec<Completion>) {
        if WrId(done.wr_id()).is_receive() { self.receive_done(done, out) } else { self.send_done(done, out) }
    }

    #[inline]
    fn send_done(&mut self, done: &WorkCompletion, out: &mut Vec<Completion>) {
        let mut status = status(done.status);
        if !status.is_ok() {
            status = explained(status, self.is_port_down);
        }
        let Some(qp) = self.table.at(WrId(done.wr_id()).slot()) else { return };
        let retired = qp.endpoint.retire(done, status, out);
        self.room += retired.count;
        if !status.is_ok() && !retired.is_unknown {
            self.stats.access_refused += u64::from(status == Status::RemoteAccess);
            failed(qp, &mut self.attention, "a work request", status, done.vendor_err);
        }
    }

    #[inline]
    fn receive_done(&mut self, done: &WorkCompletion, out: &mut Vec<Completion>) {
        let mut status = status(done.status);
        let immediate = status.is_ok() && !done.is_message();
        if immediate {
            status = Status::RemoteInvalidRequest;
        }
        let received = if status.is_ok() { done.byte_len as usize } else { 0 };
        let id = WrId(done.wr_id());
        let (qp, buf) = if id.owner() == Owner::SHARED {
            let buf = self.shared.complete(done, received);
            if self.last.0 != done.qp_num {
                self.last = (done.qp_num, self.by_number.get(&done.qp_num).copied().unwrap_or(u32::MAX));
            }
            (self.table.at(self.last.1), buf)
        } else {
            match self.table.at(id.slot()) {
                Some(qp) => {
                    let buf = qp.endpoint.received(done, received);
                    (Some(qp), buf)
                }
                None => (None, None),
            }
        };
        // A completion of a destroyed queue names no buffer.
        let Some(buf) = buf else { return };
        self.room += 1;
        let Some(qp) = qp else {
            // The queue pair is already destroyed.
            out.push(Completion::failed_receive(QpId::NONE, Status::Flushed, buf.into_buf()));
            return;
        };
        let mut invalidated = None;
        if status.is_ok() {
            if done.flags & self.invalidated_flags != 0 && qp.endpoint.windows.revoked_by_peer(done.extra) {
                invalidated = Some(done.extra);
            }
            if qp.state == State::Accepting && !qp.is_early {
                qp.is_early = true;
                self.attention.push(qp.id.slot);
            }
        } else if immediate {
            self.stats.peer_violations += 1;
            sent_immediate(qp, &mut self.attention);
        } else {
            failed(qp, &mut self.attention, "a Receive", status, done.vendor_err);
        }
        out.push(Completion { wr_id: 0, qp: qp.id, opcode: Opcode::Recv, status, buf: Some(buf), invalidated });
    }
}

/// Replaces a status by `PortDown` without a link. Devices report only a missing answer or, as soft-RoCE, a failed
/// send.
#[cold]
fn explained(status: Status, is_port_down: bool) -> Status {
    match status {
        Status::RetryExceeded | Status::LocalQpOperation if is_port_down => Status::PortDown,
        other => other,
    }
}

#[cold]
fn failed(qp: &mut Qp, attention: &mut Vec<u32>, what: &str, status: Status, vendor: u32) {
    let cause = if status == Status::PortDown { Disconnect::PortDown } else { Disconnect::Failure };
    qp.fail(attention, cause, || format!("{what} ended with {status:?} (vendor's code {vendor:#x})"));
}

/// Stops a queue pair after immediate data. The device itself accepts such data and continues.
#[cold]
fn sent_immediate(qp: &mut Qp, attention: &mut Vec<u32>) {
    qp.stop();
    qp.fail(attention, Disconnect::Violation, || "the peer has sent immediate data, which no message has".to_owned());
}

/// Maps the device's status code.
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
            assert_eq!((explained(failure, true), explained(failure, false)), (Status::PortDown, failure));
        }
        // These have other causes.
        for other in [Status::Flushed, Status::RemoteAccess, Status::RnrRetryExceeded] {
            assert_eq!(explained(other, true), other);
        }
    }
}
