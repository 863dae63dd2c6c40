//! The forms of calls. Each is one function that draws a call of the form: what is sent, and what must come back.
//! A new form is one more function, and its row in [`FORMS`].

use rpcrdma::client::{Connection, LocalClient, PreparedCall};
use rpcrdma::wire::{ErrorBody, Version, msg_len};
use rpcrdma::{CallError, Refusal, Reply, Scheme};
use rpcrdma_tests::*;

use crate::plan::{Plan, pick};
use crate::probe::Place;
use crate::world::Device;

/// A call, and its reply: a function of the call.
#[derive(Debug)]
pub(crate) struct Shape {
    pub(crate) form: &'static str,
    procedure: u32,
    args: Vec<u8>,
    /// Read chunks: where each belongs in the arguments, the seed of its pattern, and its length.
    sends: Vec<(usize, u32, usize)>,
    /// Write chunks: room.
    rooms: Vec<usize>,
    pub(crate) expect: Expect,
}

/// What comes back.
#[derive(Debug)]
pub(crate) enum Expect {
    /// Inline results; of each Write chunk the seed of its pattern, and its length.
    Results { inline: Vec<u8>, chunks: Vec<(u32, usize)> },
    /// An error for which this is true.
    Error(fn(&CallError) -> bool),
}

/// What calls are drawn from.
pub(crate) struct Draw<'a> {
    pub(crate) random: &'a mut Random,
    pub(crate) plan: &'a Plan,
}

/// A form: its name, how often it is drawn, and what draws a call of it.
type Form = (&'static str, usize, fn(&mut Draw<'_>) -> Shape);

/// All forms.
pub(crate) const FORMS: &[Form] = &[
    ("null", 4, null),
    ("echo", 30, echo),
    ("read chunks", 16, read_chunks),
    ("write chunks", 16, write_chunks),
    ("both chunks", 16, both_chunks),
    ("reply near the limit", 6, reply_near_the_limit),
    ("call beyond the limit", 2, call_beyond_the_limit),
    ("refused", 3, refused),
    ("no such procedure", 2, no_such_procedure),
    ("unwanted chunk", 3, unwanted_chunk),
];

impl Shape {
    /// A call of any form.
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

    /// Makes the call, and says which memory it exposes.
    ///
    /// # Errors
    /// The pool is dry.
    pub(crate) fn prepare(
        &self,
        client: &mut LocalClient<Device>,
        connection: Connection,
    ) -> Result<(PreparedCall, Vec<Place>), CallError> {
        let chunks = !self.sends.is_empty() || !self.rooms.is_empty();
        let len = self.args.len();
        let mut call = match chunks {
            true => client.prepare_with_chunks(self.procedure, len)?,
            false => client.prepare(self.procedure, len)?,
        };
        call.args_mut().copy_from_slice(&self.args);
        let mut places = Vec::new();
        for &(at, seed, len) in &self.sends {
            let mut buf = client.alloc(connection, len)?;
            pattern(seed, &mut buf);
            places.push((buf.arena(), buf.base_offset()));
            call.send_chunk(at, buf).expect("at most MAX_CHUNKS");
        }
        for &len in &self.rooms {
            let mut buf = client.alloc(connection, len)?;
            buf.fill(0xEE);
            places.push((buf.arena(), buf.base_offset()));
            call.receive_chunk(buf).expect("at most MAX_CHUNKS");
        }
        Ok((call, places))
    }

    /// Whether a reply is what it must be.
    ///
    /// # Errors
    /// What is wrong with it.
    pub(crate) fn check(&self, reply: &mut Reply) -> Result<(), String> {
        let Expect::Results { inline, chunks } = &self.expect else {
            return Err("a reply to a call that must fail".into());
        };
        if reply.results() != inline {
            return Err(format!("{} bytes of wrong results", reply.results().len()));
        }
        self.check_chunks(chunks, reply)?;
        let sent: Vec<_> = reply.take_sent().collect();
        if sent.len() != self.sends.len() {
            return Err(format!("{} of {} Read chunks came home", sent.len(), self.sends.len()));
        }
        for (n, (buf, &(_, seed, len))) in sent.iter().zip(&self.sends).enumerate() {
            if buf.len() != len || !patterned(seed, buf) {
                return Err(format!("Read chunk {n} changed"));
            }
        }
        Ok(())
    }

    fn check_chunks(&self, chunks: &[(u32, usize)], reply: &Reply) -> Result<(), String> {
        for (n, &(seed, len)) in chunks.iter().enumerate() {
            let Some(got) = reply.chunk(n) else { return Err(format!("chunk {n} is missing")) };
            if got.len() != len || !patterned(seed, got) {
                return Err(format!("chunk {n}: {} bytes, {len} expected; or others", got.len()));
            }
        }
        Ok(())
    }
}

fn plain(procedure: u32, args: Vec<u8>, inline: Vec<u8>) -> Shape {
    let expect = Expect::Results { inline, chunks: Vec::new() };
    Shape { form: "", procedure, args, sends: Vec::new(), rooms: Vec::new(), expect }
}

fn failing(procedure: u32, args: Vec<u8>, error: fn(&CallError) -> bool) -> Shape {
    Shape { expect: Expect::Error(error), ..plain(procedure, args, Vec::new()) }
}

