//! A single message from a poll.

#![forbid(unsafe_code)]

use crate::{Completion, Opcode, QpId, ReceivedBuf, Status};

/// An arrived message: the fields of a successful [`Opcode::Recv`] [`Completion`].
#[derive(Debug)]
pub struct Arrival {
    /// The queue pair that received it. It may be destroyed already.
    pub qp: QpId,
    /// The message.
    pub buf: ReceivedBuf,
    /// The key of this side that the message revoked.
    pub invalidated: Option<u32>,
}

impl From<Arrival> for Completion {
    #[inline]
    fn from(arrival: Arrival) -> Self {
        let Arrival { qp, buf, invalidated } = arrival;
        Self { wr_id: 0, qp, opcode: Opcode::Recv, status: Status::Success, buf: Some(buf), invalidated }
    }
}

/// The result of [`Fabric::poll_message`](crate::Fabric::poll_message).
#[derive(Debug)]
pub enum Found {
    /// One message, and nothing else. It was not appended.
    Message(Arrival),
    /// The number of completions that were appended.
    Completions(usize),
}

impl Found {
    /// The result of a poll that has appended `count` completions. A single message is removed from `out` again.
    #[inline]
    pub(crate) fn of_last(out: &mut Vec<Completion>, count: usize) -> Self {
        match out.pop_if(|last| count == 1 && last.status.is_ok() && last.buf.is_some()) {
            Some(Completion { qp, buf: Some(buf), invalidated, .. }) => Self::Message(Arrival { qp, buf, invalidated }),
            _ => Self::Completions(count),
        }
    }
}
