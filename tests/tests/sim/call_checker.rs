//! Forward or reverse calls of one shard, with checks of every completion.
//!
//! A call completes exactly once, with the right reply or with an error whose condition holds. After completion no peer
//! can reach its memory. The number of its executions matches its result.

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
use crate::forms::{CallCase, Draw, Terms};
use crate::journal::Journal;
use crate::plan::{Plan, Workload};
use crate::probe::BufferId;
use crate::service::Executions;

/// The calls of one shard.
pub(crate) struct CallChecker {
    pub(crate) journal: Journal,
    pub(crate) random: Random,
    pub(crate) links: Vec<Link>,
    time: SimulatedTime,
    plan: Rc<Plan>,
    workload: Workload,
    /// Number of this caller in the [`Name`](crate::service::Name) of its calls.
    participant: u32,
    /// Whether calls may be retransmitted on a new connection.
    reconnects: bool,
    /// Whether retransmitted calls may execute twice.
    may_repeat: bool,
    /// Outstanding calls by token.
    calls: BTreeMap<u64, Call>,
    /// Replies that are kept, with a hash of their contents.
    kept: Vec<(Reply, u64)>,
    next_token: u64,
    executions: Executions,
    /// By token of a completed call: the executions that its result implies.
    implied: Vec<(u64, ImpliedExecutions)>,
    /// Number of one-way calls sent. An error for any of them may arrive after the call has completed.
    pub(crate) one_way_sent: u64,
    /// Number of links that `ping` has processed.
    pinged: usize,
    /// By group: calls that the server rejected because it had no memory or was draining.
    pub(crate) rejected_calls: Vec<u64>,
}

/// A connection from the caller's point of view.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) connection: Connection,
    /// The group at the server end; `None` for the hostile server.
    pub(crate) group: Option<usize>,
    pub(crate) terms: Terms,
    /// Whether the peer may be hostile.
    pub(crate) hostile: bool,
    /// Whether this side closes the connection.
    pub(crate) closing: bool,
    pub(crate) has_ended: bool,
    /// Whether the connection has ever been established.
    pub(crate) was_open: bool,
    /// Whether a call on the connection has succeeded. Always true on a client's links.
    pub(crate) has_succeeded: bool,
    /// Number of calls that may always be outstanding.
    pub(crate) guaranteed_calls: usize,
    /// Number of calls that have not completed.
    pub(crate) outstanding: usize,
    /// Calls cancelled or timed out after they were sent, whose replies have not arrived.
    pub(crate) abandoned: usize,
}

struct Call {
    link: usize,
    case: CallCase,
    id: Option<CallId>,
    deadline: Option<u64>,
    cancelled: bool,
    /// Whether the limit of calls may have been reached when the call was started.
    may_exceed_limit: bool,
    /// Whether the connection was not established when the call was started.
    was_unestablished: bool,
    /// Number of this side's connections that had ended when the call was started.
    ended_before: u64,
    /// The call's chunk memory.
    buffers: Vec<BufferId>,
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
    pub(crate) executions: &'a Executions,
    pub(crate) participant: u32,
    pub(crate) workload: Workload,
}

impl CallChecker {
    pub(crate) fn new(context: CheckerContext<'_>, connect: &ConnectConfig) -> Self {
        let CheckerContext { plan, journal, time, executions, participant, workload } = context;
        Self {
            journal,
            random: Random::new(plan.seed ^ (u64::from(participant) + 1) << 40),
            links: Vec::new(),
            time: time.clone(),
            plan: Rc::clone(plan),
            workload,
            participant,
            reconnects: connect.reconnect_attempts > 0,
            may_repeat: connect.retransmit,
            calls: BTreeMap::new(),
            kept: Vec::new(),
            next_token: 0,
            executions: executions.clone(),
            implied: Vec::new(),
            pinged: 0,
            one_way_sent: 0,
            rejected_calls: vec![0; plan.groups.len()],
        }
    }

