//! Forms of calls: each function draws a call and its expected reply.
//!
//! A new form needs a function and a row in [`FORMS`].

use rpcrdma::client::{ClientCall, Connection, LocalClient};
use rpcrdma::proto::Defect;
use rpcrdma::wire::properties::ReverseSupport;
use rpcrdma::wire::{ErrorBody, Revision};
use rpcrdma::{CallError, Config, CreditMode, Refusal, Reply};
use rpcrdma_tests::*;

use crate::device::Device;
use crate::plan::{Caller, PATIENT, Plan, pick};
use crate::probe::BufferId;
use crate::service::{FLAT, GIVE, GROW, MIX, NOTE, Name, ONCE, PANICS, TELL, filler};

/// A call and its expected reply.
#[derive(Debug)]
pub(crate) struct Shape {
    pub(crate) form: &'static str,
    procedure: u32,
    args: Vec<u8>,
    /// Read chunks: position in the arguments, seed of the pattern, length.
    sends: Vec<(usize, u32, usize)>,
    /// Lengths of the Write chunks.
    rooms: Vec<usize>,
    /// Announced length of its results, if any.
    announced: Option<usize>,
    pub(crate) one_way: bool,
    /// Inline results; for each Write chunk the seed of the pattern and the length.
    results: Vec<u8>,
    chunks: Vec<(u32, usize)>,
    /// Whether it succeeds in version 1, and in version 2.
    succeeds: [Success; 2],
    /// Accepts the errors that it may fail with.
    error: fn(&CallError) -> bool,
    /// Its executions are counted.
    pub(crate) noted: bool,
}

/// Whether a call succeeds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Success {
    Yes,
    No,
    /// Depends on state not visible here.
    Either,
}

/// Known facts about a connection.
#[derive(Clone, Debug)]
pub(crate) struct Terms {
    /// Calls go from the server to the client.
    pub(crate) reverse: bool,
    /// It may use version 1, and version 2.
    pub(crate) versions: [bool; 2],
    /// Smallest message size of both ends; `most` is larger if the size is unknown or changes.
    pub(crate) inline_threshold: usize,
    pub(crate) most: usize,
}

impl Terms {
    /// For a client's connection to a group, or to the hostile server.
    pub(crate) fn forward(plan: &Plan, caller: &Caller, group: Option<usize>) -> Self {
        let client = &caller.config;
        let Some(group) = group.map(|group| &plan.groups[group].config) else {
            let (inline_threshold, most) = sizes(plan, &[client]);
            return Self { reverse: false, versions: [true; 2], inline_threshold, most };
        };
        let one = [client, group].iter().any(|config| config.wire.credit_mode == CreditMode::V1);
        // A connection lost during negotiation is reopened in version 1.
        let late = caller.connect.negotiation < PATIENT;
        let versions = [one || late || !plan.calm(), !one];
        let (inline_threshold, most) = sizes(plan, &[client, group]);
        Self {
            reverse: false,
            versions,
            inline_threshold,
            most: if plan.change == 0 { inline_threshold } else { most },
        }
    }

    /// For a server's connections to any client.
    pub(crate) fn back(plan: &Plan, server: &Config) -> Self {
        let clients = || plan.callers.iter().map(|caller| &caller.config);
        let one = |config: &Config| config.wire.credit_mode == CreditMode::V1;
        let versions = [
            one(server)
                || clients().any(one)
                || plan.callers.iter().any(|caller| caller.connect.negotiation < PATIENT)
                || !plan.calm(),
            !one(server) && !clients().all(one),
        ];
        // The older draft has no property for the send size.
        let least = if plan.revision == Revision::Cel09 { 4096 } else { server.wire.receive_size };
        let inline_threshold =
            clients().map(|config| config.wire.receive_size).fold(least.min(server.wire.receive_size), usize::min);
        let (changed, most) = sizes(plan, &[server]);
        Self { reverse: true, versions, inline_threshold: inline_threshold.min(changed), most }
    }
}

/// Smallest and largest message size between these ends, in bytes.
fn sizes(plan: &Plan, ends: &[&Config]) -> (usize, usize) {
    let least = ends.iter().map(|config| config.wire.receive_size).fold(usize::MAX, usize::min);
    let most =
        ends.iter().map(|config| config.wire.receive_size.max(config.debug.max_receive_size)).fold(0, usize::max);
    // A peer may ask an end to send no messages longer than 1024 bytes.
    if plan.change == 0 { (least, most) } else { (least.min(1024), most) }
}

