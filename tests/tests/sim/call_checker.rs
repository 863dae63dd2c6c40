//! Forward or reverse calls of one shard, with checks of every completion.
//!
//! A call completes exactly once, with the right reply or a true cause. After completion no peer can reach its memory.
//! The number of executions matches its result.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::rc::Rc;
use std::time::Duration;

use rpcrdma::client::{Connection, LocalClient};
use rpcrdma::config::ConnectConfig;
use rpcrdma::proto::CallId;
use rpcrdma::shard::{CompletedCall, SimulatedTime};
use rpcrdma::wire::ErrorBody;
use rpcrdma::{CallError, CallProgress, FailedCall, Knob, Reply};
use rpcrdma_tests::Random;

use crate::changes;
use crate::device::Device;
use crate::forms::{Draw, Shape, Terms};
use crate::journal::Journal;
use crate::plan::{Habits, Plan};
use crate::probe::BufferId;
use crate::service::Runs;

/// The calls of one shard.
pub(crate) struct CallChecker {
    pub(crate) journal: Journal,
    pub(crate) random: Random,
    pub(crate) links: Vec<Link>,
    time: SimulatedTime,
    plan: Rc<Plan>,
    habits: Habits,
    /// First half of the [`Name`](crate::service::Name) of all its calls.
    who: u32,
    /// Calls may be retransmitted on a new connection (`reconnects`), and may then execute twice (`repeats`).
    reconnects: bool,
    repeats: bool,
    calls: BTreeMap<u64, Call>,
    /// Replies that are kept, with a hash of their contents.
    kept: Vec<(Reply, u64)>,
    next_token: u64,
    runs: Runs,
    claims: Vec<(u64, ImpliedExecutions)>,
    /// One-way calls sent. An error may still arrive for each; no call takes it.
    pub(crate) one_way_sent: u64,
    /// Links that `ping` has called.
    pinged: usize,
    /// By group: calls that the peer refused because it had no memory or was draining.
    pub(crate) turned_away: Vec<u64>,
}

/// A connection from the caller's point of view.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) connection: Connection,
    /// The group at the server end; `None` for the hostile server.
    pub(crate) group: Option<usize>,
    pub(crate) terms: Terms,
    /// The peer is hostile.
    pub(crate) hostile: bool,
    /// This side closes it.
    pub(crate) closing: bool,
    pub(crate) over: bool,
    /// It has been established.
    pub(crate) opened: bool,
    /// A call on it has succeeded.
    pub(crate) has_succeeded: bool,
    /// Calls that always fit within the credits.
    pub(crate) room: usize,
    pub(crate) under_way: usize,
    /// Calls cancelled or timed out after they were sent, whose replies have not arrived.
    pub(crate) abandoned: usize,
}

struct Call {
    link: usize,
    shape: Shape,
    id: Option<CallId>,
    deadline: Option<u64>,
    cancelled: bool,
    /// The limit of calls may have been reached when it was started.
    crowded: bool,
    /// Its link was not open.
    refused: bool,
    /// Connections of this side that had ended when it was started.
    ends: u64,
    places: Vec<BufferId>,
}

/// Number of executions that a call's result implies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ImpliedExecutions {
    Never,
    AtMostOnce,
    Once,
    AtLeastOnce,
}

/// Identity and environment of a checker.
pub(crate) struct CheckerContext<'a> {
    pub(crate) plan: &'a Rc<Plan>,
    pub(crate) journal: Journal,
    pub(crate) time: &'a SimulatedTime,
    pub(crate) runs: &'a Runs,
    pub(crate) who: u32,
    pub(crate) habits: Habits,
}

impl CallChecker {
    pub(crate) fn new(context: CheckerContext<'_>, connect: &ConnectConfig) -> Self {
        let CheckerContext { plan, journal, time, runs, who, habits } = context;
        Self {
            journal,
            random: Random::new(plan.seed ^ (u64::from(who) + 1) << 40),
            links: Vec::new(),
            time: time.clone(),
            plan: Rc::clone(plan),
            habits,
            who,
            reconnects: connect.reconnect_attempts > 0,
            // A connection lost during negotiation is reopened in any case.
            repeats: connect.retransmit,
            calls: BTreeMap::new(),
            kept: Vec::new(),
            next_token: 0,
            runs: runs.clone(),
            claims: Vec::new(),
            pinged: 0,
            one_way_sent: 0,
            turned_away: vec![0; plan.groups.len()],
        }
    }

