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
    let mut town = Cluster::new("quiet");
    let pairs = town.twenty_more();
    town.quiet();
    for (client, server) in [pairs[7], pairs[19], pairs[7]] {
        town.last_look();
        assert!(!town.server.wait(Some(Duration::ZERO)), "a control event of a sleep that nobody has ended");
        assert_eq!((town.server.hot.len(), town.server.cold.len()), (0, 21), "nobody is polled for it");
        town.last_look();
        town.send(client, false);
        // Without end, if no bell rang.
        assert!(town.server.wait(None));
        assert_eq!(town.server.hot, [server.slot], "the one that has rung");
        assert_eq!(town.server.poll_cq(&mut town.done, 64), 1, "found by the first poll");
        assert_eq!(town.done.pop().expect("it").qp, server);
        town.quiet();
    }
}

#[test]
fn a_burst_from_all_quiet_ones_arrives_in_one_turn() {
    let mut town = Cluster::new("at-once");
    let pairs = town.twenty_more();
    town.quiet();
    for &(client, _) in &pairs {
        town.send(client, false);
    }
    assert_eq!(town.server.poll_cq(&mut town.done, 8), 8, "no more than is asked for");
    assert_eq!(town.server.poll_cq(&mut town.done, 64), 12);
}

/// One that has a message in every poll, which has room for no other.
#[test]
fn a_quiet_peer_gets_through_beside_one_that_fills_each_poll() {
    let mut town = Cluster::new("busy");
    let (busy, server) = town.twenty_more()[0];
    town.quiet();
    town.send(busy, false);
    town.until("the busy one is heard", |t| t.done.pop());
    let quiet = town.honest;
    town.send(quiet.0, false);
    let mut heard = false;
    for _ in 0..QUIET {
        town.send(busy, false);
        town.server.poll_cq(&mut town.done, 1);
        town.client.poll_cq(&mut Vec::new(), 64);
        heard |= town.done.drain(..).any(|done| done.qp != server);
    }
    assert!(heard, "it waits behind the other one for ever");
}

/// A full poll may keep its owner for long.
#[test]
fn behind_a_full_poll_more_of_those_that_are_quiet_are_looked_at() {
    let mut town = Cluster::new("full");
    let pairs = town.twenty_more();
    town.quiet();
    let (busy, server) = pairs[0];
    town.send(busy, false);
    town.until("the busy one is heard", |t| t.done.pop());
    let mut polls = 0;
    for &(quiet, _) in &pairs[1..] {
        town.send(quiet, false);
    }
    // All of them in fewer polls than one finds by itself.
    while town.done.iter().filter(|done| done.qp != server).count() < pairs.len() - 1 {
        town.send(busy, false);
        town.server.poll_cq(&mut town.done, 20);
        town.client.poll_cq(&mut Vec::new(), 64);
        polls += 1;
        assert!(polls <= 3, "{polls} polls");
    }
}

#[test]
fn a_message_that_is_alone_is_returned_and_others_are_appended() {
    let mut town = Cluster::new("alone");
    let pairs = town.twenty_more();
    town.quiet();
    // Found by the check of cold connections, then in each poll.
    for (client, server) in [pairs[3], pairs[3], pairs[9], pairs[3]] {
        town.send(client, false);
        let message = loop {
            match town.server.poll_message(&mut town.done, 64) {
                Found::Completions(0) => {}
                Found::Message(message) => break message,
                found => panic!("{found:?}"),
            }
        };
        assert_eq!((message.qp, message.buf.len(), town.done.len()), (server, 8, 0));
    }
    town.send(pairs[3].0, false);
    town.send(pairs[9].0, false);
    assert!(matches!(town.server.poll_message(&mut town.done, 64), Found::Completions(2)));
    assert_eq!(town.done.len(), 2);
    town.send(pairs[3].0, false);
    town.send(pairs[3].0, false);
    assert!(matches!(town.server.poll_message(&mut town.done, 1), Found::Message(_)));
    assert!(matches!(town.server.poll_message(&mut town.done, 1), Found::Message(_)));
}

#[test]
fn a_connection_of_the_last_look_prevents_the_sleep() {
    let mut town = Cluster::new("between");
    let client = town.client.connect(&town.address.clone(), &params()).expect("connect");
    let server = town.accept();
    town.last_look();
    // The control plane, too.
    town.server.poll_control(&mut town.events);
    assert!(town.events.iter().any(|e| matches!(e, ControlEvent::Established { qp, .. } if *qp == server)));
    while !town.client.table.get(client).is_some_and(|qp| qp.is_live()) {
        town.client.poll_control(&mut Vec::new());
    }
    town.send(client, false);
    // Without end, if no bell rang.
    town.server.wait(None);
    assert_eq!(town.server.poll_cq(&mut town.done, 64), 1);
}

#[test]
fn the_look_before_a_sleep_finds_that_a_signalled_send_was_taken() {
    let mut town = Cluster::new("taken");
    let (client, _) = town.honest;
    // Any position between two checks of the peer's report.
    for before in 0..16 {
        town.send(client, true);
        let mut done = Vec::new();
        for _ in 0..before {
            town.client.poll_cq(&mut done, 64);
        }
        assert!(done.is_empty(), "nobody has taken it");
        // It is taken and reported without a bell, since no side sleeps yet.
        (0..64).for_each(|_| {
            town.server.poll_cq(&mut town.done, 64);
        });
        assert_eq!(town.done.drain(..).filter(|d| d.opcode == Opcode::Recv).count(), 1);
        town.client.arm();
        assert_eq!(town.client.poll_cq(&mut done, 64), 1, "behind {before} polls");
        assert_eq!((done[0].opcode, done[0].status), (Opcode::Send, Status::Success));
        town.client.wait(Some(Duration::ZERO));
    }
}
