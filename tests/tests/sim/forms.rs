//! Forms of calls: for each form, a function draws a call and its expected reply.
//!
//! A new form needs a function and a row in [`FORMS`].

use rpcrdma::client::{ClientCall, Connection, LocalClient};
use rpcrdma::proto::Defect;
use rpcrdma::wire::properties::ReverseSupport;
use rpcrdma::wire::{ErrorBody, Revision};
use rpcrdma::{CallError, Config, CreditMode, Refusal, Reply};
use rpcrdma_tests::*;

use crate::device::Device;
use crate::plan::{CallerPlan, LONG_NEGOTIATION, Plan, pick};
use crate::probe::BufferId;
use crate::service::{FLAT, GIVE, GROW, MIX, NOTE, Name, ONCE, ONE_WAY, PANICS, filler};

/// A call and its expected reply.
#[derive(Debug)]
pub(crate) struct CallCase {
    pub(crate) form: &'static str,
    procedure: u32,
    args: Vec<u8>,
    /// Read chunks: position in the arguments, seed of the pattern, length.
    read_chunks: Vec<(usize, u32, usize)>,
    /// Lengths of the memory for Write chunks.
    write_lens: Vec<usize>,
    /// Announced length of the results, if any.
    announced: Option<usize>,
    pub(crate) one_way: bool,
    /// Expected inline results.
    results: Vec<u8>,
    /// Expected results in Write chunks: seed of the pattern, and length.
    chunks: Vec<(u32, usize)>,
    /// Whether the call succeeds in version 1, and in version 2.
    succeeds: [Success; 2],
    /// Whether the call may fail with this error because of its form.
    is_expected_error: fn(&CallError) -> bool,
    /// Whether the service counts its executions.
    pub(crate) counted: bool,
}

/// Whether a call succeeds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Success {
    Yes,
    No,
    /// Success depends on state that the test does not know.
    Either,
}

/// Known facts about a connection.
#[derive(Clone, Debug)]
pub(crate) struct Terms {
    /// Whether calls go from the server to the client.
    pub(crate) reverse: bool,
    /// Whether the connection may use version 1, and version 2.
    pub(crate) versions: [bool; 2],
    /// Lower bound of the longest inline message, in bytes.
    pub(crate) inline_threshold: usize,
    /// Upper bound of the longest inline message. The bounds differ if the size is unknown or changes.
    pub(crate) max_inline: usize,
}

impl Terms {
    /// Facts about a client's connection to a group, or to the hostile server.
    pub(crate) fn forward(plan: &Plan, caller: &CallerPlan, group: Option<usize>) -> Self {
        let client = &caller.config;
        let Some(group) = group.map(|group| &plan.groups[group].config) else {
            let (inline_threshold, max_inline) = sizes(plan, &[client]);
            return Self { reverse: false, versions: [true; 2], inline_threshold, max_inline };
        };
        let prefers_version_1 = [client, group].iter().any(|config| config.wire.credit_mode == CreditMode::V1);
        // After an unanswered or lost first message, the client reconnects with version 1.
        let short_negotiation = caller.connect.negotiation < LONG_NEGOTIATION;
        let versions = [prefers_version_1 || short_negotiation || !plan.is_calm(), !prefers_version_1];
        let (inline_threshold, max_inline) = sizes(plan, &[client, group]);
        Self {
            reverse: false,
            versions,
            inline_threshold,
            max_inline: if plan.change == 0 { inline_threshold } else { max_inline },
        }
    }

