//! A server and a client that their owner polls twice a second, in simulated time.

use rpcrdma::client::CompletedCall;
use rpcrdma_tests::prelude::*;

/// Between two polls.
const PAUSE: Duration = Duration::from_millis(500);
/// Polls for what takes some turns of both ends: fewer than the default time-outs allow.
const SOON: usize = 9;

struct ConnectedPair {
    time: SimulatedTime,
    server: LocalClient,
    client: LocalClient,
    connection: Connection,
}

impl ConnectedPair {
    fn connected(world: &World) -> Self {
        let (address, time) = (world.address(), SimulatedTime::new());
        let server = simulated_server(&address, small(), standard_services(), &time);
        let mut client = simulated_client(&address, small(), &time);
        let connection = client.begin_connect(&address).expect("it begins");
        let mut ends = Self { time, server, client, connection };
        ends.poll_until(SOON, |ends, _| ends.client.is_established(connection));
        ends
    }

    /// Polls both ends once after each pause.
    fn poll_until(&mut self, polls: usize, mut holds: impl FnMut(&mut Self, Vec<CompletedCall>) -> bool) {
        let held = (0..polls).any(|_| {
            self.time.advance(PAUSE);
            self.server.poll(|_| {});
            let mut ended = Vec::new();
            self.client.poll(|done| ended.push(done));
            holds(self, ended)
        });
        assert!(held, "after {polls} polls");
    }
}

#[test]
fn a_read_chunk_is_read() {
    // A device works between polls, for times that are not simulated.
    if test_fabric::on_device() {
        return;
    }
    let world = World::new("rare-reads");
    let mut ends = ConnectedPair::connected(&world);
    let call = ends.client.prepared(STORE, &be(&[1])).read_chunk(4, ends.client.pattern_buf(1, 50_000));
    ends.client.launch(call, 1);
    let stored = Ok(be(&[50_000]));
    ends.poll_until(SOON, |_, ended| ended.into_iter().any(|done| outcome_of(done.result) == stored));
}

#[test]
fn a_time_out_is_reported_by_the_second_poll_at_the_latest() {
    if test_fabric::on_device() {
        return;
    }
    let world = World::new("rare-time-out");
    let mut ends = ConnectedPair::connected(&world);
    let call = ends.client.prepare(ECHO, 0).expect("memory").timeout(PAUSE);
    ends.client.launch(call, 1);
    ends.client.poll(|done| panic!("{done:?} too early"));
    // The server does not answer.
    let mut errors = Vec::new();
    for _ in 0..2 {
        ends.time.advance(PAUSE);
        ends.client.poll(|done| errors.push(outcome_of(done.result)));
    }
    assert_eq!(errors, [Err(CallError::TimedOut { sent: true })]);
}

#[test]
fn a_lost_connection_is_noticed() {
    if test_fabric::on_device() {
        return;
    }
    let world = World::new("rare-loss");
    let mut ends = ConnectedPair::connected(&world);
    ends.server.shard_mut().abort();
    ends.poll_until(SOON, |ends, _| ends.client.close_reason(ends.connection).is_some());
}
