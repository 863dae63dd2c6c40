//! Many idle queue pairs, and sleeps.

use super::*;
use crate::Found;

/// Polls after which every queue pair is cold.
const IDLE_POLLS: usize = 5000;

impl Cluster {
    /// Waits until the client's end of a connection is up.
    fn wait_until_up(&mut self, client: QpId) {
        self.wait_until("the client is up", |t| t.client.table.get_mut(client).filter(|qp| qp.is_live()).map(|_| ()));
    }

    /// The client sends a message.
    fn send(&mut self, client: QpId, signaled: bool) {
        self.post_receives(1);
        let buf = self.pool.alloc(8).expect("a buffer");
        let wr = WorkRequest::Send { buf, invalidate: None, fence: false };
        let posted = self.client.post_send(client, &mut vec![Posting { wr_id: 1, signaled, wr }]);
        assert_eq!(posted, Ok(()));
    }

    /// Makes twenty more connections. Returns the queue pairs of the client and the server.
    fn connect_twenty(&mut self) -> Vec<(QpId, QpId)> {
        let mut pairs = Vec::new();
        for _ in 0..20 {
            let client = self.client.connect(&self.address.clone(), &params()).expect("connect");
            let server = self.accept();
            self.wait_until_up(client);
            self.turn();
            pairs.push((client, server));
        }
        pairs
    }

    /// Lets the server poll until all of its queue pairs are cold.
    fn turn_all_cold(&mut self) {
        (0..IDLE_POLLS).for_each(|_| {
            self.server.poll_cq(&mut self.done, 64);
        });
        assert!(self.server.hot.is_empty());
        self.done.clear();
    }

    /// Arms the server, and polls once more, as before a sleep.
    fn prepare_sleep(&mut self) {
        self.server.arm();
        assert_eq!(self.server.poll_cq(&mut self.done, 64), 0);
    }
}

#[test]
fn cold_queue_pairs_stay_cold_in_sleeps_and_each_can_end_a_sleep() {
    let mut cluster = Cluster::new("idle");
    let pairs = cluster.connect_twenty();
    cluster.turn_all_cold();
    for (client, server) in [pairs[7], pairs[19], pairs[7]] {
        cluster.prepare_sleep();
        assert!(!cluster.server.wait(Some(Duration::ZERO)), "no control event ends the sleep");
        assert_eq!((cluster.server.hot.len(), cluster.server.cold.len()), (0, 21), "no cold queue pair turns hot");
        cluster.prepare_sleep();
        cluster.send(client, false);
        // Never returns if no doorbell rings.
        assert!(cluster.server.wait(None));
        assert_eq!(cluster.server.hot, [server.slot], "the queue pair whose doorbell rang");
        assert_eq!(cluster.server.poll_cq(&mut cluster.done, 64), 1, "found by the first poll");
        assert_eq!(cluster.done.pop().expect("a completion").qp, server);
        cluster.turn_all_cold();
    }
}

#[test]
fn a_burst_from_all_cold_queue_pairs_arrives_in_one_turn() {
    let mut cluster = Cluster::new("at-once");
    let pairs = cluster.connect_twenty();
    cluster.turn_all_cold();
    for &(client, _) in &pairs {
        cluster.send(client, false);
    }
    assert_eq!(cluster.server.poll_cq(&mut cluster.done, 8), 8, "no more than requested");
    assert_eq!(cluster.server.poll_cq(&mut cluster.done, 64), 12);
}

/// One peer has a message in every poll, which has room for one message only.
#[test]
fn an_idle_peers_message_arrives_beside_a_peer_that_fills_each_poll() {
    let mut cluster = Cluster::new("busy");
    let (busy, server) = cluster.connect_twenty()[0];
    cluster.turn_all_cold();
    cluster.send(busy, false);
    cluster.wait_until("the busy peer's message", |t| t.done.pop());
    let idle = cluster.honest;
    cluster.send(idle.0, false);
    let mut received = false;
    for _ in 0..IDLE_POLLS {
        cluster.send(busy, false);
        cluster.server.poll_cq(&mut cluster.done, 1);
        cluster.client.poll_cq(&mut Vec::new(), 64);
        received |= cluster.done.drain(..).any(|done| done.qp != server);
    }
    assert!(received, "the idle peer's message was never received");
}