    /// Facts about a server's connections to any client.
    pub(crate) fn reverse(plan: &Plan, server: &Config) -> Self {
        let clients = || plan.callers.iter().map(|caller| &caller.config);
        let prefers_version_1 = |config: &Config| config.wire.credit_mode == CreditMode::V1;
        let versions = [
            prefers_version_1(server)
                || clients().any(prefers_version_1)
                || plan.callers.iter().any(|caller| caller.connect.negotiation < LONG_NEGOTIATION)
                || !plan.is_calm(),
            !prefers_version_1(server) && !clients().all(prefers_version_1),
        ];
        // The older draft has no property for the send size.
        let send_size = if plan.revision == Revision::Cel09 { 4096 } else { server.wire.receive_size };
        let inline_threshold =
            clients().map(|config| config.wire.receive_size).fold(send_size.min(server.wire.receive_size), usize::min);
        let (changed, max_inline) = sizes(plan, &[server]);
        Self { reverse: true, versions, inline_threshold: inline_threshold.min(changed), max_inline }
    }
}

/// Smallest and largest message size between these ends, in bytes.
fn sizes(plan: &Plan, ends: &[&Config]) -> (usize, usize) {
    let min = ends.iter().map(|config| config.wire.receive_size).fold(usize::MAX, usize::min);
    let max = ends.iter().map(|config| config.wire.receive_size.max(config.debug.max_receive_size)).fold(0, usize::max);
    // A peer may request that an end send no messages longer than 1024 bytes.
    if plan.change == 0 { (min, max) } else { (min.min(1024), max) }
}

/// Input from which a call is drawn.
pub(crate) struct Draw<'a> {
    pub(crate) random: &'a mut Random,
    pub(crate) plan: &'a Plan,
    pub(crate) terms: &'a Terms,
    pub(crate) name: Name,
}

/// A form: its name, its weight, and the function that draws a call.
type Form = (&'static str, usize, fn(&mut Draw<'_>) -> CallCase);

pub(crate) const FORMS: &[Form] = &[
    ("null", 4, null),
    ("note", 30, note),
    ("long note", 16, long_note),
    ("cached note", 10, once),
    ("Read chunks", 12, read_chunks),
    ("Write chunks", 12, write_chunks),
    ("Read and Write chunks", 10, both_chunks),
    ("mixed arguments, chunks and results", 16, mix),
    ("results beyond the announced length", 8, give),
    ("one-way call", 6, one_way),
    ("Read chunks for inline-only items", 5, flat),
    ("Write chunks that are too short", 6, grow),
    ("Write chunks for inline-only results", 4, inline_only_results),
    ("refused call", 3, refused),
    ("unknown procedure", 2, no_such_procedure),
    ("panicking handler", 2, panics),
];

impl CallCase {
    /// Draws a call of any form.
    pub(crate) fn draw(draw: &mut Draw<'_>) -> Self {
        let all: usize = FORMS.iter().map(|&(_, weight, _)| weight).sum();
        let mut remainder = draw.random.below(all);
        for &(form, weight, draw_form) in FORMS {
            if remainder < weight {
                return Self { form, ..draw_form(draw) };
            }
            remainder -= weight;
        }
        unreachable!("the drawn number is below the sum of the weights")
    }

    /// A short call that every server answers.
    pub(crate) fn ping() -> Self {
        without_chunks(ECHO, b"ping".to_vec(), b"ping".to_vec())
    }

