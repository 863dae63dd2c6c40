//! Which counters and gauges there are. Names are Prometheus': what is counted, with its unit; `rpcrdma_` goes in
//! front, and `_total` behind counters.

use rpcrdma::stats::{ClassStats, Refusals, ShardStats};

/// A number that is known of each `S`.
pub(super) struct Number<S> {
    pub(super) name: &'static str,
    pub(super) help: &'static str,
    pub(super) of: fn(&S) -> u64,
}

const fn number<S>(name: &'static str, help: &'static str, of: fn(&S) -> u64) -> Number<S> {
    Number { name, help, of }
}

/// What only grows while the server runs.
pub(super) const COUNTERS: &[Number<ShardStats>] = &[
    number("turns", "Turns of the shard's loop", |shard| shard.polls),
    number("idle_turns", "Turns that found nothing to do", |shard| shard.idle_polls),
    number("sleeps", "Times that the shard slept", |shard| shard.sleeps),
    number("calls", "Calls served and answered", |shard| shard.calls),
    number("calls_failed", "Calls that were refused, or ended without a reply", |shard| shard.calls_failed),
    number("calls_dropped", "Calls that handlers took and dropped", |shard| shard.calls_dropped),
    number("calls_put_off", "Calls that were left to be sent again", |shard| shard.calls_put_off),
    number("calls_sent_again", "Calls of the server's own that were sent again", |shard| shard.calls_again),
    number("landings_refused", "Places for Read chunks that could not be used", |shard| shard.landings_refused),
    number("memory_waits", "Times that calls had to wait for memory", |shard| shard.memory_waits),
    number("write_waits", "Replies that had to wait for RDMA Writes of their connection", |shard| shard.write_waits),
    number("read_waits", "Calls that had to wait for RDMA Reads of their connection", |shard| shard.read_waits),
    number("pool_empty", "Times that the pool had no buffer, and a call could not wait", |shard| shard.pool_empty),
    number("backpressure", "Calls that a full worker ring, or max_deferred, held back", |shard| shard.backpressure),
    number("connections_made", "Connections since the start", |shard| shard.connections_total),
    number("connections_refused", "Connect requests without Receives for them", |shard| shard.connections_refused),
    number("connections_expired", "Connections not set up in time", |shard| shard.connections_expired),
    number("connections_displaced", "Connections that made room for others", |shard| shard.connections_displaced),
    number("peer_faults", "Connections ended as the peer broke a rule", |shard| shard.peer_faults),
    number("peers_stalled", "Connections ended as the peer owed something", |shard| shard.peers_stalled),
    number("messages_received", "Messages received", |shard| shard.messages.received),
    number("messages_sent", "Messages sent", |shard| shard.messages.sent),
    number("messages_rejected", "Messages dropped, or answered with an error", |shard| shard.messages.rejected()),
    number("grants_piggybacked", "Messages that granted credits beside their payload", |shard| {
        shard.messages.grants_piggybacked
    }),
    number("grants_pure", "Messages that did nothing but grant credits", |shard| shard.messages.grants_pure),
    number("continued_messages_received", "Messages received that another part follows", |shard| {
        shard.messages.continued_received
    }),
    number("continued_messages_sent", "Messages sent that another part follows", |shard| shard.messages.continued_sent),
    number("chunked_messages_received", "Calls and replies received with chunks", |shard| {
        shard.messages.chunked_received
    }),
    number("chunked_messages_sent", "Calls and replies sent with chunks", |shard| shard.messages.chunked_sent),
    number("long_messages_received", "Calls and replies received in a chunk", |shard| shard.messages.long_received),
    number("long_messages_sent", "Calls and replies sent in a chunk", |shard| shard.messages.long_sent),
    number("completions", "Completions", |shard| shard.completions),
    number("work_requests", "Work requests posted", |shard| shard.fabric.posts),
    number("work_requests_signalled", "Work requests that asked for a completion", |shard| shard.fabric.signalled),
    number("doorbells", "Times that the device was told of work", |shard| shard.fabric.doorbells),
    number("receives", "Receives posted", |shard| shard.fabric.recv_posts),
    number("receiver_not_ready", "Messages that met no Receive", |shard| shard.fabric.receiver_not_ready),
    number("access_refused", "RDMA operations that a key, bound or right refused", |shard| shard.fabric.access_refused),
    number("peer_violations", "Times that a peer broke the fabric's rules", |shard| shard.fabric.peer_violations),
    number("connect_requests_refused", "Connect requests that the fabric refused", |shard| {
        shard.fabric.requests_refused
    }),
    number("system_calls", "System calls that moved bytes of messages", |shard| shard.fabric.system_calls),
    number("empty_system_calls", "System calls that looked for such bytes in vain", |shard| {
        shard.fabric.empty_system_calls
    }),
    number("port_downs", "Times that the device's port went down", |shard| shard.fabric.port_downs),
    number("device_failures", "Times that the device was removed, or beyond use", |shard| shard.fabric.device_failures),
    number("windows_revoked_by_peers", "Windows that peers revoked with their replies", |shard| shard.revoked_by_peers),
    number("windows_revoked_here", "Windows that this side had to revoke", |shard| shard.revoked_here),
    number("buffers_leaked", "Buffers lost", |shard| shard.pool.leaked),
];

/// What goes up and down.
pub(super) const GAUGES: &[Number<ShardStats>] = &[
    number("connections", "Connections now", |shard| shard.connections),
    number("credits_granted", "Credit limits of all connections", |shard| shard.credits_granted),
    number("credits_used", "Of these, those in use", |shard| shard.credits_used),
    number("receives_posted", "Receives that the device has", |shard| shard.receives_posted),
    number("receives_promised", "Receives promised to connections", |shard| shard.receives_promised),
    number("receives_lowest", "The fewest Receives that the device had", |shard| shard.receives_lowest),
    number("worker_queue_depth", "Calls with the workers, or waiting for them", |shard| shard.worker_depth),
    number("calls_waiting", "Calls that wait for memory, or for RDMA Reads", |shard| shard.calls_waiting),
    number("exposed_buffers", "Buffers that peers may reach", |shard| shard.exposed_buffers),
];

/// What is known of a size class of the pool.
pub(super) const POOL_GAUGES: &[Number<ClassStats>] = &[
    number("pool_buffers", "Buffers of a size class of the pool", |class| class.count as u64),
    number("pool_buffers_free", "Of these, those that are free", |class| class.free as u64),
    number("pool_buffers_lowest", "The fewest that were free", |class| class.low_water as u64),
];

/// Why calls were refused: values of the label `reason`.
pub(super) const REFUSALS: &[Reason] = &[
    Reason { name: "unavailable", of: |refusals| refusals.unavailable },
    Reason { name: "garbage_arguments", of: |refusals| refusals.garbage_arguments },
    Reason { name: "system_errors", of: |refusals| refusals.system_errors },
    Reason { name: "authentication", of: |refusals| refusals.authentication },
    Reason { name: "transport", of: |refusals| refusals.transport },
    Reason { name: "err_system", of: |refusals| refusals.err_system },
];

/// One of them.
pub(super) struct Reason {
    pub(super) name: &'static str,
    pub(super) of: fn(&Refusals) -> u64,
}