/// Input of a draw.
pub(crate) struct Draw<'a> {
    pub(crate) random: &'a mut Random,
    pub(crate) plan: &'a Plan,
    pub(crate) terms: &'a Terms,
    pub(crate) name: Name,
}

/// A form: its name, its weight, and the function that draws a call.
type Form = (&'static str, usize, fn(&mut Draw<'_>) -> Shape);

pub(crate) const FORMS: &[Form] = &[
    ("null", 4, null),
    ("note", 30, note),
    ("long note", 16, long_note),
    ("a note that is taken once", 10, once),
    ("read chunks", 12, read_chunks),
    ("write chunks", 12, write_chunks),
    ("both chunks", 10, both_chunks),
    ("a bit of everything", 16, mix),
    ("results unannounced", 8, give),
    ("no reply", 6, tell),
    ("items that are not to be reduced", 5, flat),
    ("results that need more room", 6, grow),
    ("results that are not to be reduced", 4, unreduced),
    ("refused", 3, refused),
    ("no such procedure", 2, no_such_procedure),
    ("a handler that panics", 2, panics),
];

impl Shape {
    /// Draws a call of any form.
    pub(crate) fn draw(draw: &mut Draw<'_>) -> Self {
        let all: usize = FORMS.iter().map(|&(_, weight, _)| weight).sum();
        let mut at = draw.random.below(all);
        for &(form, weight, make) in FORMS {
            if at < weight {
                return Self { form, ..make(draw) };
            }
            at -= weight;
        }
        unreachable!("below the sum")
    }

    /// A short call that every server answers.
    pub(crate) fn ping() -> Self {
        plain(ECHO, b"ping".to_vec(), b"ping".to_vec())
    }

    /// Prepares the call. Returns it with the memory that it exposes.
    ///
    /// # Errors
    /// The pool is empty.
    pub(crate) fn prepare(
        &self,
        client: &mut LocalClient<Device>,
        connection: Connection,
    ) -> Result<(ClientCall, Vec<BufferId>), CallError> {
        let mut call = client.prepare(self.procedure, self.args.len())?;
        call.args_mut().copy_from_slice(&self.args);
        if let Some(bytes) = self.announced {
            call = call.expect_reply(bytes);
        }
        if self.one_way {
            call = call.one_way();
        }
        let mut places = Vec::new();
        for &(at, seed, len) in &self.sends {
            let mut buf = client.alloc(connection, len)?;
            pattern(seed, &mut buf);
            places.push((buf.arena(), buf.base_offset()));
            call = call.read_chunk(at, buf);
        }
        for &len in &self.rooms {
            let mut buf = client.alloc(connection, len)?;
            buf.fill(0xEE);
            places.push((buf.arena(), buf.base_offset()));
            call = call.write_chunk_into(buf);
        }
        if self.replaced() {
            // Other calls may own that memory before this one completes.
            places.clear();
        }
        Ok((call, places))
    }

    /// Whether it may succeed, and whether it may fail, on its own on such a connection.
    pub(crate) fn may(&self, terms: &Terms) -> (bool, bool) {
        let known = self.succeeds.iter().zip(terms.versions).filter(|(_, possible)| *possible);
        let has = |what: Success| known.clone().any(|(&known, _)| known == what || known == Success::Either);
        (has(Success::Yes), has(Success::No))
    }

    /// Whether it may fail with this error on its own.
    pub(crate) fn fails_with(&self, error: &CallError, terms: &Terms) -> bool {
        self.may(terms).1 && (self.error)(error)
    }

    /// It must not execute twice, even if retransmitted.
    pub(crate) fn runs_once(&self) -> bool {
        self.procedure == ONCE
    }

    /// It may be retransmitted with other memory.
    pub(crate) fn replaced(&self) -> bool {
        matches!(self.procedure, FLAT | GROW | GIVE)
    }

