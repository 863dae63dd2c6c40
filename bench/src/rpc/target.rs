//! Calls as a [`Target`].
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use rpcrdma::client::{ClientCall, ClientConfig, Connection, LocalClient};
use rpcrdma::config::ConnectConfig;
use rpcrdma::cross_thread::idle::{Idle, IdleStep};
use rpcrdma::typed::{self, CallOptions, Error, Response, Signature};
use rpcrdma::wire::ErrorBody;
use rpcrdma::xdr::Bulk;
use rpcrdma::{Address, CallError, Config, Services};

use super::form::WireForm;
use super::payload::{Payload, Shape};
use super::procedure_runner::RunImmediately;
use super::protocol::rpcperf_v5::{self, PROGRAM, Read, StartReverse, StopReverse, VERSION, Write};
use super::protocol::{self, BulkPayload, ServerInfo};
use super::reverse::{Outcome, ReverseRun};
use super::service::{self, Program};
use crate::cli::{Form, Named, RpcOp};
use crate::counters::Counters;
use crate::failure::Failure;
use crate::figures::Figures;
use crate::stop::{self, INTERRUPTED};
use crate::target::Target;

/// Longest sleep. It bounds the cost of a lost wake-up.
const LONGEST_SLEEP: Duration = Duration::from_millis(100);
/// Time limit for calls outside the measurement.
const CALL_TIMEOUT: Duration = Duration::from_secs(5);
/// The client's action in the errors of [`StartReverse`], [`StopReverse`] and the query of the outcome.
const REQUESTING_CALLS: &str = "requesting calls from the server";
/// Payload bytes from which a chunk takes longer than the call around it.
const BULK: usize = 16 << 10;
/// Polls per clock reading while this side only serves the server's calls.
const TURNS_PER_CLOCK_READ: u32 = 256;

/// One size of one call test.
#[derive(Clone, Debug)]
pub(crate) struct CallSpec {
    /// Operation and form of the payload.
    pub(crate) wire_form: WireForm,
    /// Payload in bytes.
    pub(crate) size: usize,
    /// Connections.
    pub(crate) connections: usize,
    /// Connections that carry calls.
    pub(crate) active: usize,
    /// Outstanding calls per active connection.
    pub(crate) outstanding: usize,
    /// Both sides share a core.
    pub(crate) yields: bool,
    /// Configuration of the client's shard.
    pub(crate) config: Config,
    pub(crate) connect: ConnectConfig,
    /// The server's run of calls to this side, and the description of this side that it needs.
    pub(crate) reverse: Option<(ReverseRun, ServerInfo)>,
}

/// Connections to a call server.
pub(crate) struct RpcTarget {
    client: LocalClient,
    wire_form: WireForm,
    shape: Shape,
    kind: Preparation,
    /// The payloads are so long that each call is flushed immediately: the server works on it while the next is
    /// prepared.
    flushes_each_call: bool,
    /// Bytes of inline arguments.
    args: usize,
    /// Bytes of inline results, for `expect_reply`.
    results: usize,
    procedure: u32,
    slots: Vec<CallSlot>,
    stamp: u32,
    idle: Idle,
    longest_sleep: Duration,
    reverse: Option<ReverseRun>,
}

/// Preparation of calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Preparation {
    /// Arguments and results in one message.
    Plain,
    /// The payload in a chunk.
    Chunk,
    /// The payload among arguments or results, in any form.
    Message,
}

/// Slot of one outstanding call.
struct CallSlot {
    connection: Connection,
    payload: Payload,
}

