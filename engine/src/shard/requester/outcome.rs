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
    pub(super) memory: Option<ChunkMemory>,
}

impl Reply {
    /// What a call without a reply comes to.
    pub(super) fn empty(message: Buf) -> Self {
        Self { message: ReceivedBuf::new(message, 0), header: 0..0, memory: None }
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
        self.memory.as_ref()?.receive.get(index).map(|buf| &buf[..])
    }

    /// The buffers of the Write chunks, in order, each as long as what came; for keeping, or for using again.
    pub fn take_chunks(&mut self) -> impl Iterator<Item = Buf> {
        self.memory.as_mut().into_iter().flat_map(|memory| memory.receive.drain(..))
    }

    /// The buffers of the Read chunks, in order: their memory is the caller's again.
    pub fn take_sent(&mut self) -> impl Iterator<Item = Buf> {
        self.memory.as_mut().into_iter().flat_map(|memory| memory.send.drain(..)).map(|(_, buf)| buf)
    }
}

/// What a call came to.
pub type CallResult = Result<Reply, CallError>;

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
