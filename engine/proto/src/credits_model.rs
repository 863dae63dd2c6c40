//! A model of flow control: every interleaving of two peers, for few credits and a few messages.
//!
//! Whatever the order of sending, delivery, refilling and granting: there are never more messages under way
//! than Receives posted for them, none but a pure grant is beyond what its sender was told, what headers say
//! is true, every message gets through, and the peers come to rest.

use std::collections::{HashSet, VecDeque};
use std::hash::{BuildHasher, RandomState};

use super::*;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Message {
    words: CreditWords,
    payload: bool,
}

/// One end: its counts, the Receives that it has posted, what is on its way to it, what it has yet to send.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct End {
    credits: Credits,
    posted: u32,
    arriving: VecDeque<Message>,
    to_send: u32,
    resized: bool,
    /// The most that may be outstanding, as the other end said it last, and messages sent since; only where
    /// that end is blunt.
    heard: Option<(u32, u32)>,
}

/// Both ends; 0 calls, 1 answers each call with `replies` messages.
#[derive(Clone, Hash)]
struct World {
    ends: [End; 2],
    /// Answers that end 1 owes at most while it takes more calls.
    room: u32,
    /// Buffers that end 1 has, for Receives and for the calls that it owes answers; where these are short.
    buffers: Option<u32>,
    /// The end that changes its credit limit says so at once, though it has granted more, as other
    /// implementations may.
    blunt: Option<usize>,
}

struct Model {
    replies: u32,
    /// Version 1: replies and their calls pay together, and nothing is granted by itself.
    v1: bool,
    /// This end changes its credit limit once, at any time, to that.
    resize: Option<(usize, u32)>,
}

impl World {
    fn new(scheme: Scheme, credit_limit: u32, coalesce: bool, calls: u32, counter: u32) -> Self {
        let end = |to_send, server, mine, theirs| {
            let mut credits = match scheme {
                Scheme::V1 if calls == to_send => Credits::version_1(0, credit_limit),
                Scheme::V1 => Credits::version_1(credit_limit, 0),
                _ => Credits::new(scheme, server, credit_limit, coalesce),
            };
            credits.start_at(mine, theirs);
            let (posted, arriving) = (credits.reserve(), VecDeque::new());
            End { posted, credits, arriving, to_send, resized: false, heard: None }
        };
        let ends = [end(calls, false, counter, !counter), end(0, true, !counter, counter)];
        Self { ends, room: u32::MAX, buffers: None, blunt: None }
    }

    /// Messages that an end may take beyond those received, where that is not its whole credit limit.
    fn crowded(&self, end: usize) -> Option<u32> {
        let End { credits, to_send: owed, .. } = &self.ends[end];
        match self.reserves(end) {
            Reserves::Full => (end == 1 && *owed > self.room).then_some(0),
            Reserves::Spared => Some(credits.credit_limit().saturating_sub(*owed)),
            Reserves::Short => None,
        }
    }

    fn reserves(&self, end: usize) -> Reserves {
        let End { posted, credits, to_send: owed, .. } = &self.ends[end];
        let spared = if end == 1 && self.buffers.is_some() { credits.used().min(*owed) } else { 0 };
        match credits.reserve() {
            needed if *posted >= needed => Reserves::Full,
            // An answer makes it one fewer.
            needed if posted + spared > needed => Reserves::Spared,
            _ => Reserves::Short,
        }
    }

    fn refilled(&self, end: usize) -> bool {
        self.reserves(end) == Reserves::Full
    }

    /// The most Receives that an end can post.
    fn most(&self, end: usize) -> u32 {
        let most = self.ends[end].credits.reserve();
        match self.buffers {
            Some(buffers) if end == 1 => most.min(buffers.saturating_sub(self.ends[1].to_send)),
            _ => most,
        }
    }

    fn send(&mut self, from: usize, payload: bool, counted: bool) {
        self.send_as(from, payload, counted, (self.refilled(from), self.crowded(from)));
    }