    /// Makes and cancels some calls, and drops some replies.
    pub(crate) fn work(&mut self, client: &mut LocalClient<Device>) {
        for _ in 0..self.random.below(4) {
            if self.remaining() > 0 {
                self.start(client);
            }
        }
        if self.habits.cancel != 0 && self.random.once_in(3 * self.habits.cancel) {
            self.cancel(client);
        }
        if self.random.once_in(self.plan.change) {
            changes::make_change(client, &self.links, &mut self.random, &self.journal);
        }
        changes::count_events(client, &self.journal);
        if self.kept.len() > 3 || self.random.once_in(20) {
            self.release(1);
        }
    }

    /// Calls not yet made.
    pub(crate) fn remaining(&self) -> usize {
        self.habits.calls.saturating_sub(self.next_token as usize)
    }

    /// Calls that have not completed.
    pub(crate) fn under_way(&self) -> usize {
        self.calls.len()
    }

    fn start(&mut self, client: &mut LocalClient<Device>) {
        let link = self.random.below(self.links.len().max(1));
        let Some(&Link { opened, over, under_way, .. }) = self.links.get(link) else { return };
        if under_way >= self.habits.depth {
            return;
        }
        // Occasionally calls on a link that is not open.
        if (!opened || over) && !self.random.once_in(20) {
            return;
        }
        let plan = Rc::clone(&self.plan);
        let name = (self.who, self.next_token as u32);
        let terms = &self.links[link].terms;
        let shape = Shape::draw(&mut Draw { random: &mut self.random, plan: &plan, terms, name });
        self.call(client, link, shape);
    }

    /// Makes a call. Returns false if the pool is empty.
    fn call(&mut self, client: &mut LocalClient<Device>, link: usize, shape: Shape) -> bool {
        let connection = self.links[link].connection;
        let (mut call, places) = match shape.prepare(client, connection) {
            Ok(prepared) => prepared,
            Err(CallError::NoMemory { .. }) => {
                self.journal.count("client pools dry", 1);
                return false;
            }
            Err(CallError::Closed) => {
                assert!(!client.is_established(connection), "an open connection says that it is closed");
                return false;
            }
            Err(other) => panic!("{}: {other}", self.journal.who()),
        };
        let token = self.next_token;
        self.next_token += 1;
        let given = self.habits.deadline;
        // A hostile peer may never reply.
        let mut deadline = None;
        if self.links[link].hostile || self.random.once_in(given) {
            let time = 1 + self.random.below(200 * self.plan.tick as usize) as u64;
            call = call.timeout(Duration::from_nanos(time));
            deadline = Some(self.time.now() + time);
        }
        self.journal.note(format_args!("call {token} on {link}: {}", shape.form));
        let entry = &mut self.links[link];
        entry.under_way += 1;
        let crowded = entry.under_way + entry.abandoned > entry.room;
        let refused = !client.is_established(connection);
        let ends = client.shard().fabric().ends();
        let id = client.start(connection, call, token);
        let call = Call { link, shape, id, deadline, cancelled: false, crowded, refused, ends, places };
        self.calls.insert(token, call);
        self.journal.count("calls", 1);
        true
    }

    fn cancel(&mut self, client: &mut LocalClient<Device>) {
        if self.calls.is_empty() {
            return;
        }
        let at = self.random.below(self.calls.len());
        let Some((&token, call)) = self.calls.iter_mut().nth(at) else { return };
        if let Some(id) = call.id {
            call.cancelled = true;
            self.journal.note(format_args!("cancel {token}"));
            client.cancel(self.links[call.link].connection, id);
        }
    }

    /// Checks and drops kept replies.
    pub(crate) fn release(&mut self, most: usize) {
        let count = most.min(self.kept.len());
        for (reply, contents) in self.kept.drain(..count) {
            assert_eq!(contents_of(&reply), contents, "{}: a reply changes", self.journal.who());
        }
    }