fn words(values: impl IntoIterator<Item = usize>) -> Vec<u8> {
    values.into_iter().flat_map(|value| (value as u32).to_be_bytes()).collect()
}

impl Draw<'_> {
    fn seed(&mut self) -> u32 {
        self.random.draw() as u32 >> 8
    }

    /// Lengths of one to four chunks: short, odd, or as long as may be.
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

    /// Bytes of transport header of a message without chunks.
    fn header(&self) -> usize {
        match self.plan.scheme {
            Scheme::V2Windowed => msg_len(Version::V2, true),
            Scheme::V2Incremental => msg_len(Version::V2, false),
            Scheme::V1 => msg_len(Version::V1, false),
        }
    }

    /// Read chunks one behind the other, behind so many bytes of arguments.
    fn sends(&mut self, seed: u32, lens: &[usize], args: usize) -> Vec<(usize, u32, usize)> {
        let mut at = args;
        let place = |(n, &len): (usize, &usize)| {
            let chunk = (at, seed + n as u32, len);
            at += len.next_multiple_of(4);
            chunk
        };
        lens.iter().enumerate().map(place).collect()
    }
}

/// Bytes of an RPC call header, and of a reply header.
const CALL: usize = 40;
const REPLY_HEADER: usize = 24;

fn null(_: &mut Draw<'_>) -> Shape {
    plain(0, Vec::new(), Vec::new())
}

fn echo(draw: &mut Draw<'_>) -> Shape {
    let longest = draw.plan.inline - draw.header() - CALL;
    let len = match draw.random.below(6) {
        0 => longest - draw.random.below(9),
        1 => draw.random.below(longest),
        _ => draw.random.below(200),
    };
    let mut args = vec![0; len];
    pattern(draw.seed(), &mut args);
    plain(ECHO, args.clone(), args)
}

fn read_chunks(draw: &mut Draw<'_>) -> Shape {
    let (seed, lens) = (draw.seed(), draw.lens());
    let sends = draw.sends(seed, &lens, 4);
    Shape { sends, ..plain(STORE, words([seed as usize]), words(lens)) }
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
    let expect = Expect::Results { inline: words(rooms.iter().copied()), chunks };
    Shape { rooms, expect, ..plain(LOAD, args, Vec::new()) }
}

fn both_chunks(draw: &mut Draw<'_>) -> Shape {
    let (seed, lens) = (draw.seed(), draw.lens());
    let sends = draw.sends(seed, &lens, 4);
    let rooms = lens.iter().map(|&len| len + draw.random.below(2) * draw.random.below(9)).collect::<Vec<_>>();
    let rooms = rooms.into_iter().map(|room| room.min(draw.plan.longest_chunk)).collect();
    let chunks = lens.iter().enumerate().map(|(n, &len)| (seed + n as u32, len)).collect();
    let expect = Expect::Results { inline: Vec::new(), chunks };
    Shape { sends, rooms, expect, ..plain(MIRROR, words([seed as usize]), Vec::new()) }
}

fn reply_near_the_limit(draw: &mut Draw<'_>) -> Shape {
    let most = draw.plan.inline - draw.header() - REPLY_HEADER;
    let len = match draw.random.below(3) {
        0 => most,
        1 => most - draw.random.below(100),
        _ => most + 1 + draw.random.below(draw.plan.inline + LONGER - most),
    };
    if len > most {
        let too_long = |error: &CallError| {
            matches!(error, CallError::Transport(ErrorBody::ReplyResource { .. } | ErrorBody::BadXdr))
        };
        return failing(REPLY, words([len]), too_long);
    }
    let mut results = vec![0; len];
    pattern(len as u32, &mut results);
    plain(REPLY, words([len]), results)
}

fn call_beyond_the_limit(draw: &mut Draw<'_>) -> Shape {
    let most = draw.plan.inline - draw.header() - CALL;
    let args = vec![7; most + 1 + draw.random.below(40)];
    failing(ECHO, args, |error| matches!(error, CallError::TooLong { .. }))
}

fn refused(draw: &mut Draw<'_>) -> Shape {
    let error = |error: &CallError| {
        use Refusal::{Authentication, GarbageArguments, ProgramMismatch, RpcMismatch};
        matches!(
            error,
            CallError::Refused(
                GarbageArguments | Authentication(5) | RpcMismatch { .. } | ProgramMismatch { .. }
            )
        )
    };
    failing(REFUSE, words([pick(draw.random, &[0, 3, 4, 5])]), error)
}

fn no_such_procedure(draw: &mut Draw<'_>) -> Shape {
    let procedure = 500 + draw.random.below(1 << 20) as u32;
    failing(procedure, Vec::new(), |error| *error == CallError::Refused(Refusal::ProcedureUnavailable))
}

fn unwanted_chunk(draw: &mut Draw<'_>) -> Shape {
    let error = |error: &CallError| {
        let known = |e: &ErrorBody| {
            matches!(
                e,
                ErrorBody::WriteChunks { max: 0 } | ErrorBody::ReadChunks { max: 0 } | ErrorBody::BadXdr
            )
        };
        matches!(error, CallError::Transport(body) if known(body))
    };
    let len = 1 + draw.random.below(2000);
    let (sends, rooms) =
        if draw.random.once_in(2) { (vec![(8, 1, len)], vec![]) } else { (vec![], vec![len]) };
    Shape { sends, rooms, ..failing(ECHO, vec![0; 8], error) }
}
