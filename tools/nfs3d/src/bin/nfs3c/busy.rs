//! Retries of calls that the server is too busy to execute (NFS3ERR_JUKEBOX).

use std::time::{Duration, Instant};

use rpcrdma_config::print_error;
use rpcrdma_nfs3d::nfs3::Nfsstat3;

use crate::calls::StatusError;

/// Delay before the first retry.
const FIRST_DELAY: Duration = Duration::from_millis(100);
/// Longest delay before a retry.
const LONGEST_DELAY: Duration = Duration::from_secs(5);

/// Delays between retries while the server is busy.
#[derive(Debug)]
pub(crate) struct Retry {
    /// Time limit of all retries.
    limit: Duration,
    /// Next delay.
    delay: Duration,
    /// End of the time limit, if the last reply was that the server is busy.
    deadline: Option<Instant>,
}

/// True if a call failed because the server is busy.
pub(crate) fn is_busy(error: &anyhow::Error) -> bool {
    error.downcast_ref::<StatusError>().is_some_and(|failed| failed.0 == Nfsstat3::ErrJukebox)
}

impl Retry {
    pub(crate) fn new(limit: Duration) -> Self {
        Self { limit, delay: FIRST_DELAY, deadline: None }
    }

    /// Returns the delay before a call that failed with `error` is retried. Reports the first retry.
    ///
    /// # Errors
    /// `error`, if the server was not busy or retries are disabled. Otherwise the time limit has passed.
    pub(crate) fn next_delay(&mut self, error: anyhow::Error) -> anyhow::Result<Duration> {
        if !is_busy(&error) || self.limit.is_zero() {
            return Err(error);
        }
        let now = Instant::now();
        if self.deadline.is_none() {
            print_error!("nfs3c: {error:#}: the server is busy: trying again for {:?} (--busy-timeout)", self.limit);
        }
        let left = self.deadline.get_or_insert(now + self.limit).saturating_duration_since(now);
        if left.is_zero() {
            return Err(error.context(format!("the server was busy for {:?} (--busy-timeout)", self.limit)));
        }
        let delay = self.delay.min(left);
        self.delay = (2 * self.delay).min(LONGEST_DELAY);
        Ok(delay)
    }

    /// Resets the delays after a successful call.
    pub(crate) fn reset(&mut self) {
        *self = Self::new(self.limit);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_grow_until_a_call_succeeds() {
        let mut retry = Retry::new(Duration::from_secs(3600));
        let next = |retry: &mut Retry| retry.next_delay(StatusError(Nfsstat3::ErrJukebox).into()).unwrap().as_millis();
        let delays: Vec<_> = (0..8).map(|_| next(&mut retry)).collect();
        assert_eq!(delays, [100, 200, 400, 800, 1600, 3200, 5000, 5000]);
        retry.reset();
        assert_eq!(next(&mut retry), 100);
        assert!(retry.next_delay(StatusError(Nfsstat3::ErrStale).into()).is_err_and(|error| !is_busy(&error)));
        assert!(Retry::new(Duration::ZERO).next_delay(StatusError(Nfsstat3::ErrJukebox).into()).is_err());
    }
}