/// The owner may be busy for long after a full poll.
#[test]
fn after_a_full_poll_more_cold_queue_pairs_are_checked() {
    let mut cluster = Cluster::new("full");
    let pairs = cluster.connect_twenty();
    cluster.turn_all_cold();
    let (busy, server) = pairs[0];
    cluster.send(busy, false);
    cluster.wait_until("the busy peer's message", |t| t.done.pop());
    let mut polls = 0;
    for &(idle, _) in &pairs[1..] {
        cluster.send(idle, false);
    }
    // With only `COLD_POLLS` checks in each poll, this would take more polls.
    while cluster.done.iter().filter(|done| done.qp != server).count() < pairs.len() - 1 {
        cluster.send(busy, false);
        cluster.server.poll_cq(&mut cluster.done, 20);
        cluster.client.poll_cq(&mut Vec::new(), 64);
        polls += 1;
        assert!(polls <= 3, "{polls} polls");
    }
}

#[test]
fn a_single_message_is_returned_and_several_are_appended() {
    let mut cluster = Cluster::new("alone");
    let pairs = cluster.connect_twenty();
    cluster.turn_all_cold();
    // The message is found by the check of cold connections first, then in each poll.
    for (client, server) in [pairs[3], pairs[3], pairs[9], pairs[3]] {
        cluster.send(client, false);
        let message = loop {
            match cluster.server.poll_message(&mut cluster.done, 64) {
                Found::Completions(0) => {}
                Found::Message(message) => break message,
                found => panic!("{found:?}"),
            }
        };
        assert_eq!((message.qp, message.buf.len(), cluster.done.len()), (server, 8, 0));
    }
    cluster.send(pairs[3].0, false);
    cluster.send(pairs[9].0, false);
    assert!(matches!(cluster.server.poll_message(&mut cluster.done, 64), Found::Completions(2)));
    assert_eq!(cluster.done.len(), 2);
    cluster.send(pairs[3].0, false);
    cluster.send(pairs[3].0, false);
    assert!(matches!(cluster.server.poll_message(&mut cluster.done, 1), Found::Message(_)));
    assert!(matches!(cluster.server.poll_message(&mut cluster.done, 1), Found::Message(_)));
}

#[test]
fn a_connection_established_after_arm_prevents_the_sleep() {
    let mut cluster = Cluster::new("between");
    let client = cluster.client.connect(&cluster.address.clone(), &params()).expect("connect");
    let server = cluster.accept();
    cluster.prepare_sleep();
    // The control events are polled after `arm`, too.
    cluster.server.poll_control(&mut cluster.events);
    assert!(cluster.events.iter().any(|e| matches!(e, ControlEvent::Established { qp, .. } if *qp == server)));
    while !cluster.client.table.get_mut(client).is_some_and(|qp| qp.is_live()) {
        cluster.client.poll_control(&mut Vec::new());
    }
    cluster.send(client, false);
    // Never returns if no doorbell rings.
    cluster.server.wait(None);
    assert_eq!(cluster.server.poll_cq(&mut cluster.done, 64), 1);
}

#[test]
fn the_poll_before_a_sleep_completes_a_signaled_send() {
    let mut cluster = Cluster::new("taken");
    let (client, _) = cluster.honest;
    // Any position between two checks of the peer's report.
    for before in 0..16 {
        cluster.send(client, true);
        let mut done = Vec::new();
        for _ in 0..before {
            cluster.client.poll_cq(&mut done, 64);
        }
        assert!(done.is_empty(), "the server has not taken the message");
        // The server takes and reports it without a doorbell, because no side sleeps yet.
        (0..64).for_each(|_| {
            cluster.server.poll_cq(&mut cluster.done, 64);
        });
        assert_eq!(cluster.done.drain(..).filter(|d| d.opcode == Opcode::Recv).count(), 1);
        cluster.client.arm();
        assert_eq!(cluster.client.poll_cq(&mut done, 64), 1, "after {before} polls");
        assert_eq!((done[0].opcode, done[0].status), (Opcode::Send, Status::Success));
        cluster.client.wait(Some(Duration::ZERO));
    }
}