    /// Makes and cancels some calls, and drops some replies.
    pub(crate) fn work(&mut self, client: &mut LocalClient<Device>) {
        for _ in 0..self.random.below(4) {
            if self.remaining() > 0 {
                self.start(client);
            }
        }
        if self.workload.cancel != 0 && self.random.once_in(3 * self.workload.cancel) {
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

    /// Number of calls not yet made.
    pub(crate) fn remaining(&self) -> usize {
        self.workload.calls.saturating_sub(self.next_token as usize)
    }

    /// Number of calls that have not completed.
    pub(crate) fn outstanding(&self) -> usize {
        self.calls.len()
    }

    /// Makes a random call on a random link.
    fn start(&mut self, client: &mut LocalClient<Device>) {
        let link = self.random.below(self.links.len().max(1));
        let Some(&Link { was_open, has_ended, outstanding, .. }) = self.links.get(link) else { return };
        if outstanding >= self.workload.depth {
            return;
        }
        // Calls on a closed link must fail, too, so one of 20 is still made.
        if (!was_open || has_ended) && !self.random.once_in(20) {
            return;
        }
        let plan = Rc::clone(&self.plan);
        let name = (self.participant, self.next_token as u32);
        let terms = &self.links[link].terms;
        let case = CallCase::draw(&mut Draw { random: &mut self.random, plan: &plan, terms, name });
        self.call(client, link, case);
    }

    /// Makes a call. Returns false if the pool is empty or the connection is closed.
    fn call(&mut self, client: &mut LocalClient<Device>, link: usize, case: CallCase) -> bool {
        let connection = self.links[link].connection;
        let (mut call, buffers) = match case.prepare(client, connection) {
            Ok(prepared) => prepared,
            Err(CallError::NoMemory { .. }) => {
                self.journal.count("client pools empty", 1);
                return false;
            }
            Err(CallError::Closed) => {
                assert!(!client.is_established(connection), "CallError::Closed requires a closed connection");
                return false;
            }
            Err(other) => panic!("{}: {other}", self.journal.participant()),
        };
        let token = self.next_token;
        self.next_token += 1;
        let deadline_ratio = self.workload.deadline;
        let mut deadline = None;
        // A hostile peer may never reply, so each of its calls needs a time-out.
        if self.links[link].hostile || self.random.once_in(deadline_ratio) {
            let time = 1 + self.random.below(200 * self.plan.tick as usize) as u64;
            call = call.timeout(Duration::from_nanos(time));
            deadline = Some(self.time.now() + time);
        }
        self.journal.note(format_args!("call {token} on {link}: {}", case.form));
        let entry = &mut self.links[link];
        entry.outstanding += 1;
        let may_exceed_limit = entry.outstanding + entry.abandoned > entry.guaranteed_calls;
        let was_unestablished = !client.is_established(connection);
        let ended_before = client.shard().fabric().ends();
        let id = client.start(connection, call, token);
        let cancelled = false;
        let call =
            Call { link, case, id, deadline, cancelled, may_exceed_limit, was_unestablished, ended_before, buffers };
        self.calls.insert(token, call);
        self.journal.count("calls", 1);
        true
    }

    /// Cancels a random outstanding call.
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

    /// Drops up to `max` kept replies. Checks that their contents have not changed.
    pub(crate) fn release(&mut self, max: usize) {
        let count = max.min(self.kept.len());
        for (reply, contents) in self.kept.drain(..count) {
            assert_eq!(hash_contents(&reply), contents, "{}: hash of a kept reply", self.journal.participant());
        }
    }

    /// Checks a completed call.
    pub(crate) fn check_completed(&mut self, client: &mut LocalClient<Device>, done: CompletedCall) {
        let journal = self.journal.clone();
        let participant = journal.participant();
        let CompletedCall { token, mut result } = done;
        if let Err(failed) = &mut result {
            // If a peer could still read the returned buffers, the overwritten data would fail its checks.
            failed.returned.take_sent().for_each(|mut buf| buf.fill(!0));
            failed.returned.take_chunks().for_each(|mut buf| buf.fill(!0));
        }
        let Some(call) = self.calls.remove(&token) else { panic!("{participant}: call {token} completes twice") };
        self.links[call.link].outstanding -= 1;
        let link = &self.links[call.link];
        let (form, hostile) = (call.case.form, link.hostile);
        match result {
            Ok(mut reply) => {
                self.journal.note(format_args!("end {token}: {} bytes", reply.results().len()));
                self.check_unexposed(client, token, &call);
                self.journal.count("calls that succeeded", 1);
                self.one_way_sent += u64::from(call.case.one_way);
                if !hostile {
                    if let Err(mismatch) = call.case.check(&mut reply, &link.terms) {
                        panic!("{participant}: call {token}, {form}: {mismatch}");
                    }
                    self.journal.count(form, 1);
                    self.journal.count("reverse calls that succeeded", u64::from(link.terms.reverse));
                    let implied =
                        if call.case.one_way { ImpliedExecutions::AtMostOnce } else { ImpliedExecutions::Once };
                    self.record_executions(token, &call, implied);
                }
                self.links[call.link].has_succeeded = true;
                if hostile || self.random.once_in(self.workload.keep) {
                    let contents = hash_contents(&reply);
                    self.kept.push((reply, contents));
                }
            }
            Err(FailedCall { error, .. }) => {
                self.journal.note(format_args!("end {token}: {error}"));
                let abandoned = matches!(error, CallError::TimedOut { .. } | CallError::Cancelled { .. });
                if abandoned {
                    self.links[call.link].abandoned += 1;
                } else if call.id.is_some() && !self.may_reuse_memory(client, hostile) {
                    self.check_unexposed(client, token, &call);
                }
                if !hostile {
                    self.check_error(client, token, &call, error);
                    self.record_executions(token, &call, implied_executions(&error));
                }
            }
        }
    }

    /// Whether another call may have exposed the memory of a failed call again, because a retransmission replaces its
    /// buffers.
    fn may_reuse_memory(&self, client: &mut LocalClient<Device>, hostile: bool) -> bool {
        self.reconnects
            || self.calls.values().any(|call| call.case.may_replace_memory())
            || (hostile && client.stats().calls_retransmitted > 0)
    }

    /// Checks that no peer can reach the memory of a completed call.
    fn check_unexposed(&self, client: &LocalClient<Device>, token: u64, call: &Call) {
        let probe = client.shard().fabric();
        let exposed = call.buffers.iter().any(|&buffer| probe.exposes(buffer));
        assert!(!exposed, "{}: the memory of call {token} is exposed after its completion", self.journal.participant());
    }

    /// Checks that the condition of an error holds.
    fn check_error(&mut self, client: &mut LocalClient<Device>, token: u64, call: &Call, error: CallError) {
        let participant = self.journal.participant();
        let link = &self.links[call.link];
        if call.case.fails_with(&error, &link.terms) {
            self.journal.count(call.case.form, 1);
            return;
        }
        let has_ended = link.has_ended || client.close_reason(link.connection).is_some();
        let (event, holds) = match error {
            CallError::ConnectionLost { .. } => {
                // After an unanswered first message, the client opens a new connection with version 1.
                let reopened = client.stats().connections_made > self.links.len() as u64;
                let replaced = client.shard().fabric().ends() > call.ended_before || reopened;
                let event = if replaced && !has_ended { "calls lost on reopened links" } else { "calls lost" };
                (event, has_ended || replaced)
            }
            CallError::TimedOut { .. } | CallError::NoCredits { .. } => {
                ("calls timed out", call.deadline.is_some_and(|deadline| deadline <= self.time.now()))
            }
            CallError::Cancelled { .. } => ("calls cancelled", call.cancelled),
            CallError::TooManyCalls { .. } => ("calls beyond the limit", call.may_exceed_limit),
            CallError::Closed => ("calls on closed connections", call.was_unestablished || link.closing),
            CallError::NoReverse => {
                ("reverse calls to clients that accept none", link.terms.reverse && !link.has_succeeded)
            }
            CallError::NoMemory { .. }
            | CallError::NoReplyBuffer { .. }
            | CallError::TooLong { knob: Knob::BULK_BUFFERS | Knob::LONG_BUFFERS, .. } => {
                ("calls without memory", client.stats().pool_empty > 0)
            }
            CallError::Transport(ErrorBody::System | ErrorBody::BadXdr) => {
                if let Some(group) = link.group {
                    self.rejected_calls[group] += 1;
                }
                ("calls rejected by the peer's transport", true)
            }
            CallError::Transport(
                ErrorBody::ReadChunks { .. } | ErrorBody::ReplyResource { .. } | ErrorBody::WriteResource { .. },
            ) => ("calls that could not be retransmitted", client.stats().pool_empty > 0),
            _ => ("", false),
        };
        assert!(
            holds,
            "{participant}: call {token}, {}: the condition of this error does not hold: {error}",
            call.case.form
        );
        self.journal.count(event, 1);
    }

    /// Records the number of executions that a call's result implies, for a later check.
    fn record_executions(&mut self, token: u64, call: &Call, implied: ImpliedExecutions) {
        if !call.case.counted {
            return;
        }
        let may_repeat = self.may_repeat && !call.case.runs_once();
        let implied = match implied {
            ImpliedExecutions::Once if may_repeat => ImpliedExecutions::AtLeastOnce,
            ImpliedExecutions::AtMostOnce if may_repeat => return,
            implied => implied,
        };
        self.implied.push((token, implied));
    }

    /// Checks each call's number of executions against its result.
    pub(crate) fn check_executions(&mut self) {
        for (token, implied) in self.implied.drain(..) {
            let executions = self.executions.count((self.participant, token as u32));
            let holds = match implied {
                ImpliedExecutions::Never => executions == 0,
                ImpliedExecutions::AtMostOnce => executions <= 1,
                ImpliedExecutions::Once => executions == 1,
                ImpliedExecutions::AtLeastOnce => executions >= 1,
            };
            let participant = self.journal.participant();
            assert!(holds, "{participant}: call {token} was executed {executions} times, expected {implied:?}");
        }
    }

    /// Calls once on every open connection, to check that it still has a credit.
    ///
    /// Makes as many calls at a time as memory allows, and returns true once every link has been called.
    pub(crate) fn ping(&mut self, client: &mut LocalClient<Device>) -> bool {
        let first = self.pinged;
        for link in first..self.links.len() {
            let Link { connection, hostile, guaranteed_calls, .. } = self.links[link];
            let callable = client.is_established(connection) && !hostile && guaranteed_calls > 0;
            if callable && !self.call(client, link, CallCase::ping()) {
                assert!(
                    link > first,
                    "{}: the pool must have memory for a call while no call is outstanding",
                    self.journal.participant()
                );
                return false;
            }
            self.pinged = link + 1;
        }
        true
    }

    /// Checks that the closing shard has completed every call.
    pub(crate) fn check_all_completed(&mut self, ended: Vec<CompletedCall>) {
        for done in ended {
            let call = self.calls.remove(&done.token);
            assert!(call.is_some(), "{}: call {} completes twice", self.journal.participant(), done.token);
        }
        let incomplete: Vec<_> = self.calls.keys().collect();
        assert!(incomplete.is_empty(), "{}: calls {incomplete:?} never complete", self.journal.participant());
    }

    /// Describes what the checker is waiting for.
    pub(crate) fn waits_for(&self) -> String {
        let calls =
            self.calls.iter().map(|(token, call)| format!("call {token} ({}) on link {}", call.case.form, call.link));
        let links = self.links.iter().enumerate().filter(|(_, link)| !link.has_ended);
        let links = links.map(|(index, link)| format!("link {index}: {} calls abandoned", link.abandoned));
        let all: Vec<_> = calls.chain(links).collect();
        all.join(", ")
    }
}

/// Number of executions that a failure implies.
fn implied_executions(error: &CallError) -> ImpliedExecutions {
    match (error.progress(), error) {
        (CallProgress::NotSent, _) | (_, CallError::Refused(_)) => ImpliedExecutions::Never,
        _ => ImpliedExecutions::AtMostOnce,
    }
}

/// A hash of all contents of a reply.
fn hash_contents(reply: &Reply) -> u64 {
    let mut hasher = DefaultHasher::new();
    reply.results().hash(&mut hasher);
    (0..).map_while(|n| reply.chunk(n)).for_each(|chunk| chunk.hash(&mut hasher));
    hasher.finish()
}
