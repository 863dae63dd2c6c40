//! How much is made of a connection's credits, and for how long it has been quiet.

/// In the time between two messages that keep a connection alive there are so many moments at which they go out.
const SLOTS: u64 = 8;

/// How much is made of a connection's credits, as of the last look.
#[derive(Debug, Default)]
pub(super) struct Use {
    /// Messages that it had sent and received.
    sent: u64,
    received: u64,
    /// Since when it has sent none, in nanoseconds.
    quiet_since: u64,
}

impl Use {
    /// It is made again: the messages are counted from the start.
    pub(super) fn restart(&mut self) {
        (self.sent, self.received) = (0, 0);
    }

    /// So many messages have been received: how many since the last look?
    pub(super) fn turned(&mut self, received: u64) -> u64 {
        received - std::mem::replace(&mut self.received, received)
    }

    /// So many messages have been sent by now; true if there was none for so long that one is due.
    pub(super) fn is_quiet(&mut self, sent: u64, now: u64, every: u64) -> bool {
        let quiet = sent == self.sent && now >= self.due(every);
        if sent != self.sent || quiet {
            // The look is soon after the moment that it is for.
            (self.sent, self.quiet_since) = (sent, now - now % moment(every));
        }
        quiet
    }

    /// When a message is due for want of others. Up to an eighth of the time later, as the messages of many
    /// connections go out together then: each time costs an idle shard a sleep and the polls before it.
    fn due(&self, every: u64) -> u64 {
        self.quiet_since.saturating_add(every).next_multiple_of(moment(every))
    }
}

/// From one moment to the next at which messages go out that keep connections alive, in nanoseconds.
pub(super) fn moment(every: u64) -> u64 {
    (every / SLOTS).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_is_quiet_once_for_each_time_that_passes() {
        let mut usage = Use::default();
        assert!(!usage.is_quiet(3, 100, 10), "it has sent three");
        assert!(!usage.is_quiet(3, 109, 10));
        assert!(usage.is_quiet(3, 110, 10));
        assert!(!usage.is_quiet(3, 119, 10), "one message is enough for a while");
        assert!(!usage.is_quiet(4, 120, 10), "that message");
        assert_eq!(usage.quiet_since, 120);
        let mut usage = Use::default();
        assert!(!usage.is_quiet(1, 1203, 800), "it is a look for 1200");
        assert_eq!(usage.due(800), 2000);
    }

    #[test]
    fn connections_that_fell_quiet_one_after_the_other_are_kept_alive_together() {
        let every = 8000;
        let mut all: Vec<Use> = (1..=1000).map(|since| Use { quiet_since: since, ..Use::default() }).collect();
        assert!(all.iter().all(|usage| usage.due(every) == 9000));
        assert!(!all.iter_mut().any(|usage| usage.is_quiet(0, 8999, every)));
        assert!(all.iter_mut().all(|usage| usage.is_quiet(0, 9000, every)));
        assert!(all.iter().all(|usage| usage.due(every) == 17_000), "and not later each time");
    }

    #[test]
    fn what_was_received_is_counted_once_and_from_the_start_when_it_is_made_again() {
        let mut usage = Use::default();
        assert_eq!((usage.turned(5), usage.turned(5), usage.turned(12)), (5, 0, 7));
        usage.restart();
        assert_eq!(usage.turned(2), 2);
    }
}
