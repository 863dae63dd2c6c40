//! Many quiet queue pairs, and sleepers among them.

use super::*;
use crate::Found;

/// Polls after which every queue pair is cold.
const QUIET: usize = 5000;

impl Cluster {
    /// The client's end of a connection is up.
    fn is_up(&mut self, client: QpId) {
        self.until("the client is up", |t| t.client.table.get(client).filter(|qp| qp.is_live()).map(|_| ()));
    }

    /// The client sends a message on it.
    fn send(&mut self, client: QpId, signalled: bool) {
        self.receives(1);
        let buf = self.pool.alloc(8).expect("a buffer");
        let wr = WorkRequest::Send { buf, invalidate: None, fence: false };
        let posted = self.client.post_send(client, &mut vec![Posting { wr_id: 1, signalled, wr }]);
        assert_eq!(posted, Ok(()));
    }

    /// Twenty more connections: the client's ends, and the server's.
    fn twenty_more(&mut self) -> Vec<(QpId, QpId)> {
        let mut pairs = Vec::new();
        for _ in 0..20 {
            let client = self.client.connect(&self.address.clone(), &params()).expect("connect");
            let server = self.accept();
            self.is_up(client);
            self.turn();
            pairs.push((client, server));
        }
        pairs
    }

    /// The server polls until all of its queue pairs are cold.
    fn quiet(&mut self) {
        (0..QUIET).for_each(|_| {
            self.server.poll_cq(&mut self.done, 64);
        });
        assert!(self.server.hot.is_empty());
        self.done.clear();
    }

    /// The steps before a sleep.
    fn last_look(&mut self) {
        self.server.arm();
        assert_eq!(self.server.poll_cq(&mut self.done, 64), 0);
    }
}

#[test]
fn a_sleep_costs_nothing_for_those_that_are_quiet_and_each_of_them_ends_it() {
    let mut cluster = Cluster::new("quiet");
    let pairs = cluster.twenty_more();
    cluster.quiet();
    for (client, server) in [pairs[7], pairs[19], pairs[7]] {
        cluster.last_look();
        assert!(!cluster.server.wait(Some(Duration::ZERO)), "a control event of a sleep that nobody has ended");
        assert_eq!((cluster.server.hot.len(), cluster.server.cold.len()), (0, 21), "no cold queue pair turns hot");
        cluster.last_look();
        cluster.send(client, false);
        // Without end, if no bell rang.
        assert!(cluster.server.wait(None));
        assert_eq!(cluster.server.hot, [server.slot], "the one that has rung");
        assert_eq!(cluster.server.poll_cq(&mut cluster.done, 64), 1, "found by the first poll");
        assert_eq!(cluster.done.pop().expect("it").qp, server);
        cluster.quiet();
    }
}

#[test]
fn a_burst_from_all_quiet_ones_arrives_in_one_turn() {
    let mut cluster = Cluster::new("at-once");
    let pairs = cluster.twenty_more();
    cluster.quiet();
    for &(client, _) in &pairs {
        cluster.send(client, false);
    }
    assert_eq!(cluster.server.poll_cq(&mut cluster.done, 8), 8, "no more than is asked for");
    assert_eq!(cluster.server.poll_cq(&mut cluster.done, 64), 12);
}

/// One that has a message in every poll, which has room for no other.
#[test]
fn a_quiet_peer_gets_through_beside_one_that_fills_each_poll() {
    let mut cluster = Cluster::new("busy");
    let (busy, server) = cluster.twenty_more()[0];
    cluster.quiet();
    cluster.send(busy, false);
    cluster.until("the busy one's message", |t| t.done.pop());
    let quiet = cluster.honest;
    cluster.send(quiet.0, false);
    let mut received = false;
    for _ in 0..QUIET {
        cluster.send(busy, false);
        cluster.server.poll_cq(&mut cluster.done, 1);
        cluster.client.poll_cq(&mut Vec::new(), 64);
        received |= cluster.done.drain(..).any(|done| done.qp != server);
    }
    assert!(received, "the quiet peer's message was never received");
}

/// A full poll may keep its owner for long.
#[test]
fn behind_a_full_poll_more_of_those_that_are_quiet_are_looked_at() {
    let mut cluster = Cluster::new("full");
    let pairs = cluster.twenty_more();
    cluster.quiet();
    let (busy, server) = pairs[0];
    cluster.send(busy, false);
    cluster.until("the busy one's message", |t| t.done.pop());
    let mut polls = 0;
    for &(quiet, _) in &pairs[1..] {
        cluster.send(quiet, false);
    }
    // All of them in fewer polls than one finds by itself.
    while cluster.done.iter().filter(|done| done.qp != server).count() < pairs.len() - 1 {
        cluster.send(busy, false);
        cluster.server.poll_cq(&mut cluster.done, 20);
        cluster.client.poll_cq(&mut Vec::new(), 64);
        polls += 1;
        assert!(polls <= 3, "{polls} polls");
    }
}

#[test]
fn a_message_that_is_alone_is_returned_and_others_are_appended() {
    let mut cluster = Cluster::new("alone");
    let pairs = cluster.twenty_more();
    cluster.quiet();
    // Found by the check of cold connections, then in each poll.
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
fn a_connection_of_the_last_look_prevents_the_sleep() {
    let mut cluster = Cluster::new("between");
    let client = cluster.client.connect(&cluster.address.clone(), &params()).expect("connect");
    let server = cluster.accept();
    cluster.last_look();
    // The control plane, too.
    cluster.server.poll_control(&mut cluster.events);
    assert!(cluster.events.iter().any(|e| matches!(e, ControlEvent::Established { qp, .. } if *qp == server)));
    while !cluster.client.table.get(client).is_some_and(|qp| qp.is_live()) {
        cluster.client.poll_control(&mut Vec::new());
    }
    cluster.send(client, false);
    // Without end, if no bell rang.
    cluster.server.wait(None);
    assert_eq!(cluster.server.poll_cq(&mut cluster.done, 64), 1);
}

#[test]
fn the_look_before_a_sleep_finds_that_a_signalled_send_was_taken() {
    let mut cluster = Cluster::new("taken");
    let (client, _) = cluster.honest;
    // Any position between two checks of the peer's report.
    for before in 0..16 {
        cluster.send(client, true);
        let mut done = Vec::new();
        for _ in 0..before {
            cluster.client.poll_cq(&mut done, 64);
        }
        assert!(done.is_empty(), "the server has not taken it");
        // It is taken and reported without a bell, since no side sleeps yet.
        (0..64).for_each(|_| {
            cluster.server.poll_cq(&mut cluster.done, 64);
        });
        assert_eq!(cluster.done.drain(..).filter(|d| d.opcode == Opcode::Recv).count(), 1);
        cluster.client.arm();
        assert_eq!(cluster.client.poll_cq(&mut done, 64), 1, "behind {before} polls");
        assert_eq!((done[0].opcode, done[0].status), (Opcode::Send, Status::Success));
        cluster.client.wait(Some(Duration::ZERO));
    }
}