    /// Prepares the call. Returns the prepared call, and the memory that it exposes.
    ///
    /// # Errors
    /// The pool is empty, or the connection is closed.
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
        let mut buffers = Vec::new();
        for &(position, seed, len) in &self.read_chunks {
            let mut buf = client.alloc(connection, len)?;
            pattern(seed, &mut buf);
            buffers.push((buf.arena(), buf.base_offset()));
            call = call.read_chunk(position, buf);
        }
        for &len in &self.write_lens {
            let mut buf = client.alloc(connection, len)?;
            buf.fill(0xEE);
            buffers.push((buf.arena(), buf.base_offset()));
            call = call.write_chunk_into(buf);
        }
        if self.may_replace_memory() {
            // A retransmission frees the old buffers, which other calls may own before this call completes.
            buffers.clear();
        }
        Ok((call, buffers))
    }

    /// Whether the form permits success, and whether it permits failure, on a connection with these terms.
    pub(crate) fn possible_outcomes(&self, terms: &Terms) -> (bool, bool) {
        let outcomes = self.succeeds.iter().zip(terms.versions).filter(|(_, possible)| *possible);
        let may_be =
            |success: Success| outcomes.clone().any(|(&outcome, _)| outcome == success || outcome == Success::Either);
        (may_be(Success::Yes), may_be(Success::No))
    }

    /// Whether the form permits this error.
    pub(crate) fn fails_with(&self, error: &CallError, terms: &Terms) -> bool {
        self.possible_outcomes(terms).1 && (self.is_expected_error)(error)
    }

    /// Whether the call must not execute twice, even if it is retransmitted.
    pub(crate) fn runs_once(&self) -> bool {
        self.procedure == ONCE
    }

    /// Whether a retransmission may replace the call's chunk memory.
    pub(crate) fn may_replace_memory(&self) -> bool {
        matches!(self.procedure, FLAT | GROW | GIVE)
    }

    /// Checks a reply.
    ///
    /// # Errors
    /// The mismatch.
    pub(crate) fn check(&self, reply: &mut Reply, terms: &Terms) -> Result<(), String> {
        if !self.possible_outcomes(terms).0 {
            return Err("a reply to a call that must fail".into());
        }
        if reply.results() != self.results {
            return Err(format!("{} bytes of wrong results", reply.results().len()));
        }
        for (n, &(seed, len)) in self.chunks.iter().enumerate() {
            let Some(chunk) = reply.chunk(n) else { return Err(format!("chunk {n} is missing")) };
            if chunk.len() != len || !has_pattern(seed, chunk) {
                return Err(format!("chunk {n}: {} bytes, expected {len} bytes of pattern {seed}", chunk.len()));
            }
        }
        let sent: Vec<_> = reply.take_sent().collect();
        // A call retransmitted as one long message does not return its Read chunks.
        if sent.len() != self.read_chunks.len() && self.procedure != FLAT {
            return Err(format!("{} of {} Read chunks were returned", sent.len(), self.read_chunks.len()));
        }
        for (n, (buf, &(_, seed, len))) in sent.iter().zip(&self.read_chunks).enumerate() {
            if buf.len() != len || !has_pattern(seed, buf) {
                return Err(format!("Read chunk {n} changed"));
            }
        }
        Ok(())
    }
}

/// A call without chunks that succeeds in both versions.
fn without_chunks(procedure: u32, args: Vec<u8>, results: Vec<u8>) -> CallCase {
    CallCase {
        form: "",
        procedure,
        args,
        read_chunks: Vec::new(),
        write_lens: Vec::new(),
        announced: None,
        one_way: false,
        results,
        chunks: Vec::new(),
        succeeds: [Success::Yes; 2],
        is_expected_error: is_no_valid_form,
        counted: false,
    }
}

/// A call that fails in both versions, with an error that `is_expected_error` accepts.
fn failing(procedure: u32, args: Vec<u8>, is_expected_error: fn(&CallError) -> bool) -> CallCase {
    CallCase { succeeds: [Success::No; 2], is_expected_error, ..without_chunks(procedure, args, Vec::new()) }
}

/// Whether an error says that no form of the call is valid in its direction.
fn is_no_valid_form(error: &CallError) -> bool {
    match error {
        CallError::Invalid(call) => matches!(call.defect(), Defect::NoChunks | Defect::NotOneWay),
        error => matches!(error, CallError::TooLong { .. }),
    }
}

/// Whether an error says that the peer's transport rejects the form of the call, or that the call has no valid form.
fn is_form_error(error: &CallError) -> bool {
    use ErrorBody::{BadXdr, ReadChunks, ReplyResource, WriteResource};
    let of_form = |e: &ErrorBody| matches!(e, BadXdr | ReadChunks { .. } | ReplyResource { .. } | WriteResource { .. });
    is_no_valid_form(error) || matches!(error, CallError::Transport(body) if of_form(body))
}

