//! Concurrent calls.

use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use rpcrdma::client::{ClientCall, LocalClient};
use rpcrdma::{IdlePolicy, Reply};

use crate::busy::{Retry, is_busy};
use crate::calls::Nfs;

/// Consecutive polls without completions after which the thread waits.
const EMPTY_POLLS: u32 = 256;

impl Nfs {
    /// Makes a call per job, with up to the connection's depth outstanding, completed in any order.
    ///
    /// `complete` may return a job for the rest of its work. While the server is busy, jobs are retried later. `what`
    /// describes the calls in errors.
    pub(crate) fn run_concurrent<J: Copy>(
        &mut self,
        what: &str,
        mut jobs: impl Iterator<Item = J>,
        mut prepare: impl FnMut(&mut LocalClient, &J) -> anyhow::Result<ClientCall>,
        mut complete: impl FnMut(J, Reply) -> anyhow::Result<Option<J>>,
    ) -> anyhow::Result<()> {
        let client = &mut self.client;
        let (mut retry, mut resume_at) = (Retry::new(self.busy_timeout), None);
        let first = client.first();
        let mut outstanding: Vec<Option<J>> = (0..self.depth).map(|_| None).collect();
        let mut free_slots: Vec<usize> = (0..self.depth).rev().collect();
        let (mut retries, mut done, mut empty_polls) = (Vec::new(), Vec::new(), 0);
        loop {
            // Time until calls may be retried.
            let pause = resume_at.and_then(|at: Instant| at.checked_duration_since(Instant::now()));
            while let Some(&slot) = free_slots.last().filter(|_| pause.is_none()) {
                let Some(job) = retries.pop().or_else(|| jobs.next()) else { break };
                let call = prepare(client, &job).with_context(|| what.to_owned())?;
                client.start(first, call, slot as u64);
                outstanding[slot] = Some(job);
                free_slots.pop();
            }
            if free_slots.len() == self.depth && pause.is_none() {
                return Ok(());
            }
            client.poll(|completed_call| done.push(completed_call));
            empty_polls = if done.is_empty() { empty_polls + 1 } else { 0 };
            for completed_call in done.drain(..) {
                let slot = completed_call.token as usize;
                let Some(job) = outstanding[slot].take() else { continue };
                free_slots.push(slot);
                let reply = completed_call.result.map_err(|error| match client.close_reason(first) {
                    Some(reason) => anyhow!("{what}: {error}; the connection ended: {reason}"),
                    None => anyhow::Error::from(error).context(what.to_owned()),
                })?;
                match complete(job, reply).with_context(|| what.to_owned()) {
                    Ok(rest) => {
                        retry.reset();
                        retries.extend(rest);
                    }
                    // Calls that were outstanding together count as one attempt.
                    Err(error) if is_busy(&error) && resume_at.is_some_and(|at| at > Instant::now()) => {
                        retries.push(job);
                    }
                    Err(error) => {
                        let delay = retry.next_delay(error)?;
                        resume_at = Some(Instant::now() + delay);
                        retries.push(job);
                    }
                }
            }
            if empty_polls > EMPTY_POLLS {
                match client.config().poll.idle {
                    IdlePolicy::Poll => std::thread::yield_now(),
                    _ => client.wait(pause.unwrap_or(Duration::from_secs(1))),
                }
                empty_polls = 0;
            }
        }
    }
}
