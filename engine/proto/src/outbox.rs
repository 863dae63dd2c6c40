//! Outgoing messages other than calls: replies, errors, properties, operations, parts, grants.

use std::collections::VecDeque;

use super::Outgoing;

/// Least capacity for errors that wait to be sent.
const MIN_ERRORS: usize = 4;

/// Queue of outgoing messages.
#[derive(Debug)]
pub(super) struct Outbox {
    /// Oldest first. Version 1 sends them without a credit.
    queue: VecDeque<Outgoing>,
    /// Messages that have left the queue. The number wraps.
    gone: u32,
    /// Queued errors; each occupies a served call's place until sent.
    errors: usize,
    /// Whether a message was sent since the last pure-grant decision.
    pub(super) just_sent: bool,
    /// A pure grant to send, though no credit needs it.
    pub(super) ping: bool,
}

fn is_error(out: &Outgoing) -> bool {
    matches!(out, Outgoing::Error { .. } | Outgoing::WrongVersion { .. })
}

impl Outbox {
    /// A queue with room for the answers to `calls` calls.
    pub(super) fn new(calls: usize) -> Self {
        let queue = VecDeque::with_capacity(2 * calls.max(MIN_ERRORS));
        Self { queue, gone: 0, errors: 0, just_sent: false, ping: false }
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Messages that wait.
    pub(super) fn len(&self) -> usize {
        self.queue.len()
    }

    /// Errors that wait.
    #[inline]
    pub(super) fn errors(&self) -> usize {
        self.errors
    }

    /// Messages that have left the queue. The number wraps.
    pub(super) fn gone(&self) -> u32 {
        self.gone
    }

    pub(super) fn contains(&self, out: Outgoing) -> bool {
        self.queue.contains(&out)
    }

    /// The next message to send.
    pub(super) fn front(&self) -> Option<&Outgoing> {
        self.queue.front()
    }

    /// Adds a message behind all others. Not for errors.
    #[inline]
    pub(super) fn push(&mut self, out: Outgoing) {
        self.queue.push_back(out);
    }

    /// Adds a message before all others. Not for errors.
    pub(super) fn push_first(&mut self, out: Outgoing) {
        self.queue.push_front(out);
    }

    /// Queues an error, at most one per served call of `calls`. A correct peer never reaches this bound, since it gets
    /// no further Receives before.
    #[cold]
    pub(super) fn push_error(&mut self, out: Outgoing, calls: usize) {
        if self.errors < calls.max(MIN_ERRORS) {
            self.errors += 1;
            self.queue.push_back(out);
        }
    }

    /// Takes the next message to send.
    #[inline]
    pub(super) fn pop(&mut self) -> Option<Outgoing> {
        let out = self.queue.pop_front()?;
        self.errors -= usize::from(is_error(&out));
        self.gone = self.gone.wrapping_add(1);
        Some(out)
    }

    /// Returns a message, or its remaining parts, to the front.
    pub(super) fn put_back(&mut self, out: Outgoing) {
        self.errors += usize::from(is_error(&out));
        self.gone = self.gone.wrapping_sub(1);
        self.queue.push_front(out);
    }

    /// Removes a message that is not sent. Not for errors.
    pub(super) fn forget(&mut self, out: Outgoing) {
        self.queue.retain(|queued| *queued != out);
    }

    /// Clears it at the connection's end.
    pub(super) fn clear(&mut self) {
        self.queue.clear();
        self.errors = 0;
    }

    /// Whether no message was sent since the last call of this.
    #[inline]
    pub(super) fn take_silence(&mut self) -> bool {
        !std::mem::replace(&mut self.just_sent, false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::ErrorBody;

    const ERROR: Outgoing = Outgoing::Error { xid: 1, error: ErrorBody::System };

    #[test]
    fn errors_are_counted_while_they_wait() {
        let mut outbox = Outbox::new(2);
        (0..10).for_each(|_| outbox.push_error(ERROR, 2));
        assert_eq!((outbox.len(), outbox.errors()), (MIN_ERRORS, MIN_ERRORS), "no more than there is room for");
        assert_eq!(outbox.pop(), Some(ERROR));
        assert_eq!((outbox.errors(), outbox.gone()), (MIN_ERRORS - 1, 1));
        outbox.put_back(ERROR);
        assert_eq!((outbox.errors(), outbox.gone()), (MIN_ERRORS, 0));
        outbox.clear();
        assert_eq!((outbox.errors(), outbox.is_empty()), (0, true));
    }

    #[test]
    fn messages_go_out_in_order() {
        let mut outbox = Outbox::new(2);
        outbox.push(Outgoing::Optional);
        outbox.push_first(Outgoing::Connprop);
        assert!(outbox.contains(Outgoing::Connprop) && outbox.front() == Some(&Outgoing::Connprop));
        outbox.forget(Outgoing::Connprop);
        assert_eq!((outbox.pop(), outbox.pop(), outbox.gone()), (Some(Outgoing::Optional), None, 1));
    }

    #[test]
    fn silence_and_pings_are_reported_once() {
        let mut outbox = Outbox::new(0);
        outbox.just_sent = true;
        assert_eq!((outbox.take_silence(), outbox.take_silence()), (false, true));
        outbox.ping = true;
        assert_eq!((std::mem::take(&mut outbox.ping), outbox.ping), (true, false));
    }
}
