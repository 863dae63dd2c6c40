//! Outgoing messages other than calls: replies, errors, properties, operations, parts, keep-alives.

use std::collections::VecDeque;

use super::InboundId;
use crate::wire::ErrorBody;

/// Minimum capacity for errors that wait to be sent.
const MIN_ERRORS: usize = 4;

/// A message that waits to be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum QueuedMessage {
    /// The reply to a peer's call.
    Reply(InboundId),
    /// The rest of a continued message: it holds all others back.
    Continue,
    /// This side's properties.
    Connprop,
    /// An operation on characteristics.
    Optional,
    /// A transport error about the message with this XID.
    Error { xid: u32, error: ErrorBody },
    /// The answer to an unsupported version, in the layout that all versions share.
    WrongVersion { xid: u32, vers: u32 },
}

/// Queue of outgoing messages.
#[derive(Debug)]
pub(super) struct Outbox {
    /// In the order of sending. Version 1 sends them without a credit.
    queue: VecDeque<QueuedMessage>,
    /// Number of messages sent. A continued message counts when its last part is sent. The number wraps.
    pub(super) dequeued: u32,
    /// Number of queued errors. Each counts against the limit of served calls until it is sent.
    pub(super) errors: usize,
    /// Whether to send a pure grant as a keep-alive, unless another message grants credits first.
    pub(super) keep_alive: bool,
}

impl Outbox {
    /// A queue with room for the answers to `calls` calls.
    pub(super) fn new(calls: usize) -> Self {
        let queue = VecDeque::with_capacity(2 * calls.max(MIN_ERRORS));
        Self { queue, dequeued: 0, errors: 0, keep_alive: false }
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Number of messages that wait.
    pub(super) fn len(&self) -> usize {
        self.queue.len()
    }

    pub(super) fn contains(&self, message: QueuedMessage) -> bool {
        self.queue.contains(&message)
    }

    /// The next message to send.
    #[inline]
    pub(super) fn front(&self) -> Option<QueuedMessage> {
        self.queue.front().copied()
    }

    /// Adds a message behind all others. Errors need [`push_error`](Self::push_error).
    #[cold]
    pub(super) fn push(&mut self, message: QueuedMessage) {
        self.queue.push_back(message);
    }

    /// Adds a message other than an error before all others.
    pub(super) fn push_first(&mut self, message: QueuedMessage) {
        self.queue.push_front(message);
    }

    /// Queues an error, unless as many as `calls` are queued. A correct peer never reaches this bound, because it runs
    /// out of credits before.
    #[cold]
    pub(super) fn push_error(&mut self, message: QueuedMessage, calls: usize) {
        if self.errors < calls.max(MIN_ERRORS) {
            self.errors += 1;
            self.queue.push_back(message);
        }
    }

    /// Removes the next message, which is sent now.
    pub(super) fn pop(&mut self) {
        if let Some(message) = self.queue.pop_front() {
            self.errors -=
                usize::from(matches!(message, QueuedMessage::Error { .. } | QueuedMessage::WrongVersion { .. }));
            self.dequeued = self.dequeued.wrapping_add(1);
        }
    }

    /// Holds all messages back until the next part of the continued message. Repeated calls change nothing.
    pub(super) fn hold_others(&mut self) {
        if self.front() != Some(QueuedMessage::Continue) {
            self.queue.push_front(QueuedMessage::Continue);
            // `pop` has counted the message of the part, but the message counts only when its last part is sent.
            self.dequeued = self.dequeued.wrapping_sub(1);
        }
    }

    /// Removes a message other than an error, which is then not sent.
    pub(super) fn remove(&mut self, message: QueuedMessage) {
        self.queue.retain(|queued| *queued != message);
    }

    /// Clears the queue when the connection ends.
    pub(super) fn clear(&mut self) {
        self.queue.clear();
        self.errors = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ERROR: QueuedMessage = QueuedMessage::Error { xid: 1, error: ErrorBody::System };

    #[test]
    fn errors_are_counted_while_they_wait() {
        let mut outbox = Outbox::new(2);
        (0..10).for_each(|_| outbox.push_error(ERROR, 2));
        assert_eq!((outbox.len(), outbox.errors), (MIN_ERRORS, MIN_ERRORS), "further errors are dropped");
        assert_eq!(outbox.front(), Some(ERROR));
        outbox.pop();
        assert_eq!((outbox.errors, outbox.dequeued), (MIN_ERRORS - 1, 1));
        outbox.clear();
        assert_eq!((outbox.errors, outbox.is_empty()), (0, true));
    }

    #[test]
    fn messages_are_sent_in_order() {
        let mut outbox = Outbox::new(2);
        outbox.push(QueuedMessage::Optional);
        outbox.push_first(QueuedMessage::Connprop);
        assert!(outbox.contains(QueuedMessage::Connprop) && outbox.front() == Some(QueuedMessage::Connprop));
        outbox.remove(QueuedMessage::Connprop);
        assert_eq!(outbox.front(), Some(QueuedMessage::Optional));
        outbox.pop();
        outbox.pop();
        assert_eq!((outbox.is_empty(), outbox.dequeued), (true, 1));
    }

    #[test]
    fn a_continued_message_holds_others_back_until_its_next_part() {
        let mut outbox = Outbox::new(2);
        outbox.push(QueuedMessage::Optional);
        outbox.hold_others();
        outbox.hold_others();
        assert_eq!((outbox.front(), outbox.len()), (Some(QueuedMessage::Continue), 2));
        outbox.pop();
        assert_eq!((outbox.front(), outbox.len(), outbox.dequeued), (Some(QueuedMessage::Optional), 1, 0));
    }
}
