//! A client shard that makes calls, and holds each to its promise: it ends once, with the right reply or with a cause that
//! is true, and then nobody else can reach its memory.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::rc::Rc;
use std::time::Duration;

use rpcrdma::client::{Connection, LocalClient, PreparedCall};
use rpcrdma::proto::CallId;
use rpcrdma::shard::{Done, SimulatedTime};
use rpcrdma::wire::ErrorBody;
use rpcrdma::{Address, CallError, Reply};
use rpcrdma_tests::{ECHO, Random, shard_leak, small_client};

use crate::forms::{Draw, Expect, Shape};
use crate::host::{NO_BUFFER, receives};
use crate::journal::Journal;
use crate::plan::{self, Plan};
use crate::probe::Place;
use crate::world::{Device, device};

/// Connections that a client makes in place of lost ones.
const RECONNECTS: usize = 6;

/// One client shard.
pub(crate) struct Caller {
    client: LocalClient<Device>,
    journal: Journal,
    time: SimulatedTime,
    random: Random,
    plan: Rc<Plan>,
    index: usize,
    /// Where groups are, and the hostile server.
    addresses: Rc<Addresses>,
    links: Vec<Link>,
    calls: BTreeMap<u64, Call>,
    /// Replies, and what is in them.
    kept: Vec<(Reply, u64)>,
    /// Calls that are prepared and never made: they have all buffers, for so many turns.
    hoard: Vec<PreparedCall>,
    hoarding: usize,
    next_token: u64,
    reconnects: usize,
    /// Calls that were not answered for want of a server's memory, or because it drains, by group.
    pub(crate) turned_away: Vec<u64>,
    /// Connections lost that this side has not broken, by group.
    pub(crate) lost: Vec<u64>,
    /// The same, of those that never were open.
    pub(crate) missed: Vec<u64>,
}

/// Where everybody listens.
#[derive(Debug)]
pub(crate) struct Addresses {
    pub(crate) groups: Vec<Address>,
    pub(crate) hostile: Address,
}

#[derive(Debug)]
struct Link {
    connection: Connection,
    /// The group that it goes to; `None` for the hostile server.
    group: Option<usize>,
    /// This side closes it.
    closing: bool,
    over: bool,
    /// It has been open.
    opened: bool,
    under_way: usize,
    /// Calls that were given up after they were sent, as far as their replies have not come.
    given_up: usize,
}

struct Call {
    link: usize,
    shape: Shape,
    id: Option<CallId>,
    deadline: Option<u64>,
    cancelled: bool,
    /// There may have been too many calls when it was started.
    crowded: bool,
    /// Its link was not open.
    refused: bool,
    places: Vec<Place>,
}

impl Caller {
    /// Opens the shard, and starts to connect.
    pub(crate) fn new(
        plan: &Rc<Plan>,
        index: usize,
        addresses: &Rc<Addresses>,
        journal: &Journal,
        time: &SimulatedTime,
    ) -> Self {
        let journal = journal.of(&format!("client{index}"));
        let plan::Caller { config, software, chaos, links, .. } = &plan.callers[index];
        let hostile = Some(&addresses.hostile);
        let fabric = device(config, software, *chaos, &journal, hostile);
        let mut client = LocalClient::open(fabric, small_client(config.clone())).expect("a client");
        client.simulate(time);
        let mut caller = Self {
            client,
            journal,
            time: time.clone(),
            random: Random::new(plan.seed ^ (index as u64 + 1) << 40),
            plan: Rc::clone(plan),
            index,
            addresses: Rc::clone(addresses),
            links: Vec::new(),
            calls: BTreeMap::new(),
            kept: Vec::new(),
            hoard: Vec::new(),
            hoarding: 0,
            next_token: 0,
            reconnects: 0,
            turned_away: vec![0; plan.groups.len()],
            lost: vec![0; plan.groups.len()],
            missed: vec![0; plan.groups.len()],
        };
        links.iter().for_each(|&group| caller.connect(group));
        caller
    }

    fn me(&self) -> &plan::Caller {
        &self.plan.callers[self.index]
    }

    fn connect(&mut self, group: Option<usize>) {
        let address = group.map_or(&self.addresses.hostile, |group| &self.addresses.groups[group]);
        match self.client.begin_connect(address) {
            Ok(connection) => self.links.push(Link {
                connection,
                group,
                closing: false,
                over: false,
                opened: false,
                under_way: 0,
                given_up: 0,
            }),
            Err(error) => {
                let error = error.to_string();
                let full = error.contains("promised to others");
                assert!(full || group.is_none(), "{}: {error}", self.journal.who());
                self.journal.count("connections not begun", 1);
            }
        }
    }

