//! Calls as a [`Target`].
#![forbid(unsafe_code)]

use std::time::Duration;

use rpcrdma::client::{ClientConfig, Connection, LocalClient, PreparedCall};
use rpcrdma::handoff::idle::{Idle, IdleStep};
use rpcrdma::mempool::Buf;
use rpcrdma::wire::{ErrorBody, Version, msg_len, rpc};
use rpcrdma::{Address, CallError, Config, Reply, Scheme};

use super::service::{self, Info};
use crate::cli::RpcOp;
use crate::counters::Counters;
use crate::failure::Failure;
use crate::target::Target;

/// Sleeps are no longer than this, whatever happens to a wake-up.
const LONGEST_SLEEP: Duration = Duration::from_millis(100);
/// How long the server may take to say who it is.
const INFO_PATIENCE: Duration = Duration::from_secs(5);

/// One size of one test of calls.
#[derive(Clone, Debug)]
pub(crate) struct Spec {
    /// The operation.
    pub(crate) op: RpcOp,
    /// Bytes of payload.
    pub(crate) size: usize,
    /// Connections.
    pub(crate) connections: usize,
    /// Those of them that take calls.
    pub(crate) active: usize,
    /// Calls under way at a time on each.
    pub(crate) outstanding: usize,
    /// Both sides share a core.
    pub(crate) yields: bool,
    /// Of the client's shard.
    pub(crate) config: Config,
}

/// The longest payload that the arguments of one message hold.
pub(crate) fn longest_echo(scheme: Scheme, inline: usize) -> usize {
    let transport = match scheme {
        Scheme::V1 => msg_len(Version::V1, false),
        Scheme::V2Incremental => msg_len(Version::V2, false),
        Scheme::V2Windowed => msg_len(Version::V2, true),
    };
    let header = rpc::CallHeader {
        xid: 0,
        program: service::PROGRAM,
        version: service::VERSION,
        procedure: service::ECHO,
        credential: rpc::OpaqueAuth::NONE,
        verifier: rpc::OpaqueAuth::NONE,
    };
    (inline - transport - header.encoded_len()) & !3
}

/// Connections to a server of calls.
pub(crate) struct RpcTarget {
    client: LocalClient,
    op: RpcOp,
    size: usize,
    /// Bytes of inline arguments.
    args: usize,
    procedure: u32,
    lanes: Vec<Lane>,
    stamp: u32,
    idle: Idle,
}

/// The place of one call under way.
struct Lane {
    connection: Connection,
    /// The payload's memory, while no call has it: used again for each, and so always hot.
    payload: Option<Buf>,
    /// What the end of the payload has to be.
    expected: u32,
}

/// Connects, and asks the server who it is.
pub(crate) fn connect(address: &Address, config: Config) -> Result<(LocalClient, Info), Failure> {
    let scheme = config.scheme;
    let shard = Config { sample_latency: 0, ..config };
    let config = ClientConfig { shard, ..ClientConfig::new(service::PROGRAM, service::VERSION) };
    let mut client = LocalClient::connect(address, config).map_err(|e| Failure::run("connect", e))?;
    let mut call = client.prepare(service::INFO, 0).map_err(|e| Failure::run("call", e))?;
    call.deadline(INFO_PATIENCE);
    let reply = client.call(call).map_err(|error| {
        Failure::Run(format!(
            "asking {address} who it is, by {}: {error}; is it an rpcperf?",
            super::config::scheme_name(scheme)
        ))
    })?;
    let info = Info::decode(reply.results()).map_err(Failure::Run)?;
    Ok((client, info))
}

impl RpcTarget {
    /// Connects all, and takes all memory.
    pub(crate) fn connect(address: &Address, spec: &Spec) -> Result<Self, Failure> {
        let (mut client, _) = connect(address, spec.config.clone())?;
        let mut connections = vec![client.first()];
        while connections.len() < spec.connections {
            let more = client.add_connection(address).map_err(|error| {
                let (number, all) = (connections.len() + 1, spec.connections);
                Failure::Run(format!("connection {number}: {error}; start the server with -q {all}"))
            });
            connections.push(more?);
        }
        let (procedure, args) = match spec.op {
            RpcOp::Null => (service::NULL, 0),
            RpcOp::Echo => {
                let args = spec.size.next_multiple_of(4);
                (if args <= service::SMALL { service::ECHO_SMALL } else { service::ECHO }, args)
            }
            RpcOp::Read => (service::READ, 0),
            RpcOp::Write => (service::WRITE, 4),
        };
        connections.truncate(spec.active);
        let mut lanes = Vec::with_capacity(spec.active * spec.outstanding);
        for token in 0..spec.active * spec.outstanding {
            // Neighbouring tokens are on different connections.
            let connection = connections[token % connections.len()];
            let payload = if spec.op.is_bulk() {
                let mut buf = client.alloc(connection, spec.size).map_err(|error| {
                    Failure::Run(format!("memory for payload {token} of {} bytes: {error}", spec.size))
                })?;
                buf.iter_mut().enumerate().for_each(|(at, byte)| *byte = service::pattern(at));
                Some(buf)
            } else {
                None
            };
            lanes.push(Lane { connection, payload, expected: 0 });
        }
        let idle = Idle::new(spec.config.idle).yield_every(u32::from(spec.yields));
        Ok(Self { client, op: spec.op, size: spec.size, args, procedure, lanes, stamp: 0, idle })
    }