/// Connects, and queries the server's description.
pub(crate) fn connect(
    address: &Address,
    mut config: Config,
    connect: ConnectConfig,
    services: Option<Services>,
) -> Result<(LocalClient, ServerInfo), Failure> {
    let mode = config.wire.credit_mode;
    config.debug.sample_latency = 0;
    let services = services.map(Arc::new);
    let config = ClientConfig { shard: config, connect, services, ..ClientConfig::new(PROGRAM, VERSION) };
    let mut client = LocalClient::connect(address, config).map_err(|e| Failure::run("connect", e))?;
    let info = query::<rpcperf_v5::Info>(&mut client, &()).and_then(|reply| reply.results());
    let info = info.map_err(|error| {
        Failure::Run(format!(
            "querying {address}, by {}: {error}: check that it is an rpcperf with the same --version and --credit-mode",
            super::config::mode_name(mode)
        ))
    })?;
    Ok((client, info))
}

/// Makes a call outside the measurement.
fn query<P: Signature>(client: &mut LocalClient, args: &P::Args<'_>) -> Result<Response<P>, Error> {
    let connection = client.first();
    typed::call(&mut (client, connection), CallOptions::new().timeout(CALL_TIMEOUT), args)
}

impl RpcTarget {
    /// Opens all connections and allocates all payloads.
    pub(crate) fn connect(address: &Address, spec: &CallSpec) -> Result<Self, Failure> {
        let mut config = spec.config.clone();
        let mut services = None;
        if let Some((_, info)) = &spec.reverse {
            let program = Program::new(info, None)?;
            config.memory.arenas.push(program.arena());
            services = Some(program.services(&RunImmediately { on_workers: false }));
        }
        let (mut client, _) = connect(address, config, spec.connect.clone(), services)?;
        let mut connections = vec![client.first()];
        while connections.len() < spec.connections {
            let more = client.add_connection(address).map_err(|error| {
                let (number, all) = (connections.len() + 1, spec.connections);
                Failure::Run(format!("connection {number}: {error}; start the server with -q {all}"))
            });
            connections.push(more?);
        }
        connections.truncate(spec.active);
        let shape = spec.wire_form.shape(spec.size);
        let mut slots = Vec::with_capacity(spec.active * spec.outstanding);
        for token in 0..spec.active * spec.outstanding {
            // Neighbouring tokens use different connections.
            let connection = connections[token % connections.len()];
            let chunk = if shape.sends_chunk() || shape.receives_chunk() {
                let mut buf = client.alloc(connection, spec.size).map_err(|error| {
                    Failure::Run(format!("memory for payload {token} of {} bytes: {error}", spec.size))
                })?;
                service::fill(&mut buf);
                Some(buf)
            } else {
                None
            };
            slots.push(CallSlot { connection, payload: Payload { chunk, expected: 0 } });
        }
        let kind = match (shape.op, shape.form) {
            (RpcOp::Null, _) | (RpcOp::Echo, Form::Inline) => Preparation::Plain,
            (_, Form::Chunk) => Preparation::Chunk,
            _ => Preparation::Message,
        };
        Ok(Self {
            client,
            wire_form: spec.wire_form,
            shape,
            kind,
            flushes_each_call: kind == Preparation::Chunk && spec.size >= BULK,
            args: shape.args_len(),
            results: shape.results_len(),
            procedure: shape.procedure(),
            slots,
            stamp: 0,
            longest_sleep: LONGEST_SLEEP,
            idle: Idle::new(spec.config.poll.idle).yield_every(u32::from(spec.yields)),
            reverse: spec.reverse.as_ref().map(|(run, _)| run.clone()),
        })
    }

    /// Prepares an inline call with a stamped payload.
    #[inline(always)]
    fn prepare_plain(&mut self, token: u32) -> Result<ClientCall, CallError> {
        let mut call = self.client.prepare(self.procedure, self.args)?;
        self.stamp = self.stamp.wrapping_add(1);
        self.slots[token as usize].payload.expected = service::stamp(call.args_mut(), self.stamp);
        Ok(call)
    }