    /// A turn in which calls are made, given up, and replies let go.
    pub(crate) fn work(&mut self) {
        for _ in 0..self.random.below(4) {
            if self.remaining() > 0 {
                self.start();
            }
        }
        if self.me().cancel != 0 && self.random.once_in(3 * self.me().cancel) {
            self.cancel();
        }
        self.hoard();
        if self.kept.len() > 3 || self.random.once_in(20) {
            self.let_go(1);
        }
        let lost = self.links.iter().filter(|link| link.over && !link.closing).count();
        if lost > self.reconnects && self.reconnects < RECONNECTS && self.random.once_in(10) {
            self.reconnects += 1;
            let over: Vec<_> = self.links.iter().filter(|link| link.over).map(|link| link.group).collect();
            let group = over[self.random.below(over.len())];
            self.connect(group);
        }
        self.turn();
    }

    /// Takes all buffers that are as long as messages, as soon as they are free; or gives them back.
    fn hoard(&mut self) {
        if self.hoarding == 0 {
            self.hoard.clear();
            if self.random.once_in(self.me().hoard) {
                self.hoarding = self.random.below(600);
                self.journal.count("times that a client took all buffers", 1);
            }
            return;
        }
        self.hoarding -= 1;
        while let Ok(call) = self.client.prepare(ECHO, 600) {
            self.hoard.push(call);
        }
        let (promised, receives) = self.client.shard().fabric().promises();
        self.journal.count("turns with few Receives", u64::from(promised > 0 && receives < promised + 64));
    }

    /// From now on it lets go of what it does not need.
    pub(crate) fn calm_down(&mut self) {
        self.hoard.clear();
    }

    /// Calls that are not made yet.
    pub(crate) fn remaining(&self) -> usize {
        // Without a connection none can be.
        let none = self.links.iter().all(|link| link.over) && self.reconnects >= RECONNECTS;
        if none { 0 } else { self.me().calls.saturating_sub(self.next_token as usize) }
    }

    /// Calls that have not ended.
    pub(crate) fn under_way(&self) -> usize {
        self.calls.len()
    }

    fn start(&mut self) {
        let link = self.random.below(self.links.len().max(1));
        let Some(&Link { connection, opened, over, under_way, .. }) = self.links.get(link) else { return };
        if under_way >= self.me().depth {
            return;
        }
        // Now and then on one that is not open.
        if (!opened || over) && !self.random.once_in(20) {
            return;
        }
        let plan = Rc::clone(&self.plan);
        let shape = Shape::draw(&mut Draw { random: &mut self.random, plan: &plan });
        self.call(link, connection, shape);
    }

    fn call(&mut self, link: usize, connection: Connection, shape: Shape) -> bool {
        let (mut call, places) = match shape.prepare(&mut self.client, connection) {
            Ok(prepared) => prepared,
            Err(CallError::NoMemory) => {
                self.journal.count("client pools dry", 1);
                return false;
            }
            Err(CallError::Closed) => {
                assert!(!self.client.is_open(connection), "an open connection says that it is closed");
                return false;
            }
            Err(other) => panic!("{}: {other}", self.journal.who()),
        };
        let token = self.next_token;
        self.next_token += 1;
        let hostile = self.links[link].group.is_none();
        let given = self.me().deadline;
        // Somebody hostile may never answer.
        let deadline = (hostile || self.random.once_in(given)).then(|| {
            let time = 1 + self.random.below(200 * self.plan.tick as usize) as u64;
            call.deadline(Duration::from_nanos(time));
            self.time.now() + time
        });
        self.journal.note(format_args!("call {token} on {link}: {}", shape.form));
        let max_calls = self.me().config.max_calls.next_power_of_two();
        let entry = &mut self.links[link];
        entry.under_way += 1;
        let crowded = entry.under_way + entry.given_up > max_calls;
        let refused = !self.client.is_open(connection);
        let id = self.client.start(connection, call, token);
        let call = Call { link, shape, id, deadline, cancelled: false, crowded, refused, places };
        self.calls.insert(token, call);
        self.journal.count("calls", 1);
        true
    }

    fn cancel(&mut self) {
        if self.calls.is_empty() {
            return;
        }
        let at = self.random.below(self.calls.len());
        let Some((&token, call)) = self.calls.iter_mut().nth(at) else { return };
        if let Some(id) = call.id {
            call.cancelled = true;
            self.journal.note(format_args!("cancel {token}"));
            self.client.cancel(self.links[call.link].connection, id);
        }
    }