fn words(values: impl IntoIterator<Item = usize>) -> Vec<u8> {
    values.into_iter().flat_map(|value| (value as u32).to_be_bytes()).collect()
}

fn patterned_bytes(seed: u32, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    pattern(seed, &mut bytes);
    bytes
}

/// Bytes of an RPC call header.
const CALL_HEADER: usize = 40;
/// Bytes of an RPC reply header.
const REPLY_HEADER: usize = 24;
/// Bytes of the transport header of a message without chunks: in version 1, and the maximum of version 2.
const TRANSPORT_HEADERS: [usize; 2] = [28, 40];

impl Draw<'_> {
    fn seed(&mut self) -> u32 {
        self.random.draw() as u32 >> 8
    }

    fn name(&self) -> [usize; 2] {
        [self.name.0 as usize, self.name.1 as usize]
    }

    /// Lengths of one to four chunks: short, random, or close to the maximum.
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

    /// Length of arguments or results: short, about the inline threshold, or too long for one message.
    fn length(&mut self) -> usize {
        let inline_threshold = pick(self.random, &[self.terms.inline_threshold, self.terms.max_inline]);
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
    fn read_chunks(&mut self, seed: u32, lens: &[usize], args: usize) -> Vec<(usize, u32, usize)> {
        let mut position = args;
        let place = |(n, &len): (usize, &usize)| {
            let chunk = (position, seed + n as u32, len);
            position += len.next_multiple_of(4);
            chunk
        };
        lens.iter().enumerate().map(place).collect()
    }

    /// Whether version 2 can continue a message in another one. The older draft cannot.
    fn has_continued_messages(&self) -> bool {
        self.plan.revision == Revision::Ietf00
    }

    /// Whether call and reply fit without chunks, in version 1 and in version 2.
    fn fits_without_chunks(&self, args: usize, results: usize) -> [Success; 2] {
        let longest = (CALL_HEADER + args).max(REPLY_HEADER + results);
        let fits = |min: usize, max: usize| match longest {
            _ if longest <= min => Success::Yes,
            _ if longest <= max => Success::Either,
            _ => Success::No,
        };
        let Terms { inline_threshold, max_inline, .. } = *self.terms;
        // The private data announces sizes in units of 1024 bytes (RFC 8797).
        let payload_1 = |bytes: usize| (bytes & !1023).max(1024) - TRANSPORT_HEADERS[0];
        let version_2 = if self.has_continued_messages() {
            Success::Yes
        } else {
            // A header without windowed credits is 4 bytes shorter.
            fits(inline_threshold - TRANSPORT_HEADERS[1], max_inline - TRANSPORT_HEADERS[1] + 4)
        };
        [fits(payload_1(inline_threshold), payload_1(max_inline)), version_2]
    }

    /// Whether the connection can carry a call of these lengths and its reply, in version 1 and in version 2.
    fn is_carried(&self, args: usize, results: usize, has_chunks: bool) -> [Success; 2] {
        if !self.terms.reverse {
            return [Success::Yes; 2];
        }
        let [version_1, version_2] = match has_chunks {
            true => [Success::No; 2],
            false => self.fits_without_chunks(args, results),
        };
        [version_1, if self.plan.reverse == ReverseSupport::General { Success::Yes } else { version_2 }]
    }
}

/// Combines two conditions, both of which must hold.
fn both(a: [Success; 2], b: [Success; 2]) -> [Success; 2] {
    let and = |a: Success, b: Success| match (a, b) {
        (Success::No, _) | (_, Success::No) => Success::No,
        (Success::Yes, Success::Yes) => Success::Yes,
        _ => Success::Either,
    };
    [and(a[0], b[0]), and(a[1], b[1])]
}