    /// Checks a reply.
    ///
    /// # Errors
    /// The mismatch.
    pub(crate) fn check(&self, reply: &mut Reply, terms: &Terms) -> Result<(), String> {
        if !self.may(terms).0 {
            return Err("a reply to a call that must fail".into());
        }
        if reply.results() != self.results {
            return Err(format!("{} bytes of wrong results", reply.results().len()));
        }
        for (n, &(seed, len)) in self.chunks.iter().enumerate() {
            let Some(got) = reply.chunk(n) else { return Err(format!("chunk {n} is missing")) };
            if got.len() != len || !patterned(seed, got) {
                return Err(format!("chunk {n}: {} bytes, {len} expected; or others", got.len()));
            }
        }
        let sent: Vec<_> = reply.take_sent().collect();
        // A call retransmitted as one long message does not return its Read chunks.
        if sent.len() != self.sends.len() && self.procedure != FLAT {
            return Err(format!("{} of {} Read chunks were returned", sent.len(), self.sends.len()));
        }
        for (n, (buf, &(_, seed, len))) in sent.iter().zip(&self.sends).enumerate() {
            if buf.len() != len || !patterned(seed, buf) {
                return Err(format!("Read chunk {n} changed"));
            }
        }
        Ok(())
    }
}

fn plain(procedure: u32, args: Vec<u8>, results: Vec<u8>) -> Shape {
    Shape {
        form: "",
        procedure,
        args,
        sends: Vec::new(),
        rooms: Vec::new(),
        announced: None,
        one_way: false,
        results,
        chunks: Vec::new(),
        succeeds: [Success::Yes; 2],
        error: no_form,
        noted: false,
    }
}

fn failing(procedure: u32, args: Vec<u8>, error: fn(&CallError) -> bool) -> Shape {
    Shape { succeeds: [Success::No; 2], error, ..plain(procedure, args, Vec::new()) }
}

/// No form of the call is valid in this direction.
fn no_form(error: &CallError) -> bool {
    match error {
        CallError::Invalid(call) => matches!(call.defect(), Defect::NoChunks | Defect::NotOneWay),
        error => matches!(error, CallError::TooLong { .. }),
    }
}

/// The peer's transport refuses the call whenever it is sent, or the call cannot be sent.
fn refused_by_transport(error: &CallError) -> bool {
    use ErrorBody::{BadXdr, ReadChunks, ReplyResource, WriteResource};
    let known = |e: &ErrorBody| matches!(e, BadXdr | ReadChunks { .. } | ReplyResource { .. } | WriteResource { .. });
    no_form(error) || matches!(error, CallError::Transport(body) if known(body))
}

fn words(values: impl IntoIterator<Item = usize>) -> Vec<u8> {
    values.into_iter().flat_map(|value| (value as u32).to_be_bytes()).collect()
}

fn patterned_bytes(seed: u32, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    pattern(seed, &mut bytes);
    bytes
}

/// Bytes of an RPC call header, and of a reply header.
const CALL: usize = 40;
const REPLY_HEADER: usize = 24;
/// Transport header bytes of a message without chunks: version 1, and the most of version 2.
const HEADERS: [usize; 2] = [28, 40];

