//! A server and a client that are polled only twice a second, in simulated time.

use rpcrdma::client::CompletedCall;
use rpcrdma_tests::prelude::*;

/// The time between two polls.
const PAUSE: Duration = Duration::from_millis(500);
/// Polls within which a connect, a call or the detection of a loss must end: each takes only a few turns. The default
/// time-outs are longer than these polls.
const MAX_POLLS: usize = 9;

struct ConnectedPair {
    time: SimulatedTime,
    server: LocalClient,
    client: LocalClient,
    connection: Connection,
}

impl ConnectedPair {
    fn connect(world: &World) -> Self {
        let (address, time) = (world.address(), SimulatedTime::new());
        let server = simulated_server(&address, small_config(), standard_services(), &time);
        let mut client = simulated_client(&address, small_config(), &time);
        let connection = client.begin_connect(&address).expect("a connect request");
        let mut pair = Self { time, server, client, connection };
        pair.poll_until(MAX_POLLS, |pair, _| pair.client.is_established(connection));
        pair
    }

    /// Polls both ends once after each pause, up to `polls` times, until `is_done`.
    fn poll_until(&mut self, polls: usize, mut is_done: impl FnMut(&mut Self, Vec<CompletedCall>) -> bool) {
        let done = (0..polls).any(|_| {
            self.time.advance(PAUSE);
            self.server.poll(|_| {});
            let mut ended = Vec::new();
            self.client.poll(|done| ended.push(done));
            is_done(self, ended)
        });
        assert!(done, "done within {polls} polls");
    }
}

#[test]
fn a_read_chunk_arrives_within_the_time_outs() {
    // A device works between polls, for times that are not simulated.
    if test_fabric::on_device() {
        return;
    }
    let world = World::new("rare-reads");
    let mut pair = ConnectedPair::connect(&world);
    let call = pair.client.prepare_call(STORE, &be(&[1])).read_chunk(4, pair.client.pattern_buf(1, 50_000));
    pair.client.launch(call, 1);
    let stored = Ok(be(&[50_000]));
    pair.poll_until(MAX_POLLS, |_, ended| ended.into_iter().any(|done| outcome_of(done.result) == stored));
}

#[test]
fn a_time_out_is_reported_by_the_second_poll_at_the_latest() {
    if test_fabric::on_device() {
        return;
    }
    let world = World::new("rare-time-out");
    let mut pair = ConnectedPair::connect(&world);
    let call = pair.client.prepare(ECHO, 0).expect("memory").timeout(PAUSE);
    pair.client.launch(call, 1);
    pair.client.poll(|done| panic!("{done:?} before the time-out"));
    // The server does not answer.
    let mut errors = Vec::new();
    for _ in 0..2 {
        pair.time.advance(PAUSE);
        pair.client.poll(|done| errors.push(outcome_of(done.result)));
    }
    assert_eq!(errors, [Err(CallError::TimedOut { sent: true })]);
}

#[test]
fn a_lost_connection_is_detected() {
    if test_fabric::on_device() {
        return;
    }
    let world = World::new("rare-loss");
    let mut pair = ConnectedPair::connect(&world);
    pair.server.shard_mut().abort();
    pair.poll_until(MAX_POLLS, |pair, _| pair.client.close_reason(pair.connection).is_some());
}