    /// Prepares a call with a stamped payload among its arguments or results.
    fn prepare_message(&mut self, token: u32) -> Result<ClientCall, CallError> {
        let mut call = self.client.prepare(self.procedure, self.args)?;
        self.stamp = self.stamp.wrapping_add(1);
        self.slots[token as usize].payload.expected = self.shape.write_args(call.args_mut(), self.stamp);
        call = call.expect_reply(self.results);
        Ok(call)
    }

    /// Prepares a call with a stamped payload in a chunk.
    fn prepare_chunk(&mut self, token: u32) -> Result<ClientCall, Error> {
        self.stamp = self.stamp.wrapping_add(1);
        let slot = &mut self.slots[token as usize];
        let mut payload = slot.payload.chunk.take().expect("a slot has one call at a time");
        let (len, to) = (payload.len(), &mut (&mut self.client, slot.connection));
        if self.shape.receives_chunk() {
            // Old bytes must not pass for received data.
            service::stamp(&mut payload, 0);
            CallOptions::<Read>::new().write_chunk_into(payload).into_call(to, &(len as u32))
        } else {
            slot.payload.expected = service::stamp(&mut payload, self.stamp);
            CallOptions::<Write>::new().lend(payload).into_call(to, &BulkPayload(Bulk::placed(len)))
        }
    }

    /// Idles after an empty poll. Returns true after a sleep.
    fn idle_once(&mut self) -> bool {
        match self.idle.after_empty_poll() {
            IdleStep::Spin => {}
            IdleStep::Yield => std::thread::yield_now(),
            IdleStep::Sleep => {
                self.client.wait(self.longest_sleep);
                return true;
            }
        }
        false
    }

    /// Serves the server's calls for `time`.
    fn serve(&mut self, time: Duration) {
        let begin = Instant::now();
        while begin.elapsed() < time {
            for _ in 0..TURNS_PER_CLOCK_READ {
                if self.client.poll(|_| {}) {
                    self.idle.reset();
                } else if self.idle_once() {
                    break;
                }
            }
        }
    }

    /// Adds the close reason of a closed connection to a failure.
    #[cold]
    fn with_reason(&self, failure: Failure) -> Failure {
        let reason = self.slots.iter().find_map(|slot| self.client.close_reason(slot.connection));
        match (failure, reason) {
            (Failure::Run(text), Some(reason)) => Failure::Run(format!("{text}: {reason}")),
            (failure, _) => failure,
        }
    }

    /// Fetches the outcome of the server's run as JSON; `None` until it is available.
    fn fetch_outcome(&mut self) -> Result<Option<Vec<u8>>, Error> {
        let mut text: Vec<u8> = Vec::new();
        loop {
            let reply = query::<rpcperf_v5::Outcome>(&mut self.client, &(text.len() as u32))?;
            let page = reply.results()?;
            text.extend_from_slice(page.text);
            if text.len() >= page.len as usize || page.text.is_empty() {
                return Ok((page.len > 0).then_some(text));
            }
        }
    }
}

#[cold]
pub(super) fn mismatch(op: RpcOp, results: &[u8]) -> Failure {
    let first = &results[..results.len().min(16)];
    Failure::Run(format!(
        "a reply does not match --op {}: {} bytes of results, {first:02x?} …",
        op.name(),
        results.len()
    ))
}

#[cold]
pub(super) fn call_failure(error: &CallError) -> Failure {
    let remedy = match error {
        CallError::Transport(ErrorBody::System) => {
            "; the server has no buffer left: start it with the -s, -t and -q of all its clients"
        }
        _ => "",
    };
    Failure::Run(format!("a call failed: {error}{remedy}"))
}

impl Target for RpcTarget {
    fn depth(&self) -> u32 {
        self.slots.len() as u32
    }