impl Draw<'_> {
    fn seed(&mut self) -> u32 {
        self.random.draw() as u32 >> 8
    }

    fn name(&self) -> [usize; 2] {
        [self.name.0 as usize, self.name.1 as usize]
    }

    /// Lengths of one to four chunks: short, odd, or the maximum.
    fn lens(&mut self) -> Vec<usize> {
        let longest = self.plan.longest_chunk;
        (0..pick(self.random, &[1, 1, 2, 3, 4]))
            .map(|_| match self.random.below(4) {
                0 => 1 + self.random.below(9),
                1 => longest - self.random.below(4),
                _ => 1 + self.random.below(longest),
            })
            .collect()
    }

    /// Length of a message: short, about the inline threshold, or several messages long.
    fn length(&mut self) -> usize {
        let inline_threshold = pick(self.random, &[self.terms.inline_threshold, self.terms.most]);
        let longest = self.plan.longest_message;
        let length = match self.random.below(8) {
            0 => inline_threshold - 120 + self.random.below(60),
            1 => self.random.below(inline_threshold),
            2 => inline_threshold + self.random.below(longest.saturating_sub(inline_threshold).max(1)),
            3 => longest - self.random.below(100),
            _ => self.random.below(200),
        };
        length.min(longest)
    }

    /// Consecutive Read chunks after `args` bytes of arguments.
    fn sends(&mut self, seed: u32, lens: &[usize], args: usize) -> Vec<(usize, u32, usize)> {
        let mut at = args;
        let place = |(n, &len): (usize, &usize)| {
            let chunk = (at, seed + n as u32, len);
            at += len.next_multiple_of(4);
            chunk
        };
        lens.iter().enumerate().map(place).collect()
    }

    fn continues(&self) -> bool {
        self.plan.revision == Revision::Ietf00
    }

    /// Whether call and reply fit without chunks, in version 1 and in version 2.
    fn without_chunks(&self, call: usize, reply: usize) -> [Success; 2] {
        let longest = (CALL + call).max(REPLY_HEADER + reply);
        let fits = |least: usize, most: usize| match longest {
            _ if longest <= least => Success::Yes,
            _ if longest <= most => Success::Either,
            _ => Success::No,
        };
        let Terms { inline_threshold, most, .. } = *self.terms;
        let said = |bytes: usize| (bytes & !1023).max(1024) - HEADERS[0];
        // A header with windowed credits is 4 bytes longer.
        let two =
            if self.continues() { Success::Yes } else { fits(inline_threshold - HEADERS[1], most - HEADERS[1] + 4) };
        [fits(said(inline_threshold), said(most)), two]
    }

    /// Whether any server answers such a call; `chunks`: it has chunks.
    fn carried(&self, call: usize, reply: usize, chunks: bool) -> [Success; 2] {
        if !self.terms.reverse {
            return [Success::Yes; 2];
        }
        let [one, two] = match chunks {
            true => [Success::No; 2],
            false => self.without_chunks(call, reply),
        };
        [one, if self.plan.reverse == ReverseSupport::General { Success::Yes } else { two }]
    }
}

/// Combines two conditions; both must hold.
fn both(a: [Success; 2], b: [Success; 2]) -> [Success; 2] {
    let one = |a: Success, b: Success| match (a, b) {
        (Success::No, _) | (_, Success::No) => Success::No,
        (Success::Yes, Success::Yes) => Success::Yes,
        _ => Success::Either,
    };
    [one(a[0], b[0]), one(a[1], b[1])]
}

fn null(_: &mut Draw<'_>) -> Shape {
    plain(0, Vec::new(), Vec::new())
}

fn noted(draw: &Draw<'_>, len: usize) -> Shape {
    let mut args = words(draw.name());
    args.extend(patterned_bytes(draw.name.1, len.saturating_sub(8)));
    let succeeds = draw.carried(args.len(), args.len(), false);
    let announced = Some(args.len());
    Shape { noted: true, announced, succeeds, ..plain(NOTE, args.clone(), args) }
}

fn note(draw: &mut Draw<'_>) -> Shape {
    let len = match draw.random.below(5) {
        0 => {
            pick(draw.random, &[draw.terms.inline_threshold, draw.terms.most])
                - HEADERS[1]
                - CALL
                - draw.random.below(9)
        }
        _ => draw.random.below(200),
    };
    let len = len.min(draw.plan.longest_message);
    noted(draw, len)
}

fn long_note(draw: &mut Draw<'_>) -> Shape {
    let len = draw.length();
    noted(draw, len)
}

fn once(draw: &mut Draw<'_>) -> Shape {
    let len = draw.length();
    Shape { procedure: ONCE, ..noted(draw, len) }
}

fn read_chunks(draw: &mut Draw<'_>) -> Shape {
    let (seed, lens) = (draw.seed(), draw.lens());
    let sends = draw.sends(seed, &lens, 4);
    let succeeds = draw.carried(4, 16, true);
    Shape { sends, succeeds, ..plain(STORE, words([seed as usize]), words(lens)) }
}