    /// An inline call of the lane, its payload stamped.
    #[inline(always)]
    fn prepare_inline(&mut self, token: u32) -> Result<PreparedCall, CallError> {
        let mut call = self.client.prepare(self.procedure, self.args)?;
        self.stamp = self.stamp.wrapping_add(1);
        self.lanes[token as usize].expected = service::stamp(call.args_mut(), self.stamp);
        Ok(call)
    }

    /// A call of the lane whose payload travels by RDMA, stamped.
    fn prepare_bulk(&mut self, token: u32) -> Result<PreparedCall, CallError> {
        let mut call = self.client.prepare_with_chunks(self.procedure, self.args)?;
        self.stamp = self.stamp.wrapping_add(1);
        let lane = &mut self.lanes[token as usize];
        let mut payload = lane.payload.take().ok_or(CallError::TooMany)?;
        let refused = if self.op == RpcOp::Read {
            // Whatever is there must not be taken for what comes.
            service::stamp(&mut payload, 0);
            call.receive_chunk(payload)
        } else {
            call.args_mut().copy_from_slice(&(payload.len() as u32).to_be_bytes());
            lane.expected = service::stamp(&mut payload, self.stamp);
            call.send_chunk(4, payload)
        };
        refused.map_err(|_| CallError::TooMany)?;
        Ok(call)
    }

    fn idle(&mut self) {
        match self.idle.next() {
            IdleStep::Spin => {}
            IdleStep::Yield => std::thread::yield_now(),
            IdleStep::Sleep => self.client.wait(LONGEST_SLEEP),
        }
    }
}

/// Holds a reply against its call, and takes the payload's memory back.
#[inline(always)]
fn is_right(op: RpcOp, size: usize, lane: &mut Lane, reply: &mut Reply) -> bool {
    match op {
        RpcOp::Null => reply.results().is_empty(),
        RpcOp::Echo => {
            let results = reply.results();
            results.len() == size.next_multiple_of(4) && service::tail(results) == lane.expected
        }
        RpcOp::Read => {
            lane.payload = reply.take_chunks().next();
            let payload = lane.payload.as_deref().unwrap_or(&[]);
            let len = (size as u32).to_be_bytes();
            reply.results() == len && payload.len() == size && ends_as_pattern(payload)
        }
        RpcOp::Write => {
            lane.payload = reply.take_sent().next();
            let (len, tail) = ((size as u32).to_be_bytes(), lane.expected.to_be_bytes());
            reply.results().split_first_chunk() == Some((&len, &tail[..]))
        }
    }
}

#[inline]
fn ends_as_pattern(payload: &[u8]) -> bool {
    let start = payload.len().saturating_sub(4);
    (start..).zip(&payload[start..]).all(|(at, &byte)| byte == service::pattern(at))
}

#[cold]
fn wrong(op: RpcOp, results: &[u8]) -> Failure {
    let first = &results[..results.len().min(16)];
    Failure::Run(format!(
        "the server answered something else than {} asks for: {} bytes of results, {first:02x?} …",
        op.name(),
        results.len()
    ))
}

#[cold]
fn failed(error: &CallError) -> Failure {
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
        self.lanes.len() as u32
    }

    #[inline]
    fn start(&mut self, token: u32) -> Result<(), Failure> {
        let call = if self.op.is_bulk() { self.prepare_bulk(token) } else { self.prepare_inline(token) };
        let call = call.map_err(|error| failed(&error))?;
        let connection = self.lanes[token as usize].connection;
        // A call that cannot be started is told by the next poll, like any other end.
        self.client.start(connection, call, u64::from(token));
        Ok(())
    }

    #[inline]
    fn flush(&mut self) -> Result<(), Failure> {
        self.client.flush();
        Ok(())
    }

    #[inline]
    fn poll(&mut self, done: &mut Vec<u32>) -> Result<(), Failure> {
        let Self { client, lanes, op, size, .. } = self;
        let mut failure = None;
        let busy = client.poll(|mut ended| {
            let token = ended.token as u32;
            match &mut ended.result {
                Ok(reply) => {
                    if is_right(*op, *size, &mut lanes[token as usize], reply) {
                        done.push(token);
                    } else {
                        failure = Some(wrong(*op, reply.results()));
                    }
                }
                Err(error) => failure = Some(failed(error)),
            }
        });
        if busy {
            self.idle.reset();
        } else {
            self.idle();
        }
        failure.map_or(Ok(()), Err)
    }

    fn counters(&mut self) -> Option<Counters> {
        Some(Counters::from(&self.client.stats()))
    }
}