    /// An end sends, whose Receives are all there, or which has room for so many more messages.
    fn send_as(&mut self, from: usize, payload: bool, counted: bool, (refilled, crowded): (bool, Option<u32>)) {
        let credits = &mut self.ends[from].credits;
        let mut short = credits.clone();
        let mut words = match crowded {
            Some(room) => credits.on_send_crowded(counted, room),
            None => credits.on_send(counted, refilled),
        };
        if credits.scheme() == Scheme::V2Windowed && refilled && crowded.is_none() {
            let (credit, received) = short.on_send_windowed();
            let said = CreditWords { credit, received: Some(received) };
            assert_eq!((said, &short), (words, &*credits), "both come to the same");
        }
        if credits.scheme() == Scheme::V2Incremental {
            let most = words.credit >> 16;
            assert!(most >= credits.left().max(1), "more is outstanding than the header says: {credits:#?}");
            if self.blunt == Some(from) {
                words.credit = credits.credit_limit << 16 | words.credit & 0xFFFF;
            }
        }
        if credits.scheme() != Scheme::V1 {
            let (sent, to) = (credits.sent, &self.ends[1 - from].credits);
            let beyond = sent.wrapping_sub(to.told_limit.wrapping_sub(to.untold)) as i32;
            assert!(beyond <= i32::from(!payload), "{beyond} beyond what the other end has said: {:#?}", self.ends);
        }
        if let Some((most, since)) = &mut self.ends[from].heard {
            *since += 1;
            assert!(*since <= *most + u32::from(!payload), "{since} sent where {most} may be outstanding");
        }
        self.ends[1 - from].arriving.push_back(Message { words, payload });
        let to = &self.ends[1 - from];
        assert!(
            to.arriving.len() as u32 <= to.posted,
            "more messages under way than Receives posted: {:#?}",
            self.ends
        );
    }
}

impl Model {
    /// All worlds that one step leads to.
    fn steps(&self, world: &World) -> Vec<World> {
        let mut next = Vec::new();
        for end in 0..2 {
            let me = &world.ends[end];
            let free = self.v1 && end == 1;
            if me.to_send > 0 && me.credits.may_send(!free, world.refilled(end)) {
                let mut after = world.clone();
                let crowded = match world.crowded(end) {
                    // The call that is answered holds nothing any more.
                    Some(room) if world.reserves(end) == Reserves::Spared => Some(room + 1),
                    other => other,
                };
                after.ends[end].to_send -= 1;
                after.send_as(end, true, !free, (world.refilled(end), crowded));
                next.push(after);
            }
            let due = match world.crowded(end) {
                Some(room) => me.credits.wants_grant_crowded(room),
                None => me.credits.wants_grant(world.refilled(end)),
            };
            if due {
                let mut after = world.clone();
                after.send(end, false, true);
                next.push(after);
            }
            if let Some(message) = me.arriving.front() {
                let mut after = world.clone();
                let me = &mut after.ends[end];
                me.arriving.pop_front();
                me.posted -= 1;
                if world.blunt == Some(1 - end) {
                    me.heard = Some((message.words.credit >> 16, 0));
                }
                if self.v1 && end == 0 {
                    me.credits.on_answered();
                }
                if !(self.v1 && end == 1) {
                    let mut without_exit = me.credits.clone();
                    me.credits.on_receive(message.words, message.payload).expect("a peer that keeps the rules");
                    let CreditWords { credit, received } = message.words;
                    without_exit.on_receive_other(credit, received, message.payload).expect("the same peer");
                    assert_eq!(without_exit, me.credits, "the early exit comes to the same");
                }
                if end == 1 && message.payload {
                    me.to_send += self.replies;
                }
                next.push(after);
            }
            if let Some((_, credit_limit)) = self.resize.filter(|&(who, _)| who == end && !me.resized) {
                let mut after = world.clone();
                let me = &mut after.ends[end];
                me.credits.set_credit_limit(credit_limit);
                me.resized = true;
                next.push(after);
            }
            if me.posted < world.most(end) {
                let mut after = world.clone();
                after.ends[end].posted = world.most(end);
                next.push(after);
            }
        }
        next
    }

    /// Visits every world that can come about; returns how many there are. A hash of 64 bits stands for a world that
    /// was seen: that two of a million have the same is one chance in 10 million, and other ones with each run.
    fn explore(&self, start: World) -> usize {
        let hashes = RandomState::new();
        let mut seen = HashSet::from([hashes.hash_one(&start)]);
        let mut open = vec![start];
        while let Some(world) = open.pop() {
            let next = self.steps(&world);
            if next.is_empty() {
                let waits = world.ends.iter().any(|end| end.to_send > 0);
                assert!(!waits, "deadlock: messages wait for ever: {:#?}", world.ends);
            }
            for after in next {
                if seen.insert(hashes.hash_one(&after)) {
                    assert!(seen.len() < 3_000_000, "the peers do not come to rest");
                    open.push(after);
                }
            }
        }
        seen.len()
    }
}

/// Counters that wrap in the middle of the run.
const NEAR_WRAP: u32 = u32::MAX - 2;

#[test]
fn no_interleaving_of_version_2_overruns_or_deadlocks() {
    let mut worlds = 0;
    for scheme in [Scheme::V2Windowed, Scheme::V2Incremental] {
        for coalesce in [true, false] {
            for (replies, calls) in [(1, 4), (2, 2), (0, 6)] {
                let start = World::new(scheme, MIN_CREDITS, coalesce, calls, NEAR_WRAP);
                worlds += Model { replies, v1: false, resize: None }.explore(start);
            }
        }
    }
    assert!(worlds > 10_000, "only {worlds} worlds were visited");
}

