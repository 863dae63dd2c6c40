//! How a call of ours ends, and who is told.

use std::ops::Range;

use rpcrdma_mempool::Buf;

use super::chunks::ChunkMemory;
use crate::fabric::ReceivedBuf;
use crate::handoff::slot::Completer;
use crate::proto::CallError;
use crate::wire::rpc::{OpaqueAuth, ReplyBody, ReplyHeader};

/// A reply. Its memory may be kept, and dropped, on any thread.
#[derive(Debug)]
pub struct Reply {
    pub(super) message: ReceivedBuf,
    /// Where its RPC header is; the results are what is behind it.
    pub(super) header: Range<u32>,
    /// What was sent and received as chunks.
    pub(super) memory: ChunkMemory,
}

impl Reply {
    /// What a call without a reply comes to.
    pub(super) fn empty(message: Buf) -> Self {
        Self { message: ReceivedBuf::new(message, 0), header: 0..0, memory: ChunkMemory::NONE }
    }

    /// The results that came inline, in the buffer that they arrived in.
    #[inline]
    pub fn results(&self) -> &[u8] {
        self.message.get(self.header.end as usize..).unwrap_or(&[])
    }

    /// The server's verifier: flavor and body (RFC 5531 §8.2). Nobody here has looked into it.
    pub fn verifier(&self) -> (u32, &[u8]) {
        let header = self.message.get(self.header.start as usize..self.header.end as usize).unwrap_or(&[]);
        match ReplyHeader::parse(header) {
            Ok((ReplyHeader { body: ReplyBody::Accepted { verifier, .. }, .. }, _)) => (verifier.flavor, verifier.body),
            _ => (OpaqueAuth::NONE.flavor, OpaqueAuth::NONE.body),
        }
    }

    /// The data that came into Write chunk `index`, as long as what came, where the peer has put it: the
    /// engine has looked at none of it.
    ///
    /// On the software fabric a server that keeps to no rule may go on changing it: there, and with a server
    /// that is not trusted, copy what is checked before it is used.
    pub fn chunk(&self, index: usize) -> Option<&[u8]> {
        self.memory.get()?.receive.get(index).map(|buf| &buf[..])
    }

    /// The buffers of the Write chunks, in order, each as long as what came; for keeping, or for using again.
    pub fn take_chunks(&mut self) -> impl Iterator<Item = Buf> {
        self.memory.take_receive()
    }

    /// The buffers of the Read chunks, in order: their memory is the caller's again.
    pub fn take_sent(&mut self) -> impl Iterator<Item = Buf> {
        self.memory.take_send()
    }
}

/// What a call came to.
pub type CallResult = Result<Reply, FailedCall>;

/// Why a call has no reply, and what goes back to its caller.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
#[non_exhaustive]
pub struct FailedCall {
    /// Why.
    pub error: CallError,
    /// The buffers of its chunks, for who wants them.
    pub returned: Returned,
}

impl FailedCall {
    /// With the memory that nobody else can reach any more.
    #[cold]
    pub(crate) fn new(error: CallError, memory: ChunkMemory) -> Self {
        Self { error, returned: Returned(memory) }
    }
}

/// The buffers of the chunks of a call that has failed, as far as nobody else can reach them any more.
///
/// That is so for a call that was not started, not sent, or answered with an error, and for one whose connection is
/// over. One that was sent again in another form has the chunks of its last one. The buffers of a call that was given
/// up, by its deadline or by its caller, are the server's to use until it answers, and go home by themselves after
/// that. Those that are not taken go home when this is dropped: an error that is kept keeps them.
#[derive(Debug)]
pub struct Returned(ChunkMemory);

impl Returned {
    /// Those that were to be sent as Read chunks, in order.
    pub fn take_sent(&mut self) -> impl Iterator<Item = Buf> {
        self.0.take_send()
    }

    /// Those that were offered as Write chunks, in order, and as long as they were offered. They hold anything.
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

/// Who is told how a call ended.
#[derive(Debug, Default)]
pub(crate) enum Sink {
    /// The owner of the shard, who polls it.
    #[default]
    Polled,
    /// An application thread.
    Thread(Completer<CallResult>),
}

/// An ended call, for the shard's owner.
#[derive(Debug)]
pub struct Done {
    /// The caller's own name for the call.
    pub token: u64,
    /// Its reply, or why there is none.
    pub result: CallResult,
}
