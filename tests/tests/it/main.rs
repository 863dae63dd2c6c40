//! End-to-end tests of the engine over the software fabric.

/// Runs the role of a child process. In the parent process this test does nothing.
#[test]
fn child_process() {
    if let Some((role, address)) = rpcrdma_tests::child_role() {
        killed::child(&role, &address.parse().expect("an address"));
    }
}

mod bindings;
mod calls;
mod characteristics;
mod chunks;
mod closed;
mod connects;
mod credits;
mod decisions;
mod deferred;
mod deployed_defects;
mod doorbells;
mod duplicate_requests;
mod errors;
mod failed_calls;
mod faults;
mod hoarders;
mod host_auth;
mod hostile_client;
mod hostile_device;
mod hostile_server;
mod killed;
mod lifecycle;
mod long_messages;
mod memory;
mod memory_protection;
mod negotiation;
mod one_way;
mod own_loop;
mod own_memory;
mod parts;
mod peers;
mod private_data;
mod rare_polls;
mod read_targets;
mod reads;
mod resources;
mod reverse_rules;
mod rules_of_clients;
mod rules_of_servers;
mod segments;
mod slow_peers;
mod stale;
mod stats_socket;
mod threads;
mod typed;
mod unanswered_calls;
mod verifiers;
mod version_1;
mod wake_ups;