/// Whichever end changes its credit limit, and whether it says so when that is true or at once.
#[test]
fn no_interleaving_of_changed_credit_limits_overruns_or_deadlocks() {
    let mut worlds = 0;
    for scheme in [Scheme::V2Windowed, Scheme::V2Incremental] {
        for (from, to) in [(MIN_CREDITS, MIN_CREDITS + 2), (MIN_CREDITS + 2, MIN_CREDITS)] {
            for (who, replies, calls) in [(0, 1, 3), (0, 6, 1), (1, 1, 4), (1, 0, 6)] {
                for blunt in [false, true] {
                    if blunt && scheme == Scheme::V2Windowed {
                        continue;
                    }
                    let start = World::new(scheme, from, true, calls, NEAR_WRAP);
                    let start = World { blunt: blunt.then_some(who), ..start };
                    worlds += Model { replies, v1: false, resize: Some((who, to)) }.explore(start);
                }
            }
        }
    }
    // The most that may be outstanding comes down when more than that is granted, and there is enough to send
    // to overrun it.
    for (who, replies, calls) in [(0, 7, 1), (1, 0, 9)] {
        let start = World::new(Scheme::V2Incremental, 2 * MIN_CREDITS, true, calls, NEAR_WRAP);
        let start = World { blunt: Some(who), ..start };
        worlds += Model { replies, v1: false, resize: Some((who, MIN_CREDITS)) }.explore(start);
    }
    assert!(worlds > 10_000, "only {worlds} worlds were visited");
}

#[test]
fn no_interleaving_deadlocks_while_a_server_has_no_room_for_more_calls() {
    let mut worlds = 0;
    for scheme in [Scheme::V2Windowed, Scheme::V2Incremental] {
        let start = World { room: 0, ..World::new(scheme, MIN_CREDITS, true, 5, NEAR_WRAP) };
        worlds += Model { replies: 2, v1: false, resize: None }.explore(start);
    }
    assert!(worlds > 10_000, "only {worlds} worlds were visited");
}

/// The calls that a server has not answered leave it fewer Receives than it has promised.
#[test]
fn no_interleaving_overruns_or_deadlocks_while_calls_hold_what_receives_are_made_of() {
    let mut worlds = 0;
    for scheme in [Scheme::V2Windowed, Scheme::V2Incremental] {
        for (limit, buffers, calls) in [(MIN_CREDITS, 5, 5), (MIN_CREDITS, 5, 6), (MIN_CREDITS, 6, 5)] {
            let start = World { buffers: Some(buffers), ..World::new(scheme, limit, true, calls, NEAR_WRAP) };
            worlds += Model { replies: 1, v1: false, resize: None }.explore(start);
        }
    }
    assert!(worlds > 10_000, "only {worlds} worlds were visited");
}

#[test]
fn no_interleaving_of_version_1_overruns_or_deadlocks() {
    let worlds =
        Model { replies: 1, v1: true, resize: None }.explore(World::new(Scheme::V1, MIN_CREDITS, true, 8, NEAR_WRAP));
    assert!(worlds > 500, "only {worlds} worlds were visited");
}

#[test]
fn a_peer_that_ignores_its_limit_is_found_out_at_once() {
    for scheme in [Scheme::V2Windowed, Scheme::V2Incremental] {
        let mut credits = Credits::new(scheme, true, 4, true);
        let received = (scheme == Scheme::V2Windowed).then_some(0);
        let words = CreditWords { credit: 1, received };
        // One for the initial credit, one that a pure grant could have been.
        assert!(credits.on_receive(words, true).is_ok());
        assert!(credits.on_receive(words, true).is_ok());
        let fault = credits.on_receive(words, true).unwrap_err();
        assert!(matches!(fault, PeerFault::CreditsExceeded { received: 3, limit: 1 }), "{fault}");
    }
}

#[test]
fn acknowledging_what_was_never_sent_is_a_fault() {
    let mut credits = Credits::new(Scheme::V2Windowed, false, 4, true);
    credits.on_send(true, true);
    let words = CreditWords { credit: 4, received: Some(2) };
    assert!(matches!(
        credits.on_receive(words, true),
        Err(PeerFault::AcknowledgedTooMuch { acknowledged: 2, sent: 1 })
    ));
}

#[test]
fn increments_that_add_up_to_nonsense_are_a_fault() {
    let mut credits = Credits::new(Scheme::V2Incremental, false, MAX_CREDITS, true);
    let words = CreditWords { credit: 0xFFFF_FFFF, received: None };
    let fault = (0..4).find_map(|_| {
        credits.on_send(true, true);
        credits.on_receive(words, true).err()
    });
    assert!(matches!(fault, Some(PeerFault::GrantedTooMuch { .. })), "{fault:?}");
}

