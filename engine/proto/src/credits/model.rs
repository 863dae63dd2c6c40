//! Flow control model: all interleavings of two peers with few credits.
//!
//! For every order of sending, delivery, refilling and granting: at most as many messages are in flight as Receives are
//! posted. Only a pure grant exceeds its sender's limit. The limits in headers are correct, every message arrives, and
//! at the end no peer has a message to send.

use std::collections::{HashSet, VecDeque};
use std::hash::{BuildHasher, RandomState};

use super::*;

/// Kinds of messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Kind {
    /// A message of a call, other than its last one.
    Part,
    Call,
    Reply,
    Grant,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Message {
    words: CreditWords,
    kind: Kind,
}

/// One end: counts, posted Receives, inbound messages and work to send.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct End {
    credits: Credits,
    posted: u32,
    arriving: VecDeque<Message>,
    /// Calls not yet started.
    to_call: u32,
    /// Calls of this end without an answer.
    unanswered: u32,
    /// Unsent messages of the call that it has begun.
    unsent_parts: u32,
    /// Whether it has received a part of a call.
    has_partial_call: bool,
    /// Messages of replies that it has to send.
    unsent_replies: u32,
    /// Calls that it never answers.
    parked: u32,
    /// Whether its credit limit was changed.
    resized: bool,
    /// The other end's last limit of outstanding messages, and the number of messages sent since. It is recorded only
    /// if that end is the [early announcer](World::early_announcer).
    peer_limit: Option<(u32, u32)>,
}

/// Both ends; 0 calls, 1 answers each call with `replies` messages.
#[derive(Clone, Hash)]
struct World {
    ends: [End; 2],
    /// Buffers that end 1 has for Receives and unanswered calls; `None` if there are always enough.
    buffers: Option<u32>,
    /// The end that announces a lower limit immediately, in spite of larger grants, as other implementations may.
    early_announcer: Option<usize>,
}

struct Model {
    replies: u32,
    /// Messages per call.
    parts: u32,
    /// Version 1: each reply returns the credit of its call, and there are no pure grants.
    v1: bool,
    /// The end that changes its credit limit once, at any time, and its new limit.
    resize: Option<(usize, u32)>,
    /// End 1 starts a call per received call, and answers only afterwards.
    nested: bool,
}

impl World {
    fn new(credit_mode: CreditMode, credit_limit: u32, coalesce: bool, calls: u32, counter: u32) -> Self {
        let end = |to_call, server, own_count, peer_count| {
            let mut credits = match credit_mode {
                CreditMode::V1 if calls == to_call => Credits::version_1(0, credit_limit),
                CreditMode::V1 => Credits::version_1(credit_limit, 0),
                _ => Credits::new(credit_mode, server, credit_limit, coalesce),
            };
            credits.start_at(own_count, peer_count);
            let (posted, arriving) = (credits.reserve(0), VecDeque::new());
            End {
                posted,
                credits,
                arriving,
                to_call,
                unanswered: 0,
                unsent_parts: 0,
                has_partial_call: false,
                unsent_replies: 0,
                parked: 0,
                resized: false,
                peer_limit: None,
            }
        };
        let ends = [end(calls, false, counter, !counter), end(0, true, !counter, counter)];
        Self { ends, buffers: None, early_announcer: None }
    }

    /// Whether messages remain to be sent. New calls may wait while the server holds as many as its credit limit.
    fn has_to_send(&self) -> bool {
        let full = |end: &End| end.parked >= end.credits.credit_limit();
        let [caller, server] = &self.ends;
        let calls = server.to_call + if full(server) { 0 } else { caller.to_call };
        calls > 0 || self.ends.iter().any(|end| end.unsent_parts + end.unsent_replies > 0)
    }

