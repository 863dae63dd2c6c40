//! Life cycle of a connection.

/// Stage of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// Not yet `Established` by the fabric.
    Connecting,
    /// A client waits for the answer to its first message.
    Negotiating,
    /// Open for messages.
    Open,
    /// No new calls of the peer; current ones complete. This side makes calls only while it serves some, because their
    /// handlers may call back.
    Draining,
    /// All calls have ended. The connection closes when the peer has received everything.
    Closing,
    /// Lost; waits to reconnect.
    Reconnecting,
}

impl Stage {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Connecting => "connecting",
            Self::Negotiating => "negotiating",
            Self::Open => "open",
            Self::Draining => "draining",
            Self::Closing => "closing",
            Self::Reconnecting => "reconnecting",
        }
    }

    /// Whether `next` may follow directly.
    const fn leads_to(self, next: Self) -> bool {
        use Stage::{Closing, Connecting, Draining, Negotiating, Open, Reconnecting};
        match self {
            // A connection that was never established has nothing to drain.
            Connecting => matches!(next, Negotiating | Open | Closing | Reconnecting),
            Negotiating => matches!(next, Open | Draining | Reconnecting),
            Open => matches!(next, Draining | Reconnecting),
            Draining => matches!(next, Closing),
            Reconnecting => matches!(next, Connecting | Draining | Closing),
            Closing => false,
        }
    }

    /// Enters `next`.
    ///
    /// # Panics
    /// In debug builds, on an invalid transition.
    pub(super) fn go(&mut self, next: Self) {
        debug_assert!(self.leads_to(next), "{self:?} does not lead to {next:?}");
        *self = next;
    }
}

#[cfg(test)]
mod tests {
    use super::Stage::{self, Closing, Connecting, Draining, Negotiating, Open, Reconnecting};

    const ALL: [Stage; 6] = [Connecting, Negotiating, Open, Draining, Closing, Reconnecting];

    #[test]
    fn every_stage_leads_to_the_end_and_the_end_nowhere() {
        for start in ALL {
            let mut reached = vec![start];
            for at in 0.. {
                let Some(&stage) = reached.get(at) else { break };
                for next in ALL.into_iter().filter(|next| stage.leads_to(*next)) {
                    assert_ne!(stage, Closing);
                    if !reached.contains(&next) {
                        reached.push(next);
                    }
                }
            }
            assert!(reached.contains(&Closing), "{start:?}");
        }
    }

    #[test]
    fn a_draining_connection_takes_no_calls() {
        assert!(ALL.into_iter().filter(|next| Draining.leads_to(*next)).eq([Closing]));
    }

    #[test]
    #[should_panic(expected = "Closing does not lead to Open")]
    fn a_wrong_way_is_not_gone() {
        let mut stage = Closing;
        stage.go(Open);
    }
}
