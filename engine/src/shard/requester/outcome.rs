//! Outcomes of client calls, and their receivers.

use std::fmt;
use std::ops::Range;

use rpcrdma_mempool::{ArenaConfig, Buf, Class, PagePolicy, Pool, PoolConfig};
use rpcrdma_xdr::Received;

use super::outgoing_calls::ChunkMemory;
use crate::cross_thread::slot::Completer;
use crate::fabric::ReceivedBuf;
use crate::proto::CallError;
use crate::wire::rpc::{OpaqueAuth, ReplyBody, ReplyHeader};

/// Reply of a call; `Send`: any thread may keep and drop it.
#[derive(Debug)]
pub struct Reply {
    pub(super) message: ReceivedBuf,
    /// Its RPC header; the results follow.
    pub(super) header: Range<u32>,
    pub(super) memory: ChunkMemory,
}

impl Reply {
    /// Outcome of a one-way call.
    pub(super) fn empty(message: Buf) -> Self {
        Self { message: ReceivedBuf::new(message, 0), header: 0..0, memory: ChunkMemory::NONE }
    }

    /// Inline results, in the receive buffer.
    #[inline]
    pub fn results(&self) -> &[u8] {
        self.message.get(self.header.end as usize..).unwrap_or(&[])
    }

    /// Verifier of the server, unchecked: flavor and body (RFC 5531 §8.2).
    pub fn verifier(&self) -> (u32, &[u8]) {
        let header = self.message.get(self.header.start as usize..self.header.end as usize).unwrap_or(&[]);
        match ReplyHeader::parse(header) {
            Ok((ReplyHeader { body: ReplyBody::Accepted { verifier, .. }, .. }, _)) => (verifier.flavor, verifier.body),
            _ => (OpaqueAuth::NONE.flavor, OpaqueAuth::NONE.body),
        }
    }

    /// Whether the call offered Write chunks.
    #[inline]
    pub(crate) fn has_chunks(&self) -> bool {
        self.memory.get().is_some_and(|memory| !memory.receive.is_empty())
    }

    /// Received data of Write chunk `index`, in place.
    ///
    /// The engine has not read it. On the software fabric a malicious server may still change it: there, copy the data
    /// before checking it.
    pub fn chunk(&self, index: usize) -> Option<&[u8]> {
        self.memory.get()?.receive.get(index).map(|buf| &buf[..])
    }

    /// Takes the buffers of the Write chunks, as long as their data.
    pub fn take_chunks(&mut self) -> impl Iterator<Item = Buf> {
        self.memory.take_receive()
    }

    /// Takes the buffers of the Read chunks, for reuse.
    pub fn take_sent(&mut self) -> impl Iterator<Item = Buf> {
        self.memory.take_send()
    }
}

/// An eligible result is in the Write chunk of its index, unless that is empty.
impl Received for Reply {
    fn item(&self, item: usize, _: usize, _: usize, _: usize) -> Option<&[u8]> {
        self.chunk(item).filter(|bytes| !bytes.is_empty())
    }

    fn is_complete(&self, used: usize) -> bool {
        self.memory.get().is_none_or(|memory| memory.receive.iter().filter(|buf| !buf.is_empty()).count() == used)
    }
}

/// Outcome of a call.
pub type CallResult = Result<Reply, FailedCall>;

/// A failed call: its error, and its buffers.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
#[non_exhaustive]
pub struct FailedCall {
    /// The error.
    pub error: CallError,
    /// Buffers of its chunks.
    pub returned: Returned,
}

impl FailedCall {
    /// A failed call with the memory that only the caller can reach.
    #[cold]
    pub(crate) fn new(error: CallError, memory: ChunkMemory) -> Self {
        Self { error, returned: Returned(memory) }
    }
}

/// Buffers of a failed call's chunks that the peer cannot reach.
///
/// Has the buffers of a call that was not started, not sent, or answered with an error, or whose connection closed. A
/// call that was sent again in another form has the chunks of the last one. After a time-out or a cancel, the server
/// may use the buffers until it answers; then they return to their pool. Dropping this value frees the buffers in it.
pub struct Returned(ChunkMemory);

/// Short, as `expect` prints it.
impl fmt::Debug for Returned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Returned").finish_non_exhaustive()
    }
}

impl Returned {
    /// Takes the buffers of the Read chunks, in order.
    pub fn take_sent(&mut self) -> impl Iterator<Item = Buf> {
        self.0.take_send()
    }

    /// Takes the buffers of the Write chunks, uninitialized, as long as offered.
    pub fn take_chunks(&mut self) -> impl Iterator<Item = Buf> {
        self.0.take_receive()
    }
}

impl From<CallError> for FailedCall {
    fn from(error: CallError) -> Self {
        Self::new(error, ChunkMemory::NONE)
    }
}

impl From<FailedCall> for CallError {
    fn from(failed: FailedCall) -> Self {
        failed.error
    }
}

/// Bytes of a pool for uncollected replies, and of its smallest buffers.
const UNCOLLECTED_BYTES: usize = 1 << 20;
const UNCOLLECTED_SIZE: usize = 512;

/// Memory of replies that other threads have not collected yet. In their receives these replies would block the peer's
/// next ones, and the peer would take this side for stalled.
#[derive(Default)]
pub(super) struct UncollectedReplies {
    /// The newest pool. Earlier ones are freed with their last buffers.
    pool: Option<Pool>,
}

impl UncollectedReplies {
    /// Moves a reply out of its receive of `receive` bytes. A longer reply, or one without memory, stays there.
    #[cold]
    pub(super) fn take(&mut self, reply: &mut Reply, receive: usize, arena: ArenaConfig) {
        let len = reply.message.len();
        if len > receive {
            return;
        }
        let alloc = |pool: &Pool| {
            pool.drain_remote();
            pool.alloc(len)
        };
        let copy = self.pool.as_ref().and_then(alloc).or_else(|| {
            let size = len.next_power_of_two().max(UNCOLLECTED_SIZE);
            let classes = vec![Class { size, count: UNCOLLECTED_BYTES.div_ceil(size) }];
            let arena = ArenaConfig { pages: PagePolicy::Small, prefault: false, ..arena };
            alloc(self.pool.insert(Pool::new(&PoolConfig { classes, arena }).ok()?))
        });
        if let Some(mut copy) = copy {
            copy.copy_from_slice(&reply.message);
            reply.message = ReceivedBuf::whole(copy);
        }
    }

    /// The pool, for statistics.
    pub(super) fn pool(&self) -> Option<&Pool> {
        self.pool.as_ref()
    }
}

/// Receiver of an outcome.
#[derive(Debug, Default)]
pub(crate) enum CompletionTarget {
    /// The shard's owner, by polling.
    #[default]
    Polled,
    /// An application thread.
    Thread(Completer<CallResult>),
}

/// An ended call, as [`LocalClient::poll`](crate::LocalClient::poll) reports it.
#[derive(Debug)]
pub struct Done {
    /// Token of the caller.
    pub token: u64,
    /// Reply or error.
    pub result: CallResult,
}