    fn send(&mut self, from: usize, kind: Kind, counted: bool, window: Option<u32>) {
        let credits = &mut self.ends[from].credits;
        let mut windowed = credits.clone();
        let mut words = match kind {
            Kind::Grant => credits.on_send_grant(window),
            Kind::Part | Kind::Call | Kind::Reply => credits.on_send(counted, window),
        };
        if let (CreditMode::V2Windowed, Some(window), true) = (credits.credit_mode(), window, kind != Kind::Grant) {
            let (credit, received) = windowed.on_send_windowed(window);
            let expected = CreditWords { credit, received: Some(received) };
            assert_eq!((expected, &windowed), (words, &*credits), "both functions agree");
        }
        if credits.credit_mode() == CreditMode::V2Incremental {
            let max_outstanding = words.credit >> 16;
            assert!(
                max_outstanding >= credits.peer_credits().max(1),
                "the header covers all outstanding messages: {credits:#?}"
            );
            if self.early_announcer == Some(from) {
                words.credit = credits.credit_limit << 16 | words.credit & 0xFFFF;
            }
        }
        let payload = kind != Kind::Grant;
        if credits.credit_mode() != CreditMode::V1 {
            let (sent, to) = (credits.sent, &self.ends[1 - from].credits);
            let beyond = sent.wrapping_sub(to.announced_limit.wrapping_sub(to.unannounced)) as i32;
            assert!(
                beyond <= i32::from(!payload),
                "{beyond} messages beyond what the other end has announced: {:#?}",
                self.ends
            );
        }
        if let Some((limit, since)) = &mut self.ends[from].peer_limit {
            *since += 1;
            assert!(*since <= *limit + u32::from(!payload), "{since} sent where {limit} may be outstanding");
        }
        self.ends[1 - from].arriving.push_back(Message { words, kind });
        let to = &self.ends[1 - from];
        assert!(
            to.arriving.len() as u32 <= to.posted,
            "more messages under way than Receives posted: {:#?}",
            self.ends
        );
    }
}

impl Model {
    const fn new(replies: u32) -> Self {
        Self { replies, parts: 1, v1: false, resize: None, nested: false }
    }

    /// Calls that an end has not answered.
    fn served(&self, end: &End) -> u32 {
        end.parked + end.unsent_replies.div_ceil(self.replies.max(1))
    }

    /// The grant window, as the connection computes it.
    fn grant_window(&self, end: &End) -> u32 {
        end.credits.grant_window(self.served(end), SLOTS, end.unanswered > 0, end.has_partial_call)
    }

    /// Whether Receives suffice, even after the end has answered one more call or has sent its own first call.
    fn receives_ready(&self, end: &End) -> bool {
        let taken = self.served(end);
        let needed = end.credits.reserve(taken);
        let spared = match self.v1 {
            true => 0,
            false => end.credits.spared(taken, self.grant_window(end)),
        };
        end.posted >= needed || end.posted + spared >= needed + 2
    }

    /// Maximum number of Receives that an end can post.
    fn max_posted(&self, world: &World, at: usize) -> u32 {
        let end = &world.ends[at];
        let reserve = end.credits.reserve(self.served(end));
        match world.buffers {
            Some(buffers) if at == 1 => reserve.min(buffers.saturating_sub(self.served(end))),
            _ => reserve,
        }
    }

    /// All worlds that one step leads to.
    fn steps(&self, world: &World) -> Vec<World> {
        let mut next = Vec::new();
        for at in 0..2 {
            let end = &world.ends[at];
            let replies_are_free = self.v1 && at == 1;
            let ready = self.receives_ready(end);
            let may_reply = !self.nested || at == 0 || (end.to_call == 0 && end.unanswered == 0);
            if end.unsent_parts > 0 && end.credits.may_send(true, ready) {
                next.push(self.call(world, at, end.unsent_parts - 1));
            }
            if end.unsent_parts == 0
                && end.unsent_replies > 0
                && may_reply
                && end.credits.may_send(!replies_are_free, ready)
            {
                let mut after = world.clone();
                after.ends[at].unsent_replies -= 1;
                let window = ready.then(|| self.grant_window(&after.ends[at]));
                after.send(at, Kind::Reply, !replies_are_free, window);
                next.push(after);
            }
            let spares_reply_credits = self.v1 || end.unsent_replies == 0 || end.credits.available() > REPLY_CREDITS;
            if end.unsent_parts == 0 && end.to_call > 0 && spares_reply_credits && end.credits.may_send(true, ready) {
                let mut after = world.clone();
                after.ends[at].to_call -= 1;
                after.ends[at].unanswered += u32::from(self.replies > 0);
                next.push(self.call(&after, at, self.parts - 1));
            }
            if end.credits.is_grant_due(ready.then(|| self.grant_window(end))) {
                let mut after = world.clone();
                after.send(at, Kind::Grant, true, ready.then(|| self.grant_window(end)));
                next.push(after);
            }
            if let Some(message) = end.arriving.front() {
                let mut after = world.clone();
                self.receive(&mut after.ends[at], at, message, world.early_announcer == Some(1 - at));
                next.push(after);
            }
            if let Some((_, credit_limit)) = self.resize.filter(|&(who, _)| who == at && !end.resized) {
                let mut after = world.clone();
                let end = &mut after.ends[at];
                end.credits.set_credit_limit(credit_limit);
                end.resized = true;
                next.push(after);
            }
            if end.posted < self.max_posted(world, at) {
                let mut after = world.clone();
                after.ends[at].posted = self.max_posted(world, at);
                next.push(after);
            }
        }
        next
    }