    #[inline]
    fn start(&mut self, token: u32) -> Result<(), Failure> {
        let call = match self.kind {
            Preparation::Plain => self.prepare_plain(token).map_err(|error| call_failure(&error)),
            Preparation::Chunk => self.prepare_chunk(token).map_err(|error| match error {
                Error::Call(call) => call_failure(&call.error),
                other => Failure::run("a call", other),
            }),
            Preparation::Message => self.prepare_message(token).map_err(|error| call_failure(&error)),
        }?;
        let connection = self.slots[token as usize].connection;
        // The next poll reports a call that fails to start, like any other failed call.
        self.client.start(connection, call, u64::from(token));
        if self.flushes_each_call {
            self.client.flush();
        }
        Ok(())
    }

    #[inline]
    fn flush(&mut self) -> Result<(), Failure> {
        self.client.flush();
        Ok(())
    }

    #[inline]
    fn poll(&mut self, done: &mut Vec<u32>) -> Result<(), Failure> {
        let Self { client, slots, shape, .. } = self;
        let mut failure = None;
        let busy = client.poll(|mut ended| {
            let token = ended.token as u32;
            match &mut ended.result {
                Ok(reply) => {
                    if shape.check_reply(&mut slots[token as usize].payload, reply) {
                        done.push(token);
                    } else {
                        failure = Some(mismatch(shape.op, reply.results()));
                    }
                }
                Err(end) => failure = Some(call_failure(&end.error)),
            }
        });
        if busy {
            self.idle.reset();
        } else {
            self.idle_once();
        }
        failure.map_or(Ok(()), |failure| Err(self.with_reason(failure)))
    }

    fn set_next_due(&mut self, next: Option<Duration>) {
        self.longest_sleep = next.map_or(LONGEST_SLEEP, |next| next.min(LONGEST_SLEEP));
    }

    fn counters(&mut self) -> Option<Counters> {
        Some(Counters::now(&[self.client.stats()]))
    }

    fn start_reverse(&mut self) -> Result<(), Failure> {
        let run = self.reverse.as_ref().ok_or_else(|| Failure::Run("this run has no calls in reverse".to_owned()))?;
        let text = serde_json::to_vec(run).map_err(|e| Failure::run("the server's run", e))?;
        let wanted = run.outstanding as u32;
        let reply = query::<StartReverse>(&mut self.client, &protocol::Run(&text));
        match reply.and_then(|reply| reply.results()).map_err(|error| Failure::run(REQUESTING_CALLS, error))? {
            0 => Err(Failure::Run("the server already calls another client".to_owned())),
            granted if granted >= wanted => Ok(()),
            granted => Err(Failure::Run(format!(
                "the server has at most {granted} outstanding calls of its own, and {wanted} were requested: start it with -t {}, \
                 half of which are for its own calls, and without --credits",
                2 * wanted
            ))),
        }
    }

    fn end_reverse(&mut self) -> Result<Figures, Failure> {
        let mut interval = Duration::from_millis(1);
        let mut stopped: Option<Instant> = None;
        let text = loop {
            match stopped {
                // The server reports the figures so far once its last calls are answered.
                None if stop::is_requested() => {
                    let reply = query::<StopReverse>(&mut self.client, &()).and_then(|reply| reply.results());
                    reply.map_err(|error| Failure::run(REQUESTING_CALLS, error))?;
                    (stopped, interval) = (Some(Instant::now()), Duration::from_millis(1));
                }
                Some(since) if since.elapsed() > CALL_TIMEOUT => return Err(Failure::Run(INTERRUPTED.into())),
                _ => {}
            }
            self.serve(interval);
            if let Some(text) = self.fetch_outcome().map_err(|error| Failure::run(REQUESTING_CALLS, error))? {
                break text;
            }
            // Each query takes time from the measurement.
            interval = (2 * interval).min(Duration::from_millis(100));
        };
        let outcome: Outcome =
            serde_json::from_slice(&text).map_err(|e| Failure::run("the server's report of its calls", e))?;
        outcome.map_err(|why| Failure::Run(format!("the server's calls: {why}")))
    }

    fn verify(&self, counted: &Counters, operations: u64) -> Result<(), Failure> {
        self.wire_form.verify(counted, self.shape.size, operations)
    }
}
