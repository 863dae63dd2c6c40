//! Usage of a connection's credits, and its keep-alive.

/// Moments of keep-alives within one keep-alive interval.
const SLOTS: u64 = 8;

/// Messages of a connection, as of the last checks.
#[derive(Debug, Default)]
pub(in crate::shard) struct CreditUsage {
    sent: u64,
    received: u64,
    /// Time of the last sent message, in nanoseconds.
    quiet_since: u64,
}

impl CreditUsage {
    /// Restarts the counts after a reconnect.
    pub(in crate::shard) fn restart(&mut self) {
        (self.sent, self.received) = (0, 0);
    }

    /// Number of messages received since the last check; `received` is the current total.
    pub(super) fn count_received(&mut self, received: u64) -> u64 {
        received - std::mem::replace(&mut self.received, received)
    }

    /// Whether a keep-alive is due; `sent` is the current number of sent messages.
    pub(super) fn needs_keep_alive(&mut self, sent: u64, now: u64, every: u64) -> bool {
        let needed = sent == self.sent && now >= self.due(every);
        if sent != self.sent || needed {
            // The check follows the moment closely.
            (self.sent, self.quiet_since) = (sent, now - now % moment(every));
        }
        needed
    }

    /// Time of the next keep-alive, up to an eighth late: many connections share a moment. Each moment costs an idle
    /// shard a sleep and the polls before it.
    fn due(&self, every: u64) -> u64 {
        self.quiet_since.saturating_add(every).next_multiple_of(moment(every))
    }
}

/// Nanoseconds between two moments of keep-alives.
pub(super) fn moment(every: u64) -> u64 {
    (every / SLOTS).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_is_quiet_once_for_each_time_that_passes() {
        let mut usage = CreditUsage::default();
        assert!(!usage.needs_keep_alive(3, 100, 10), "it has sent three");
        assert!(!usage.needs_keep_alive(3, 109, 10));
        assert!(usage.needs_keep_alive(3, 110, 10));
        assert!(!usage.needs_keep_alive(3, 119, 10), "one message is enough for a while");
        assert!(!usage.needs_keep_alive(4, 120, 10), "that message");
        assert_eq!(usage.quiet_since, 120);
        let mut usage = CreditUsage::default();
        assert!(!usage.needs_keep_alive(1, 1203, 800), "it is a look for 1200");
        assert_eq!(usage.due(800), 2000);
    }

    #[test]
    fn connections_that_fell_quiet_one_after_the_other_are_kept_alive_together() {
        let every = 8000;
        let mut all: Vec<CreditUsage> =
            (1..=1000).map(|since| CreditUsage { quiet_since: since, ..CreditUsage::default() }).collect();
        assert!(all.iter().all(|usage| usage.due(every) == 9000));
        assert!(!all.iter_mut().any(|usage| usage.needs_keep_alive(0, 8999, every)));
        assert!(all.iter_mut().all(|usage| usage.needs_keep_alive(0, 9000, every)));
        assert!(all.iter().all(|usage| usage.due(every) == 17_000), "and not later each time");
    }

    #[test]
    fn received_messages_count_once_and_anew_after_a_reconnect() {
        let mut usage = CreditUsage::default();
        assert_eq!((usage.count_received(5), usage.count_received(5), usage.count_received(12)), (5, 0, 7));
        usage.restart();
        assert_eq!(usage.count_received(2), 2);
    }
}