    /// Sends a message of a call, with `rest` more to follow.
    fn call(&self, world: &World, at: usize, rest: u32) -> World {
        let mut after = world.clone();
        after.ends[at].unsent_parts = rest;
        let window = self.receives_ready(&world.ends[at]).then(|| self.grant_window(&after.ends[at]));
        after.send(at, if rest == 0 { Kind::Call } else { Kind::Part }, true, window);
        after
    }

    fn receive(&self, end: &mut End, at: usize, message: &Message, from_early_announcer: bool) {
        end.arriving.pop_front();
        end.posted -= 1;
        if from_early_announcer {
            end.peer_limit = Some((message.words.credit >> 16, 0));
        }
        if self.v1 && at == 0 {
            end.credits.on_answered();
        }
        let payload = message.kind != Kind::Grant;
        if !(self.v1 && at == 1) {
            end.credits.on_receive(message.words, payload).expect("a peer that keeps the rules");
        }
        match message.kind {
            Kind::Part => end.has_partial_call = true,
            Kind::Call => {
                end.has_partial_call = false;
                end.unsent_replies += self.replies;
                end.to_call += u32::from(self.nested && at == 1);
            }
            // The last message of a reply is not distinguished, so a call with several reply messages never completes.
            Kind::Reply if self.replies <= 1 => end.unanswered -= 1,
            Kind::Reply | Kind::Grant => {}
        }
    }

    /// Takes random steps, determined by a seed, until none is left.
    fn walk(&self, mut world: World, seed: u64) {
        let mut drawn = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        for _ in 0..10_000 {
            let mut next = self.steps(&world);
            if next.is_empty() {
                return assert!(!world.has_to_send(), "seed {seed}: messages remain to be sent: {:#?}", world.ends);
            }
            drawn ^= drawn << 13;
            drawn ^= drawn >> 7;
            drawn ^= drawn << 17;
            world = next.swap_remove((drawn >> 32) as usize % next.len());
        }
        panic!("seed {seed}: the peers still send after 10,000 steps: {:#?}", world.ends);
    }

    /// Visits every reachable world; returns their number. A 64-bit hash, keyed anew in each run, stands for a visited
    /// world. A million worlds collide with a probability below 1 in 10 million.
    fn explore(&self, start: World) -> usize {
        let hashes = RandomState::new();
        let mut visited = HashSet::from([hashes.hash_one(&start)]);
        let mut open = vec![start];
        while let Some(world) = open.pop() {
            let next = self.steps(&world);
            if next.is_empty() {
                assert!(!world.has_to_send(), "deadlock: messages remain to be sent: {:#?}", world.ends);
            }
            for after in next {
                if visited.insert(hashes.hash_one(&after)) {
                    assert!(visited.len() < 3_000_000, "the number of reachable worlds is limited");
                    open.push(after);
                }
            }
        }
        visited.len()
    }
}

/// Slots for calls, more than the calls that are ever outstanding in these tests.
const SLOTS: u32 = 64;

/// Start of the counters, which therefore wrap in the middle of the run.
const NEAR_WRAP: u32 = u32::MAX - 2;

#[test]
fn no_interleaving_of_version_2_overruns_or_deadlocks() {
    let mut worlds = 0;
    for credit_mode in [CreditMode::V2Windowed, CreditMode::V2Incremental] {
        for coalesce in [true, false] {
            for (replies, calls) in [(1, 4), (2, 2), (0, 6)] {
                let start = World::new(credit_mode, MIN_CREDITS, coalesce, calls, NEAR_WRAP);
                worlds += Model::new(replies).explore(start);
            }
        }
    }
    assert!(worlds > 10_000, "only {worlds} worlds were visited");
}

/// Either end changes its credit limit, and announces it immediately, or only once it takes effect.
#[test]
fn no_interleaving_of_changed_credit_limits_overruns_or_deadlocks() {
    let mut worlds = 0;
    for credit_mode in [CreditMode::V2Windowed, CreditMode::V2Incremental] {
        for (from, to) in [(MIN_CREDITS, MIN_CREDITS + 2), (MIN_CREDITS + 2, MIN_CREDITS)] {
            for (who, replies, calls) in [(0, 1, 3), (0, 6, 1), (1, 1, 4), (1, 0, 6)] {
                for early_announcer in [false, true] {
                    if early_announcer && credit_mode == CreditMode::V2Windowed {
                        continue;
                    }
                    let start = World::new(credit_mode, from, true, calls, NEAR_WRAP);
                    let start = World { early_announcer: early_announcer.then_some(who), ..start };
                    worlds += Model { resize: Some((who, to)), ..Model::new(replies) }.explore(start);
                }
            }
        }
    }
    // The limit of outstanding messages falls below the granted credits, and there are enough messages to exceed it.
    for (who, replies, calls) in [(0, 7, 1), (1, 0, 9)] {
        let start = World::new(CreditMode::V2Incremental, 2 * MIN_CREDITS, true, calls, NEAR_WRAP);
        let start = World { early_announcer: Some(who), ..start };
        worlds += Model { resize: Some((who, MIN_CREDITS)), ..Model::new(replies) }.explore(start);
    }
    assert!(worlds > 10_000, "only {worlds} worlds were visited");
}