    /// Checks replies that were kept, and drops them.
    fn let_go(&mut self, most: usize) {
        let count = most.min(self.kept.len());
        for (reply, contents) in self.kept.drain(..count) {
            assert_eq!(contents_of(&reply), contents, "{}: a reply changes", self.journal.who());
        }
    }

    /// One turn of the shard.
    pub(crate) fn turn(&mut self) {
        let mut ended = Vec::new();
        self.client.poll(|done| ended.push(done));
        for link in &mut self.links {
            link.opened |= self.client.is_open(link.connection);
        }
        for done in ended {
            self.ended(done);
        }
        for index in 0..self.links.len() {
            self.look_after(index);
        }
    }

    /// A connection that is over must have a reason that is true.
    fn look_after(&mut self, index: usize) {
        let link = &mut self.links[index];
        if link.over {
            return;
        }
        let Some(reason) = self.client.closed_because(link.connection) else { return };
        link.over = true;
        self.journal.note(format_args!("link {index} is over: {reason}"));
        assert_eq!(link.under_way, 0, "{}: a connection is over, its calls are not", self.journal.who());
        let Some(group) = link.group else { return };
        let full = reason.contains("no receives left");
        let probe = self.client.shard().fabric();
        let qp = probe.connected(index_of(link.connection, &self.links));
        let broken = qp.is_some_and(|qp| probe.inner().broken().contains(&qp));
        // Its own pool is dry: that costs it the connection, and nobody else anything.
        let dry = reason.contains(NO_BUFFER);
        self.journal.count("connections lost for want of a buffer", u64::from(dry));
        if !(self.links[index].closing || full || broken || dry) {
            let opened = self.links[index].opened;
            *if opened { &mut self.lost[group] } else { &mut self.missed[group] } += 1;
        }
        self.journal.count("connections lost", u64::from(broken));
    }

    fn ended(&mut self, done: Done) {
        let who = self.journal.clone();
        let who = who.who();
        let Done { token, result } = done;
        let Some(call) = self.calls.remove(&token) else { panic!("{who}: call {token} ends again") };
        self.links[call.link].under_way -= 1;
        let link = &self.links[call.link];
        let form = call.shape.form;
        let hostile = link.group.is_none();
        match result {
            Ok(mut reply) => {
                self.journal.note(format_args!("end {token}: {} bytes", reply.results().len()));
                self.check_unexposed(token, &call);
                self.journal.count("calls that succeeded", 1);
                if !hostile {
                    if let Err(wrong) = call.shape.check(&mut reply) {
                        panic!("{who}: call {token}, {form}: {wrong}");
                    }
                    self.journal.count(form, 1);
                }
                if hostile || self.random.once_in(self.me().keep) {
                    let contents = contents_of(&reply);
                    self.kept.push((reply, contents));
                }
            }
            Err(error) => {
                self.journal.note(format_args!("end {token}: {error}"));
                let given_up =
                    matches!(error, CallError::DeadlinePassed { .. } | CallError::Cancelled { .. });
                if given_up {
                    self.links[call.link].given_up += 1;
                } else {
                    self.check_unexposed(token, &call);
                }
                if !hostile {
                    self.judge(token, &call, error);
                }
            }
        }
    }

    fn check_unexposed(&self, token: u64, call: &Call) {
        let probe = self.client.shard().fabric();
        let exposed = call.places.iter().any(|&place| probe.exposes(place));
        assert!(!exposed, "{}: the memory of call {token} is exposed after its end", self.journal.who());
    }

    /// Whether an error is true.
    fn judge(&mut self, token: u64, call: &Call, error: CallError) {
        let who = self.journal.who();
        if let Expect::Error(expected) = &call.shape.expect
            && expected(&error)
        {
            self.journal.count(call.shape.form, 1);
            return;
        }
        let link = &self.links[call.link];
        let (what, is_true) = match error {
            CallError::ConnectionLost { .. } => {
                ("calls lost", self.client.closed_because(link.connection).is_some())
            }
            CallError::DeadlinePassed { .. } => {
                ("deadlines passed", call.deadline.is_some_and(|deadline| deadline <= self.time.now()))
            }
            CallError::Cancelled { .. } => ("calls cancelled", call.cancelled),
            CallError::TooMany => ("too many calls", call.crowded),
            CallError::Closed => ("calls on closed connections", call.refused || link.closing),
            CallError::Transport(ErrorBody::System | ErrorBody::BadXdr) => {
                if let Some(group) = link.group {
                    self.turned_away[group] += 1;
                }
                ("calls turned away", true)
            }
            _ => ("", false),
        };
        assert!(is_true, "{who}: call {token}, {}: {error}", call.shape.form);
        self.journal.count(what, 1);
    }

