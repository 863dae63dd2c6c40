//! Concurrent calls.

use rpcrdma::client::{ClientCall, LocalClient};
use rpcrdma::{IdlePolicy, Reply};

use crate::calls::Nfs;

/// Empty polls before the core is yielded.
const PATIENCE: u32 = 256;

impl Nfs {
    /// Makes a call per job, up to the connection's depth at once, completed in any order. `ended` may return a changed
    /// job for the rest.
    pub(crate) fn many<J>(
        &mut self,
        mut jobs: impl Iterator<Item = J>,
        mut prepare: impl FnMut(&mut LocalClient, &J) -> anyhow::Result<ClientCall>,
        mut ended: impl FnMut(J, Reply) -> anyhow::Result<Option<J>>,
    ) -> anyhow::Result<()> {
        let client = &mut self.client;
        let first = client.first();
        let mut under_way: Vec<Option<J>> = (0..self.depth).map(|_| None).collect();
        let mut free: Vec<usize> = (0..self.depth).rev().collect();
        let (mut again, mut done, mut idle) = (Vec::new(), Vec::new(), 0);
        loop {
            while let Some(&slot) = free.last() {
                let Some(job) = again.pop().or_else(|| jobs.next()) else { break };
                let call = prepare(client, &job)?;
                client.start(first, call, slot as u64);
                under_way[slot] = Some(job);
                free.pop();
            }
            if free.len() == self.depth {
                return Ok(());
            }
            client.poll(|end| done.push(end));
            idle = if done.is_empty() { idle + 1 } else { 0 };
            for end in done.drain(..) {
                let slot = end.token as usize;
                let Some(job) = under_way[slot].take() else { continue };
                free.push(slot);
                let reply = end.result.map_err(|error| match client.close_reason(first) {
                    Some(reason) => anyhow::anyhow!("{error}; the connection ended: {reason}"),
                    None => error.into(),
                })?;
                again.extend(ended(job, reply)?);
            }
            if idle > PATIENCE {
                match client.config().poll.idle {
                    IdlePolicy::Poll => std::thread::yield_now(),
                    _ => client.wait(std::time::Duration::from_secs(1)),
                }
                idle = 0;
            }
        }
    }
}
