//! Concurrent calls.

use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use rpcrdma::client::{ClientCall, LocalClient};
use rpcrdma::{IdlePolicy, Reply};

use crate::busy::{Retry, is_busy};
use crate::calls::Nfs;

/// Empty polls before the core is yielded.
const PATIENCE: u32 = 256;

impl Nfs {
    /// Makes a call per job, up to the connection's depth at once, completed in any order. `ended` may return a changed
    /// job for the rest. While the server is busy, jobs are done again later. `what` describes the calls in errors.
    pub(crate) fn many<J: Copy>(
        &mut self,
        what: &str,
        mut jobs: impl Iterator<Item = J>,
        mut prepare: impl FnMut(&mut LocalClient, &J) -> anyhow::Result<ClientCall>,
        mut ended: impl FnMut(J, Reply) -> anyhow::Result<Option<J>>,
    ) -> anyhow::Result<()> {
        let client = &mut self.client;
        let (mut retry, mut resumes) = (Retry::new(self.busy_timeout), None);
        let first = client.first();
        let mut under_way: Vec<Option<J>> = (0..self.depth).map(|_| None).collect();
        let mut free: Vec<usize> = (0..self.depth).rev().collect();
        let (mut again, mut done, mut idle) = (Vec::new(), Vec::new(), 0);
        loop {
            // The time until calls may be made again.
            let pause = resumes.and_then(|at: Instant| at.checked_duration_since(Instant::now()));
            while let Some(&slot) = free.last().filter(|_| pause.is_none()) {
                let Some(job) = again.pop().or_else(|| jobs.next()) else { break };
                let call = prepare(client, &job).with_context(|| what.to_owned())?;
                client.start(first, call, slot as u64);
                under_way[slot] = Some(job);
                free.pop();
            }
            if free.len() == self.depth && pause.is_none() {
                return Ok(());
            }
            client.poll(|end| done.push(end));
            idle = if done.is_empty() { idle + 1 } else { 0 };
            for end in done.drain(..) {
                let slot = end.token as usize;
                let Some(job) = under_way[slot].take() else { continue };
                free.push(slot);
                let reply = end.result.map_err(|error| match client.close_reason(first) {
                    Some(reason) => anyhow!("{what}: {error}; the connection ended: {reason}"),
                    None => anyhow::Error::from(error).context(what.to_owned()),
                })?;
                match ended(job, reply).with_context(|| what.to_owned()) {
                    Ok(rest) => {
                        retry.reset();
                        again.extend(rest);
                    }
                    // Calls that were outstanding together count as one attempt.
                    Err(error) if is_busy(&error) && resumes.is_some_and(|at| at > Instant::now()) => again.push(job),
                    Err(error) => {
                        let delay = retry.after(error)?;
                        resumes = Some(Instant::now() + delay);
                        again.push(job);
                    }
                }
            }
            if idle > PATIENCE {
                match client.config().poll.idle {
                    IdlePolicy::Poll => std::thread::yield_now(),
                    _ => client.wait(pause.unwrap_or(Duration::from_secs(1))),
                }
                idle = 0;
            }
        }
    }
}