fn write_chunks(draw: &mut Draw<'_>) -> Shape {
    let (seed, rooms) = (draw.seed(), draw.lens());
    let wanted: Vec<usize> = rooms
        .iter()
        .map(|&room| match draw.random.below(5) {
            0 => 0,
            1 => room + draw.random.below(50),
            2 => room,
            _ => draw.random.below(room),
        })
        .collect();
    let args = words([seed as usize].into_iter().chain(wanted.iter().copied()));
    let lens = wanted.iter().zip(&rooms).map(|(&wanted, &room)| wanted.min(room));
    let chunks = lens.enumerate().map(|(n, len)| (seed + n as u32, len)).collect();
    let (results, succeeds) = (words(rooms.iter().copied()), draw.carried(20, 16, true));
    Shape { rooms, chunks, succeeds, ..plain(LOAD, args, results) }
}

fn both_chunks(draw: &mut Draw<'_>) -> Shape {
    let (seed, lens) = (draw.seed(), draw.lens());
    let sends = draw.sends(seed, &lens, 4);
    let rooms = lens.iter().map(|&len| len + draw.random.below(2) * draw.random.below(9)).collect::<Vec<_>>();
    let rooms = rooms.into_iter().map(|room| room.min(draw.plan.longest_chunk)).collect();
    let chunks = lens.iter().enumerate().map(|(n, &len)| (seed + n as u32, len)).collect();
    let succeeds = draw.carried(4, 0, true);
    Shape { sends, rooms, chunks, succeeds, ..plain(MIRROR, words([seed as usize]), Vec::new()) }
}

/// A list of lengths, as procedures read it.
fn list(lens: &[usize]) -> impl Iterator<Item = usize> {
    lens.iter().map(|len| len + 1).chain([0])
}

fn mix(draw: &mut Draw<'_>) -> Shape {
    let (seed, inline_len) = (draw.seed(), draw.length());
    let lens = if draw.random.once_in(3) { Vec::new() } else { draw.lens() };
    let wanted = if draw.random.once_in(3) { Vec::new() } else { draw.lens() };
    let rooms: Vec<usize> = wanted.iter().map(|&len| len + draw.random.below(2)).collect();
    let mut args = words(draw.name().into_iter().chain([seed as usize, inline_len]).chain(list(&wanted)));
    let head = args.len();
    let filling = draw.length().saturating_sub(head);
    args.extend(patterned_bytes(filler(seed), filling));
    // Within the filler, or behind it.
    let at = head + if draw.random.once_in(2) { (filling / 2) & !3 } else { 0 };
    let sends = draw.sends(seed, &lens, at);
    let chunks = wanted.iter().enumerate().map(|(n, &len)| (seed + 1 + n as u32, len)).collect();
    let has_chunks = !lens.is_empty() || !wanted.is_empty();
    let succeeds = draw.carried(args.len(), inline_len, has_chunks);
    let announced = Some(inline_len + draw.random.below(2) * draw.random.below(300));
    let announced = announced.map(|bytes| bytes.min(draw.plan.longest_message));
    // The announced length must be possible.
    let succeeds = both(succeeds, draw.carried(args.len(), announced.unwrap_or(0), has_chunks));
    let results = patterned_bytes(seed, inline_len);
    Shape { noted: true, sends, rooms, chunks, announced, succeeds, ..plain(MIX, args, results) }
}

/// Results that may exceed the announced length.
fn give(draw: &mut Draw<'_>) -> Shape {
    let (seed, len) = (draw.seed(), draw.length());
    let announced = (!draw.random.once_in(2)).then(|| draw.random.below(2 * len + 1));
    let announced = announced.map(|bytes| bytes.min(draw.plan.longest_message));
    let args = words(draw.name().into_iter().chain([seed as usize, len]));
    let enough = announced.is_some_and(|bytes| bytes >= len);
    let [one, two] = draw.without_chunks(args.len(), len);
    let general = !draw.terms.reverse || draw.plan.reverse == ReverseSupport::General;
    // It is retransmitted with the Reply chunk that its reply needs.
    let resent = if general { Success::Yes } else { two };
    let plain_size = if enough { draw.carried(args.len(), len, false) } else { [one, resent] };
    // A Reply chunk may be larger than requested, and so take slightly more than announced.
    let [one, two] = both(plain_size, draw.carried(args.len(), announced.unwrap_or(0), false));
    let one = if one == Success::No && announced.is_some() { Success::Either } else { one };
    // A refused call has executed by then.
    Shape {
        announced,
        succeeds: [one, two],
        error: refused_by_transport,
        ..plain(GIVE, args, patterned_bytes(seed, len))
    }
}