fn null(_: &mut Draw<'_>) -> CallCase {
    without_chunks(0, Vec::new(), Vec::new())
}

/// A call of [`NOTE`] with arguments of this length, or of 8 bytes if that is more.
fn note_of(draw: &Draw<'_>, len: usize) -> CallCase {
    let mut args = words(draw.name());
    args.extend(patterned_bytes(draw.name.1, len.saturating_sub(8)));
    let succeeds = draw.is_carried(args.len(), args.len(), false);
    let announced = Some(args.len());
    CallCase { counted: true, announced, succeeds, ..without_chunks(NOTE, args.clone(), args) }
}

fn note(draw: &mut Draw<'_>) -> CallCase {
    let len = match draw.random.below(5) {
        0 => {
            pick(draw.random, &[draw.terms.inline_threshold, draw.terms.max_inline])
                - TRANSPORT_HEADERS[1]
                - CALL_HEADER
                - draw.random.below(9)
        }
        _ => draw.random.below(200),
    };
    let len = len.min(draw.plan.longest_message);
    note_of(draw, len)
}

fn long_note(draw: &mut Draw<'_>) -> CallCase {
    let len = draw.length();
    note_of(draw, len)
}

fn once(draw: &mut Draw<'_>) -> CallCase {
    let len = draw.length();
    CallCase { procedure: ONCE, ..note_of(draw, len) }
}

fn read_chunks(draw: &mut Draw<'_>) -> CallCase {
    let (seed, lens) = (draw.seed(), draw.lens());
    let read_chunks = draw.read_chunks(seed, &lens, 4);
    let succeeds = draw.is_carried(4, 16, true);
    CallCase { read_chunks, succeeds, ..without_chunks(STORE, words([seed as usize]), words(lens)) }
}

fn write_chunks(draw: &mut Draw<'_>) -> CallCase {
    let (seed, write_lens) = (draw.seed(), draw.lens());
    // Lengths of the results. If a result exceeds its chunk, the procedure fills the chunk.
    let wanted: Vec<usize> = write_lens
        .iter()
        .map(|&capacity| match draw.random.below(5) {
            0 => 0,
            1 => capacity + draw.random.below(50),
            2 => capacity,
            _ => draw.random.below(capacity),
        })
        .collect();
    let args = words([seed as usize].into_iter().chain(wanted.iter().copied()));
    let lens = wanted.iter().zip(&write_lens).map(|(&wanted, &capacity)| wanted.min(capacity));
    let chunks = lens.enumerate().map(|(n, len)| (seed + n as u32, len)).collect();
    let (results, succeeds) = (words(write_lens.iter().copied()), draw.is_carried(20, 16, true));
    CallCase { write_lens, chunks, succeeds, ..without_chunks(LOAD, args, results) }
}

fn both_chunks(draw: &mut Draw<'_>) -> CallCase {
    let (seed, lens) = (draw.seed(), draw.lens());
    let read_chunks = draw.read_chunks(seed, &lens, 4);
    // Some chunks are up to 8 bytes longer than their result.
    let write_lens = lens.iter().map(|&len| len + draw.random.below(2) * draw.random.below(9)).collect::<Vec<_>>();
    let write_lens = write_lens.into_iter().map(|len| len.min(draw.plan.longest_chunk)).collect();
    let chunks = lens.iter().enumerate().map(|(n, &len)| (seed + n as u32, len)).collect();
    let succeeds = draw.is_carried(4, 0, true);
    CallCase { read_chunks, write_lens, chunks, succeeds, ..without_chunks(MIRROR, words([seed as usize]), Vec::new()) }
}

/// Encodes a list of lengths for the arguments: each length + 1, then a 0 word.
fn length_list(lens: &[usize]) -> impl Iterator<Item = usize> {
    lens.iter().map(|len| len + 1).chain([0])
}