#[test]
fn a_version_1_grant_of_zero_is_read_as_one() {
    let mut credits = Credits::new(Scheme::V1, false, 8, true);
    credits.on_send(true, true);
    assert!(!credits.may_send(true, true));
    credits.on_answered();
    credits.on_receive(CreditWords { credit: 0, received: None }, true).unwrap();
    assert_eq!(credits.available(), 1);
    credits.on_send(true, true);
    credits.on_answered();
    credits.on_receive(CreditWords { credit: u32::MAX, received: None }, true).unwrap();
    assert_eq!(credits.available(), 8, "and no more than the Receives that there are for replies");
}

#[test]
fn what_was_told_keeps_its_receives_when_the_credit_limit_shrinks() {
    for scheme in [Scheme::V2Windowed, Scheme::V2Incremental] {
        let mut credits = Credits::new(scheme, false, 16, true);
        credits.on_send(true, true);
        credits.set_credit_limit(4);
        assert_eq!((credits.credit_limit(), credits.reserve()), (4, 17), "{scheme:?}");
    }
    // Version 1 counts calls under way: less than those cannot be told.
    let mut credits = Credits::version_1(16, 0);
    credits.set_credit_limit(4);
    assert_eq!(credits.credit_limit(), 16);
    credits.set_credit_limit(32);
    assert_eq!(credits.credit_limit(), 32);
}

#[test]
fn a_grant_alone_makes_no_grant_due() {
    let mut credits = Credits::new(Scheme::V2Windowed, false, 8, false);
    credits.on_send(true, true);
    let words = CreditWords { credit: 8, received: Some(1) };
    credits.on_receive(words, false).unwrap();
    assert!(!credits.wants_report() && !credits.wants_grant(true));
    credits.on_receive(words, true).unwrap();
    assert!(credits.wants_report() && credits.wants_grant(true));
}

#[test]
fn only_a_client_has_a_credit_that_nobody_granted() {
    for scheme in [Scheme::V2Windowed, Scheme::V2Incremental] {
        let (mut client, mut server) = (Credits::new(scheme, false, 8, true), Credits::new(scheme, true, 8, true));
        assert_eq!((client.available(), server.available()), (1, 0), "{scheme:?}");
        let words = client.on_send(true, true);
        server.on_receive(words, true).unwrap();
        assert_eq!((client.available(), server.available()), (0, 8), "{scheme:?}");
    }
    // A client whose Receives are short keeps one for its server's first message, and says so.
    let mut client = Credits::new(Scheme::V2Incremental, false, 8, true);
    assert_eq!(client.on_send(true, false).credit, 8 << 16 | 1);
    assert_eq!(client.on_send(true, true).credit, 8 << 16 | 7);
}

#[test]
fn the_high_half_binds_also_when_it_is_lowered() {
    let mut credits = Credits::new(Scheme::V2Incremental, false, 8, true);
    let hear = |credits: &mut Credits, most: u32, newly: u32| {
        let words = CreditWords { credit: most << 16 | newly, received: None };
        credits.on_receive(words, true).unwrap();
        credits.available()
    };
    credits.on_send(true, true);
    assert_eq!(hear(&mut credits, 16, 16), 16);
    assert_eq!(hear(&mut credits, 4, 0), 4);
    for _ in 0..4 {
        credits.on_send(true, true);
    }
    assert!(!credits.may_send(true, true) && credits.may_grant());
    // What was granted is not lost.
    assert_eq!(hear(&mut credits, 4, 0), 4);
    assert_eq!(hear(&mut credits, 16, 1), 13);
    // A peer that says 0 would wait for ever.
    assert_eq!(hear(&mut credits, 0, 1), 1);
}

#[test]
fn a_lower_credit_limit_is_told_as_it_becomes_true() {
    let mut credits = Credits::new(Scheme::V2Incremental, true, 8, true);
    let words = CreditWords { credit: 8 << 16 | 8, received: None };
    credits.on_receive(words, true).unwrap();
    assert_eq!(credits.on_send(true, true).credit, 8 << 16 | 8);
    credits.set_credit_limit(4);
    let mut told = Vec::new();
    for _ in 0..6 {
        credits.on_receive(CreditWords { credit: 8 << 16 | 1, received: None }, true).unwrap();
        let credit = credits.on_send(true, true).credit;
        told.push((credit >> 16, credit & 0xFFFF));
    }
    assert_eq!(told, [(7, 0), (6, 0), (5, 0), (4, 0), (4, 1), (4, 1)]);
}