fn tell(draw: &mut Draw<'_>) -> Shape {
    let len = if draw.random.once_in(3) { draw.length() } else { draw.random.below(200) };
    let mut args = words(draw.name());
    args.extend(patterned_bytes(draw.name.1, len));
    let [_, two] = draw.without_chunks(args.len(), 0);
    Shape { noted: true, one_way: true, succeeds: [Success::No, two], ..plain(TELL, args, Vec::new()) }
}

fn flat(draw: &mut Draw<'_>) -> Shape {
    let seed = draw.seed();
    let most = (draw.plan.longest_message / 5).min(draw.plan.longest_chunk);
    let lens: Vec<usize> = (0..1 + draw.random.below(4)).map(|_| 1 + draw.random.below(most)).collect();
    let mut args = words(draw.name().into_iter().chain([seed as usize]).chain(list(&lens)));
    let sends = draw.sends(seed, &lens, args.len());
    let filling = draw.random.below(most);
    args.extend(patterned_bytes(filler(seed), filling));
    let succeeds = both(draw.carried(args.len(), 16, true), [Success::No, Success::Yes]);
    let results = patterned_bytes(seed, 4 * lens.len());
    Shape { noted: true, sends, succeeds, error: refused_by_transport, ..plain(FLAT, args, results) }
}

fn grow(draw: &mut Draw<'_>) -> Shape {
    let (seed, wanted) = (draw.seed(), draw.lens());
    // It is retransmitted at most twice.
    let mut short = draw.random.below(4);
    let left = short <= 2;
    let rooms: Vec<usize> = wanted
        .iter()
        .map(|&len| {
            let cut = short > 0 && len > 1;
            short -= usize::from(cut);
            if cut { 1 + draw.random.below(len - 1) } else { len }
        })
        .collect();
    let cut = rooms != wanted;
    let filling = if draw.random.once_in(3) { draw.length() } else { 0 };
    let mut args = words(draw.name().into_iter().chain([seed as usize]).chain(list(&wanted)));
    args.extend(patterned_bytes(filler(seed), filling.saturating_sub(args.len())));
    let chunks = wanted.iter().enumerate().map(|(n, &len)| (seed + n as u32, len)).collect();
    let enough = [if cut { Success::No } else { Success::Yes }, if left { Success::Yes } else { Success::Either }];
    let succeeds = both(draw.carried(args.len(), 8, true), enough);
    let results = patterned_bytes(seed, 8);
    Shape { noted: true, rooms, chunks, succeeds, error: refused_by_transport, ..plain(GROW, args, results) }
}

/// Write chunks for a procedure that uses none.
fn unreduced(draw: &mut Draw<'_>) -> Shape {
    let (seed, len) = (draw.seed(), draw.length());
    let rooms = draw.lens();
    let args = words(draw.name().into_iter().chain([seed as usize, len]));
    let succeeds = both(draw.carried(args.len(), len, true), [Success::No, Success::Yes]);
    let results = patterned_bytes(seed, len);
    Shape { noted: true, rooms, succeeds, error: refused_by_transport, ..plain(GIVE, args, results) }
}

fn refused(draw: &mut Draw<'_>) -> Shape {
    let error = |error: &CallError| {
        use Refusal::{Authentication, GarbageArguments, ProgramMismatch, RpcMismatch};
        matches!(
            error,
            CallError::Refused(GarbageArguments | Authentication(5) | RpcMismatch { .. } | ProgramMismatch { .. })
        )
    };
    failing(REFUSE, words([pick(draw.random, &[0, 3, 4, 5])]), error)
}

/// On a worker, or on a shard.
fn panics(_: &mut Draw<'_>) -> Shape {
    let error = |error: &CallError| {
        use ErrorBody::{BadXdr, System};
        matches!(error, CallError::Refused(Refusal::SystemError) | CallError::Transport(System | BadXdr))
    };
    failing(PANICS, Vec::new(), error)
}

fn no_such_procedure(draw: &mut Draw<'_>) -> Shape {
    let procedure = 500 + draw.random.below(1 << 20) as u32;
    failing(procedure, Vec::new(), |error| *error == CallError::Refused(Refusal::ProcedureUnavailable))
}