    /// Nothing of it is kept, or exposed: neither by the engine's account nor by the onlooker's.
    pub(crate) fn is_quiet(&mut self) -> bool {
        self.let_go(usize::MAX);
        self.client.shard().fabric().windows() == 0 && self.client.stats().exposed_buffers == 0
    }

    /// Calls once more on every open connection: none has run out of credits.
    pub(crate) fn ping(&mut self) {
        for link in 0..self.links.len() {
            let connection = self.links[link].connection;
            if self.client.is_open(connection) && self.links[link].group.is_some() {
                let ping = self.call(link, connection, Shape::ping());
                assert!(ping, "{}: no memory though nothing is under way", self.journal.who());
            }
        }
    }

    /// Closes every connection in order.
    pub(crate) fn close(&mut self) {
        for link in &mut self.links {
            link.closing = true;
            self.client.begin_close(link.connection);
        }
    }

    /// No connection is left.
    pub(crate) fn is_closed(&self) -> bool {
        self.links.iter().all(|link| link.over)
    }

    /// Ends at once, in the middle of whatever it does: each call ends all the same.
    pub(crate) fn die(mut self) {
        self.journal.note(format_args!("dies"));
        self.journal.count("clients that died", 1);
        for done in self.client.close(Duration::ZERO) {
            let call = self.calls.remove(&done.token);
            assert!(call.is_some(), "{}: call {} ends again", self.journal.who(), done.token);
        }
        let left: Vec<_> = self.calls.keys().collect();
        assert!(left.is_empty(), "{}: calls {left:?} never end", self.journal.who());
    }

    /// Everything is where it was.
    pub(crate) fn check_balance(&mut self, calm: bool) {
        self.let_go(usize::MAX);
        let who = self.journal.who();
        let stats = self.client.stats();
        let hostile = self.links.iter().any(|link| link.group.is_none());
        assert_eq!(shard_leak(&stats), None, "{who}");
        assert_eq!(stats.fabric.receiver_not_ready, 0, "{who}: a message met no Receive");
        assert_eq!(self.client.shard().fabric().windows(), 0, "{who}: windows are still bound");
        if calm && !hostile {
            assert_eq!(stats.peer_faults, 0, "{who}: a peer is said to have broken a rule");
            assert_eq!(stats.fabric.access_refused + stats.fabric.peer_violations, 0, "{who}");
        }
        let messages = stats.messages;
        if !hostile {
            let odd = messages.rejected_short
                + messages.rejected_dropped
                + messages.rejected_unknown_xid
                + messages.rejected_unexpected;
            assert_eq!(odd, 0, "{who}: {messages:?}");
        }
        self.journal.count("late replies", messages.rejected_late);
        self.journal.count("pure grants", messages.grants_pure);
        let chaos = self.client.shard().fabric().inner().chaos_stats();
        self.journal.chaos(&chaos);
    }

    /// What it waits for, in words.
    pub(crate) fn waits_for(&mut self) -> String {
        let receives = receives(&self.client.stats());
        let calls = self
            .calls
            .iter()
            .map(|(token, call)| format!("call {token} ({}) on link {}", call.shape.form, call.link));
        let links = self.links.iter().enumerate().filter(|(_, link)| !link.over);
        let links = links.map(|(index, link)| format!("link {index}: {} given up", link.given_up));
        let windows = self.client.shard().fabric().windows();
        let all: Vec<_> = calls.chain(links).chain([format!("{windows} windows"), receives]).collect();
        format!("{}: {}", self.journal.who(), all.join(", "))
    }
}

/// A hash of all that a reply brought.
fn contents_of(reply: &Reply) -> u64 {
    let mut hasher = DefaultHasher::new();
    reply.results().hash(&mut hasher);
    (0..).map_while(|n| reply.chunk(n)).for_each(|chunk| chunk.hash(&mut hasher));
    hasher.finish()
}

/// Connections are numbered as the device numbers its queue pairs.
fn index_of(connection: Connection, links: &[Link]) -> usize {
    links.iter().position(|link| link.connection == connection).unwrap_or(usize::MAX)
}