fn mix(draw: &mut Draw<'_>) -> CallCase {
    let (seed, inline_len) = (draw.seed(), draw.length());
    let lens = if draw.random.once_in(3) { Vec::new() } else { draw.lens() };
    let wanted = if draw.random.once_in(3) { Vec::new() } else { draw.lens() };
    let write_lens: Vec<usize> = wanted.iter().map(|&len| len + draw.random.below(2)).collect();
    let mut args = words(draw.name().into_iter().chain([seed as usize, inline_len]).chain(length_list(&wanted)));
    let head = args.len();
    let filling = draw.length().saturating_sub(head);
    args.extend(patterned_bytes(filler(seed), filling));
    // The Read chunks are within the filler, or in front of the filler.
    let position = head + if draw.random.once_in(2) { (filling / 2) & !3 } else { 0 };
    let read_chunks = draw.read_chunks(seed, &lens, position);
    let chunks = wanted.iter().enumerate().map(|(n, &len)| (seed + 1 + n as u32, len)).collect();
    let has_chunks = !lens.is_empty() || !wanted.is_empty();
    let succeeds = draw.is_carried(args.len(), inline_len, has_chunks);
    let announced = Some(inline_len + draw.random.below(2) * draw.random.below(300));
    let announced = announced.map(|bytes| bytes.min(draw.plan.longest_message));
    // The connection must also be able to carry results of the announced length.
    let succeeds = both(succeeds, draw.is_carried(args.len(), announced.unwrap_or(0), has_chunks));
    let results = patterned_bytes(seed, inline_len);
    CallCase {
        counted: true,
        read_chunks,
        write_lens,
        chunks,
        announced,
        succeeds,
        ..without_chunks(MIX, args, results)
    }
}

/// Results that may exceed the announced length.
fn give(draw: &mut Draw<'_>) -> CallCase {
    let (seed, len) = (draw.seed(), draw.length());
    let announced = (!draw.random.once_in(2)).then(|| draw.random.below(2 * len + 1));
    let announced = announced.map(|bytes| bytes.min(draw.plan.longest_message));
    let args = words(draw.name().into_iter().chain([seed as usize, len]));
    let enough = announced.is_some_and(|bytes| bytes >= len);
    let [version_1, version_2] = draw.fits_without_chunks(args.len(), len);
    let allows_chunks = !draw.terms.reverse || draw.plan.reverse == ReverseSupport::General;
    // In version 2, the call is retransmitted with a Reply chunk that is long enough.
    let version_2 = if allows_chunks { Success::Yes } else { version_2 };
    let by_results = if enough { draw.is_carried(args.len(), len, false) } else { [version_1, version_2] };
    let [version_1, version_2] = both(by_results, draw.is_carried(args.len(), announced.unwrap_or(0), false));
    // A Reply chunk may be longer than the announced results, and so hold slightly longer ones.
    let version_1 = if version_1 == Success::No && announced.is_some() { Success::Either } else { version_1 };
    // Executions are not counted, because a call whose reply does not fit has executed although it fails.
    CallCase {
        announced,
        succeeds: [version_1, version_2],
        is_expected_error: is_form_error,
        ..without_chunks(GIVE, args, patterned_bytes(seed, len))
    }
}

fn one_way(draw: &mut Draw<'_>) -> CallCase {
    let len = if draw.random.once_in(3) { draw.length() } else { draw.random.below(200) };
    let mut args = words(draw.name());
    args.extend(patterned_bytes(draw.name.1, len));
    let [_, version_2] = draw.fits_without_chunks(args.len(), 0);
    CallCase {
        counted: true,
        one_way: true,
        succeeds: [Success::No, version_2],
        ..without_chunks(ONE_WAY, args, Vec::new())
    }
}