    /// Checks a completed call.
    pub(crate) fn ended(&mut self, client: &mut LocalClient<Device>, done: CompletedCall) {
        let who = self.journal.clone();
        let who = who.who();
        let CompletedCall { token, mut result } = done;
        if let Err(failed) = &mut result {
            // A peer that could still reach the buffers would fail its own checks.
            failed.returned.take_sent().for_each(|mut buf| buf.fill(!0));
            failed.returned.take_chunks().for_each(|mut buf| buf.fill(!0));
        }
        let Some(call) = self.calls.remove(&token) else { panic!("{who}: call {token} ends again") };
        self.links[call.link].under_way -= 1;
        let link = &self.links[call.link];
        let (form, hostile) = (call.shape.form, link.hostile);
        match result {
            Ok(mut reply) => {
                self.journal.note(format_args!("end {token}: {} bytes", reply.results().len()));
                self.check_unexposed(client, token, &call);
                self.journal.count("calls that succeeded", 1);
                self.one_way_sent += u64::from(call.shape.one_way);
                if !hostile {
                    if let Err(wrong) = call.shape.check(&mut reply, &link.terms) {
                        panic!("{who}: call {token}, {form}: {wrong}");
                    }
                    self.journal.count(form, 1);
                    self.journal.count("reverse calls that succeeded", u64::from(link.terms.reverse));
                    let claim =
                        if call.shape.one_way { ImpliedExecutions::AtMostOnce } else { ImpliedExecutions::Once };
                    self.claim(token, &call, claim);
                }
                self.links[call.link].has_succeeded = true;
                if hostile || self.random.once_in(self.habits.keep) {
                    let contents = contents_of(&reply);
                    self.kept.push((reply, contents));
                }
            }
            Err(FailedCall { error, .. }) => {
                self.journal.note(format_args!("end {token}: {error}"));
                let abandoned = matches!(error, CallError::TimedOut { .. } | CallError::Cancelled { .. });
                if abandoned {
                    self.links[call.link].abandoned += 1;
                } else if call.id.is_some() && !self.may_reuse(client, hostile) {
                    self.check_unexposed(client, token, &call);
                }
                if !hostile {
                    self.judge(client, token, &call, error);
                    self.claim(token, &call, claim_of(&error));
                }
            }
        }
    }

    /// A retransmitted call with larger buffers may now use the memory of the failed call.
    fn may_reuse(&self, client: &mut LocalClient<Device>, hostile: bool) -> bool {
        self.reconnects
            || self.calls.values().any(|call| call.shape.replaced())
            || (hostile && client.stats().calls_retransmitted > 0)
    }

    fn check_unexposed(&self, client: &LocalClient<Device>, token: u64, call: &Call) {
        let probe = client.shard().fabric();
        let exposed = call.places.iter().any(|&place| probe.exposes(place));
        assert!(!exposed, "{}: the memory of call {token} is exposed after its end", self.journal.who());
    }

    /// Checks that an error is true.
    fn judge(&mut self, client: &mut LocalClient<Device>, token: u64, call: &Call, error: CallError) {
        let who = self.journal.who();
        let link = &self.links[call.link];
        if call.shape.fails_with(&error, &link.terms) {
            self.journal.count(call.shape.form, 1);
            return;
        }
        let over = link.over || client.close_reason(link.connection).is_some();
        let (what, is_true) = match error {
            CallError::ConnectionLost { .. } => {
                // An unanswered first message is retransmitted in version 1, on a new connection.
                let remade = client.stats().connections_made > self.links.len() as u64;
                let again = client.shard().fabric().ends() > call.ends || remade;
                (if again && !over { "calls lost, connections not" } else { "calls lost" }, over || again)
            }
            CallError::TimedOut { .. } | CallError::NoCredits { .. } => {
                ("deadlines passed", call.deadline.is_some_and(|deadline| deadline <= self.time.now()))
            }
            CallError::Cancelled { .. } => ("calls cancelled", call.cancelled),
            CallError::TooManyCalls { .. } => ("too many calls", call.crowded),
            CallError::Closed => ("calls on closed connections", call.refused || link.closing),
            CallError::NoReverse => ("clients that are not called", link.terms.reverse && !link.has_succeeded),
            CallError::NoMemory { .. }
            | CallError::NoReplyBuffer { .. }
            | CallError::TooLong { knob: Knob::BULK_BUFFERS | Knob::LONG_BUFFERS, .. } => {
                ("calls without memory", client.stats().pool_empty > 0)
            }
            CallError::Transport(ErrorBody::System | ErrorBody::BadXdr) => {
                if let Some(group) = link.group {
                    self.turned_away[group] += 1;
                }
                ("calls turned away", true)
            }
            CallError::Transport(
                ErrorBody::ReadChunks { .. } | ErrorBody::ReplyResource { .. } | ErrorBody::WriteResource { .. },
            ) => ("calls that could not be sent again", client.stats().pool_empty > 0),
            _ => ("", false),
        };
        assert!(is_true, "{who}: call {token}, {}: {error}", call.shape.form);
        self.journal.count(what, 1);
    }