/// End 1 starts a call per received call, beyond its credits, and answers afterwards.
#[test]
fn no_interleaving_deadlocks_while_each_call_waits_for_a_reverse_call() {
    let mut worlds = 0;
    for credit_mode in [CreditMode::V2Windowed, CreditMode::V2Incremental] {
        let model = Model { nested: true, ..Model::new(1) };
        worlds += model.explore(World::new(credit_mode, MIN_CREDITS, true, 3, NEAR_WRAP));
        // More calls have too many interleavings to explore all.
        for seed in 0..3_000 {
            let (limit, calls) = (MIN_CREDITS + (seed % 3) as u32, 5 + (seed % 16) as u32);
            model.walk(World::new(credit_mode, limit, true, calls, NEAR_WRAP), seed);
        }
    }
    assert!(worlds > 10_000, "only {worlds} worlds were visited");
}

/// Unanswered calls hold all credits except one.
#[test]
fn no_interleaving_stalls_with_a_single_free_credit() {
    let mut worlds = 0;
    for credit_mode in [CreditMode::V2Windowed, CreditMode::V2Incremental] {
        for (replies, calls) in [(1, 6), (2, 4)] {
            let mut start = World::new(credit_mode, MIN_CREDITS, true, calls, NEAR_WRAP);
            start.ends[1].parked = MIN_CREDITS - 1;
            worlds += Model::new(replies).explore(start);
        }
    }
    assert!(worlds > 1_000, "only {worlds} worlds were visited");
}

/// More calls than the credit limit stay unanswered, while it shrinks at any time. Started calls of either end, in
/// parts or not, are answered, even with the minimum of buffers.
#[test]
fn no_interleaving_stalls_when_the_credit_limit_shrinks_below_the_unanswered_calls() {
    const UNANSWERED: u32 = 2 * MIN_CREDITS - 1;
    let mut worlds = 0;
    for credit_mode in [CreditMode::V2Windowed, CreditMode::V2Incremental] {
        let shrinks = |parts| Model { parts, resize: Some((1, MIN_CREDITS)), ..Model::new(1) };
        let start = |calls, calls_back, buffers| {
            let mut start = World::new(credit_mode, 2 * MIN_CREDITS, true, calls, NEAR_WRAP);
            (start.ends[1].to_call, start.ends[1].parked, start.buffers) = (calls_back, UNANSWERED, buffers);
            start
        };
        for buffers in [None, Some(UNANSWERED + MIN_CREDITS + 1)] {
            for (parts, calls, calls_back) in [(1, 1, 3), (1, 3, 1), (2, 1, 1), (3, 1, 0), (3, 1, 1)] {
                worlds += shrinks(parts).explore(start(calls, calls_back, buffers));
            }
            // More calls have too many interleavings to explore all.
            for seed in 0..1_500 {
                let [parts, calls, calls_back] =
                    [(1, 3), (1, 7), (0, 9)].map(|(min, count)| min + (seed % count) as u32);
                shrinks(parts).walk(start(calls, calls_back, buffers), seed);
            }
        }
    }
    assert!(worlds > 10_000, "only {worlds} worlds were visited");
}

/// A server's unanswered calls leave it fewer Receives than it has announced.
#[test]
fn no_interleaving_overruns_or_deadlocks_while_calls_hold_receive_buffers() {
    let mut worlds = 0;
    for credit_mode in [CreditMode::V2Windowed, CreditMode::V2Incremental] {
        for (limit, buffers, calls) in [(MIN_CREDITS, 6, 5), (MIN_CREDITS, 6, 6), (MIN_CREDITS, 7, 5)] {
            let start = World { buffers: Some(buffers), ..World::new(credit_mode, limit, true, calls, NEAR_WRAP) };
            worlds += Model::new(1).explore(start);
        }
    }
    assert!(worlds > 10_000, "only {worlds} worlds were visited");
}

#[test]
fn no_interleaving_of_version_1_overruns_or_deadlocks() {
    let worlds =
        Model { v1: true, ..Model::new(1) }.explore(World::new(CreditMode::V1, MIN_CREDITS, true, 8, NEAR_WRAP));
    assert!(worlds > 500, "only {worlds} worlds were visited");
}
