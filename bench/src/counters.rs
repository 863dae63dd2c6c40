//! What an engine counted during a measurement, warm-up included.
#![forbid(unsafe_code)]

use rpcrdma::stats::ShardStats;
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

/// Counts of one side since it started; or, as a difference, of a part of that time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Counters {
    /// Processor time of the whole process, in nanoseconds, of the kernel on its behalf among it.
    pub(crate) cpu_ns: u64,
    /// Turns of the loop.
    pub(crate) polls: u64,
    /// Turns that found nothing to do.
    pub(crate) idle_polls: u64,
    /// Completions.
    pub(crate) completions: u64,
    /// Times the side slept.
    pub(crate) sleeps: u64,
    /// Work requests posted.
    pub(crate) posts: u64,
    /// Times that the device was told of them.
    pub(crate) doorbells: u64,
    /// Work requests posted that asked for a completion.
    pub(crate) signalled: u64,
    /// Receives posted.
    pub(crate) recv_posts: u64,
    /// Messages that met no Receive.
    pub(crate) receiver_not_ready: u64,
    /// System calls that moved bytes of messages.
    pub(crate) system_calls: u64,
    /// System calls that looked for such bytes and found none.
    pub(crate) empty_system_calls: u64,
    /// Messages sent.
    pub(crate) messages_sent: u64,
    /// Messages received.
    pub(crate) messages_received: u64,
    /// Messages that granted credits beside their payload.
    pub(crate) grants_piggybacked: u64,
    /// Messages that did nothing but grant credits.
    pub(crate) grants_pure: u64,
    /// Messages sent that another part of the same call or reply follows.
    pub(crate) parts_sent: u64,
    /// Messages received that another part of the same call or reply follows.
    pub(crate) parts_received: u64,
    /// Calls and replies sent with chunk lists beside their RPC message.
    pub(crate) chunked_sent: u64,
    /// Calls and replies received with chunk lists beside their RPC message.
    pub(crate) chunked_received: u64,
    /// Calls and replies sent whose RPC message is in a chunk.
    pub(crate) long_sent: u64,
    /// Calls and replies received whose RPC message is in a chunk.
    pub(crate) long_received: u64,
    /// Calls made, or answered.
    pub(crate) calls: u64,
    /// Calls that failed, or were refused.
    pub(crate) calls_failed: u64,
    /// Times that a full worker ring held a call back.
    pub(crate) backpressure: u64,
    /// Times that a pool was empty.
    pub(crate) pool_empty: u64,
}

/// Of one shard: the process has processor time, not the shard.
impl From<&ShardStats> for Counters {
    fn from(stats: &ShardStats) -> Self {
        Self {
            cpu_ns: 0,
            polls: stats.polls,
            idle_polls: stats.idle_polls,
            completions: stats.completions,
            sleeps: stats.sleeps,
            posts: stats.fabric.posts,
            doorbells: stats.fabric.doorbells,
            signalled: stats.fabric.signalled,
            recv_posts: stats.fabric.recv_posts,
            receiver_not_ready: stats.fabric.receiver_not_ready,
            system_calls: stats.fabric.system_calls,
            empty_system_calls: stats.fabric.empty_system_calls,
            messages_sent: stats.messages.sent,
            messages_received: stats.messages.received,
            grants_piggybacked: stats.messages.grants_piggybacked,
            grants_pure: stats.messages.grants_pure,
            parts_sent: stats.messages.continued_sent,
            parts_received: stats.messages.continued_received,
            chunked_sent: stats.messages.chunked_sent,
            chunked_received: stats.messages.chunked_received,
            long_sent: stats.messages.long_sent,
            long_received: stats.messages.long_received,
            calls: stats.calls,
            calls_failed: stats.calls_failed,
            backpressure: stats.backpressure,
            pool_empty: stats.pool_empty,
        }
    }
}

impl Counters {
    /// What the shards of this process have counted so far.
    pub(crate) fn now(shards: &[ShardStats]) -> Self {
        let time = clock_gettime(ClockId::ProcessCPUTime);
        let cpu_ns = (time.tv_sec as u64) * 1_000_000_000 + time.tv_nsec as u64;
        let counted = shards.iter().map(Self::from).fold(Self::default(), |all, one| all.plus(&one));
        Self { cpu_ns, ..counted }
    }

    /// What was counted here and there.
    fn plus(&self, other: &Self) -> Self {
        self.with(other, |here, there| here + there)
    }

    /// What was counted since `before`.
    pub(crate) fn since(&self, before: &Self) -> Self {
        self.with(before, |now, before| now - before)
    }