fn flat(draw: &mut Draw<'_>) -> CallCase {
    let seed = draw.seed();
    let max_len = (draw.plan.longest_message / 5).min(draw.plan.longest_chunk);
    let lens: Vec<usize> = (0..1 + draw.random.below(4)).map(|_| 1 + draw.random.below(max_len)).collect();
    let mut args = words(draw.name().into_iter().chain([seed as usize]).chain(length_list(&lens)));
    let read_chunks = draw.read_chunks(seed, &lens, args.len());
    let filling = draw.random.below(max_len);
    args.extend(patterned_bytes(filler(seed), filling));
    let succeeds = both(draw.is_carried(args.len(), 16, true), [Success::No, Success::Yes]);
    let results = patterned_bytes(seed, 4 * lens.len());
    CallCase {
        counted: true,
        read_chunks,
        succeeds,
        is_expected_error: is_form_error,
        ..without_chunks(FLAT, args, results)
    }
}

fn grow(draw: &mut Draw<'_>) -> CallCase {
    let (seed, wanted) = (draw.seed(), draw.lens());
    // Number of chunks to shorten. For each, version 2 retransmits the call with a longer chunk, but at most twice.
    let mut short = draw.random.below(4);
    let few_are_short = short <= 2;
    let write_lens: Vec<usize> = wanted
        .iter()
        .map(|&len| {
            let shorten = short > 0 && len > 1;
            short -= usize::from(shorten);
            if shorten { 1 + draw.random.below(len - 1) } else { len }
        })
        .collect();
    let any_is_short = write_lens != wanted;
    let filling = if draw.random.once_in(3) { draw.length() } else { 0 };
    let mut args = words(draw.name().into_iter().chain([seed as usize]).chain(length_list(&wanted)));
    args.extend(patterned_bytes(filler(seed), filling.saturating_sub(args.len())));
    let chunks = wanted.iter().enumerate().map(|(n, &len)| (seed + n as u32, len)).collect();
    let by_chunks = [
        if any_is_short { Success::No } else { Success::Yes },
        if few_are_short { Success::Yes } else { Success::Either },
    ];
    let succeeds = both(draw.is_carried(args.len(), 8, true), by_chunks);
    let results = patterned_bytes(seed, 8);
    CallCase {
        counted: true,
        write_lens,
        chunks,
        succeeds,
        is_expected_error: is_form_error,
        ..without_chunks(GROW, args, results)
    }
}

/// Offers Write chunks to a procedure that uses none.
fn inline_only_results(draw: &mut Draw<'_>) -> CallCase {
    let (seed, len) = (draw.seed(), draw.length());
    let write_lens = draw.lens();
    let args = words(draw.name().into_iter().chain([seed as usize, len]));
    let succeeds = both(draw.is_carried(args.len(), len, true), [Success::No, Success::Yes]);
    let results = patterned_bytes(seed, len);
    CallCase {
        counted: true,
        write_lens,
        succeeds,
        is_expected_error: is_form_error,
        ..without_chunks(GIVE, args, results)
    }
}

fn refused(draw: &mut Draw<'_>) -> CallCase {
    let error = |error: &CallError| {
        use Refusal::{Authentication, GarbageArguments, ProgramMismatch, RpcMismatch};
        matches!(
            error,
            CallError::Refused(GarbageArguments | Authentication(5) | RpcMismatch { .. } | ProgramMismatch { .. })
        )
    };
    failing(REFUSE, words([pick(draw.random, &[0, 3, 4, 5])]), error)
}

/// Calls a handler that panics, on a worker or on a shard.
fn panics(_: &mut Draw<'_>) -> CallCase {
    let error = |error: &CallError| {
        use ErrorBody::{BadXdr, System};
        matches!(error, CallError::Refused(Refusal::SystemError) | CallError::Transport(System | BadXdr))
    };
    failing(PANICS, Vec::new(), error)
}

fn no_such_procedure(draw: &mut Draw<'_>) -> CallCase {
    let procedure = 500 + draw.random.below(1 << 20) as u32;
    failing(procedure, Vec::new(), |error| *error == CallError::Refused(Refusal::ProcedureUnavailable))
}