    fn claim(&mut self, token: u64, call: &Call, claim: ImpliedExecutions) {
        if !call.shape.noted {
            return;
        }
        let repeats = self.repeats && !call.shape.runs_once();
        let claim = match claim {
            ImpliedExecutions::Once if repeats => ImpliedExecutions::AtLeastOnce,
            ImpliedExecutions::AtMostOnce if repeats => return,
            claim => claim,
        };
        self.claims.push((token, claim));
    }

    /// Checks each call's number of executions against its result.
    pub(crate) fn check_claims(&mut self) {
        for (token, claim) in self.claims.drain(..) {
            let runs = self.runs.of((self.who, token as u32));
            let holds = match claim {
                ImpliedExecutions::Never => runs == 0,
                ImpliedExecutions::AtMostOnce => runs <= 1,
                ImpliedExecutions::Once => runs == 1,
                ImpliedExecutions::AtLeastOnce => runs >= 1,
            };
            let who = self.journal.who();
            assert!(holds, "{who}: call {token} was carried out {runs} times: {claim:?}");
        }
    }

    /// Calls once on every open connection: none has run out of credits. Makes as many calls at a time as memory
    /// allows, and returns true once every link has been called.
    pub(crate) fn ping(&mut self, client: &mut LocalClient<Device>) -> bool {
        let first = self.pinged;
        for link in first..self.links.len() {
            let Link { connection, hostile, room, .. } = self.links[link];
            if client.is_established(connection) && !hostile && room > 0 && !self.call(client, link, Shape::ping()) {
                assert!(link > first, "{}: no memory though nothing is under way", self.journal.who());
                return false;
            }
            self.pinged = link + 1;
        }
        true
    }

    /// Checks that the closing shard has completed every call.
    pub(crate) fn check_all_ended(&mut self, ended: Vec<CompletedCall>) {
        for done in ended {
            let call = self.calls.remove(&done.token);
            assert!(call.is_some(), "{}: call {} ends again", self.journal.who(), done.token);
        }
        let left: Vec<_> = self.calls.keys().collect();
        assert!(left.is_empty(), "{}: calls {left:?} never end", self.journal.who());
    }

    /// Describes what the checker is waiting for.
    pub(crate) fn waits_for(&self) -> String {
        let calls =
            self.calls.iter().map(|(token, call)| format!("call {token} ({}) on link {}", call.shape.form, call.link));
        let links = self.links.iter().enumerate().filter(|(_, link)| !link.over);
        let links = links.map(|(index, link)| format!("link {index}: {} given up", link.abandoned));
        let all: Vec<_> = calls.chain(links).collect();
        all.join(", ")
    }
}

/// Number of executions that a failure implies.
fn claim_of(error: &CallError) -> ImpliedExecutions {
    match (error.progress(), error) {
        (CallProgress::NotSent, _) | (_, CallError::Refused(_)) => ImpliedExecutions::Never,
        _ => ImpliedExecutions::AtMostOnce,
    }
}

/// A hash of all contents of a reply.
fn contents_of(reply: &Reply) -> u64 {
    let mut hasher = DefaultHasher::new();
    reply.results().hash(&mut hasher);
    (0..).map_while(|n| reply.chunk(n)).for_each(|chunk| chunk.hash(&mut hasher));
    hasher.finish()
}