    /// Count by count.
    fn with(&self, other: &Self, op: impl Fn(u64, u64) -> u64) -> Self {
        Self {
            cpu_ns: op(self.cpu_ns, other.cpu_ns),
            polls: op(self.polls, other.polls),
            idle_polls: op(self.idle_polls, other.idle_polls),
            completions: op(self.completions, other.completions),
            sleeps: op(self.sleeps, other.sleeps),
            posts: op(self.posts, other.posts),
            doorbells: op(self.doorbells, other.doorbells),
            signalled: op(self.signalled, other.signalled),
            recv_posts: op(self.recv_posts, other.recv_posts),
            receiver_not_ready: op(self.receiver_not_ready, other.receiver_not_ready),
            system_calls: op(self.system_calls, other.system_calls),
            empty_system_calls: op(self.empty_system_calls, other.empty_system_calls),
            messages_sent: op(self.messages_sent, other.messages_sent),
            messages_received: op(self.messages_received, other.messages_received),
            grants_piggybacked: op(self.grants_piggybacked, other.grants_piggybacked),
            grants_pure: op(self.grants_pure, other.grants_pure),
            parts_sent: op(self.parts_sent, other.parts_sent),
            parts_received: op(self.parts_received, other.parts_received),
            chunked_sent: op(self.chunked_sent, other.chunked_sent),
            chunked_received: op(self.chunked_received, other.chunked_received),
            long_sent: op(self.long_sent, other.long_sent),
            long_received: op(self.long_received, other.long_received),
            calls: op(self.calls, other.calls),
            calls_failed: op(self.calls_failed, other.calls_failed),
            backpressure: op(self.backpressure, other.backpressure),
            pool_empty: op(self.pool_empty, other.pool_empty),
        }
    }

    /// With the ratios that matter.
    pub(crate) fn usage(self) -> Usage {
        let per = |count: u64, of: u64| (of > 0).then(|| count as f64 / of as f64);
        Usage {
            cpu_ns_per_call: per(self.cpu_ns, self.calls),
            work_requests_per_call: per(self.posts, self.calls),
            messages_per_call: per(self.messages_sent + self.messages_received, self.calls),
            doorbells_per_call: per(self.doorbells, self.calls),
            work_requests_per_doorbell: per(self.posts, self.doorbells),
            signalled_per_call: per(self.signalled, self.calls),
            work_requests_per_signalled: per(self.posts, self.signalled),
            polls_per_call: per(self.polls, self.calls),
            completions_per_call: per(self.completions, self.calls),
            system_calls_per_call: per(self.system_calls, self.calls),
            empty_system_calls_per_call: per(self.empty_system_calls, self.calls),
            pure_grants_per_call: per(self.grants_pure, self.calls),
            piggybacked_grants_per_call: per(self.grants_piggybacked, self.calls),
            counted: self,
        }
    }
}

impl Usage {
    /// What a call took, in words.
    pub(crate) fn per_call(&self) -> String {
        let number = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), |value| format!("{value:.2}"));
        let system_calls = match self.counted.system_calls {
            0 => String::new(),
            _ => format!(
                "; {} system calls, and {} that found nothing",
                number(self.system_calls_per_call),
                number(self.empty_system_calls_per_call)
            ),
        };
        format!(
            "{} work requests, {} to a doorbell, one in {} signalled; {} polls, {} completions",
            number(self.work_requests_per_call),
            number(self.work_requests_per_doorbell),
            number(self.work_requests_per_signalled),
            number(self.polls_per_call),
            number(self.completions_per_call),
        ) + &system_calls
    }
}

/// One side's engine during a measurement, warm-up included.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Usage {
    /// Processor time for a call, in nanoseconds, that of polls which found nothing among it.
    pub(crate) cpu_ns_per_call: Option<f64>,
    /// Work requests for a call: the Send, and what binds, copies and revokes its chunks.
    pub(crate) work_requests_per_call: Option<f64>,
    /// Messages for a call, in both directions, grants among them.
    pub(crate) messages_per_call: Option<f64>,
    /// Doorbells for a call.
    pub(crate) doorbells_per_call: Option<f64>,
    /// Work requests that one doorbell told of.
    pub(crate) work_requests_per_doorbell: Option<f64>,
    /// Completions asked for, for a call.
    pub(crate) signalled_per_call: Option<f64>,
    /// Work requests for one that asked for a completion.
    pub(crate) work_requests_per_signalled: Option<f64>,
    /// Polls of the completion queue for a call: one in each turn of the loop.
    pub(crate) polls_per_call: Option<f64>,
    /// Completions for a call, Receives among them.
    pub(crate) completions_per_call: Option<f64>,
    /// System calls for a call that moved bytes of messages.
    pub(crate) system_calls_per_call: Option<f64>,
    /// System calls for a call that looked for such bytes and found none.
    pub(crate) empty_system_calls_per_call: Option<f64>,
    /// Messages for credits alone, for a call.
    pub(crate) pure_grants_per_call: Option<f64>,
    /// Grants that rode on other messages, for a call.
    pub(crate) piggybacked_grants_per_call: Option<f64>,
    /// The counts themselves.
    #[serde(flatten)]
    pub(crate) counted: Counters,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_and_ratios() {
        let before = Counters { posts: 10, calls: 5, doorbells: 1, ..Counters::default() };
        let after = Counters { posts: 50, calls: 25, doorbells: 11, grants_pure: 5, ..Counters::default() };
        let usage = after.since(&before).usage();
        assert_eq!((usage.work_requests_per_call, usage.work_requests_per_doorbell), (Some(2.0), Some(4.0)));
        assert_eq!((usage.pure_grants_per_call, usage.counted.calls), (Some(0.25), 20));
        assert!(usage.per_call().starts_with("2.00 work requests, 4.00 to a doorbell, one in - signalled; 0.00 polls"));
        assert_eq!(Counters::default().usage().signalled_per_call, None);
        let text = serde_json::to_string(&after).unwrap();
        assert_eq!(serde_json::from_str::<Counters>(&text).unwrap(), after);
    }
}
