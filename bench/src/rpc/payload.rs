//! Payloads of a test's calls, in either direction: arguments, results, checks.
#![forbid(unsafe_code)]

use rpcrdma::Reply;
use rpcrdma::mempool::Buf;
use rpcrdma::typed::Signature;
use rpcrdma::xdr::{decode, padded};
use serde::{Deserialize, Serialize};

use super::protocol::rpcperf_v5::{Read, ReadMessage, Write, WriteMessage};
use super::protocol::{self, Received};
use super::service;
use crate::cli::{Form, RpcOp};

/// One operation in one form, with one payload size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Shape {
    pub(crate) op: RpcOp,
    /// Form of the payload.
    pub(crate) form: Form,
    /// Payload in bytes.
    pub(crate) size: usize,
}

/// Payload of a slot, which has one call at a time.
#[derive(Debug)]
pub(crate) struct Payload {
    /// Memory of the chunk while no call owns it. Each call reuses it, so it stays in the cache.
    pub(crate) chunk: Option<Buf>,
    /// Expected tail of the payload.
    pub(crate) expected: u32,
}

impl Shape {
    /// True if the payload travels in a Read chunk.
    pub(crate) fn sends_chunk(&self) -> bool {
        self.op == RpcOp::Write && self.form == Form::Chunk
    }

    /// True if the payload travels in a Write chunk.
    pub(crate) fn receives_chunk(&self) -> bool {
        self.op == RpcOp::Read && self.form == Form::Chunk
    }

    /// Procedure of this shape.
    pub(crate) fn procedure(&self) -> u32 {
        match (self.op, self.form) {
            (RpcOp::Null, _) => service::NULL,
            (RpcOp::Echo, _) if padded(self.size) <= service::SMALL => service::ECHO_SMALL,
            (RpcOp::Echo, _) => service::ECHO,
            (RpcOp::Read, Form::Chunk) => Read::NUMBER,
            (RpcOp::Read, _) => ReadMessage::NUMBER,
            (RpcOp::Write, Form::Chunk) => Write::NUMBER,
            (RpcOp::Write, _) => WriteMessage::NUMBER,
        }
    }

    /// Bytes of inline arguments.
    pub(crate) fn args_len(&self) -> usize {
        match self.op {
            RpcOp::Null => 0,
            RpcOp::Echo => padded(self.size),
            RpcOp::Read => 4,
            RpcOp::Write if self.form == Form::Chunk => 4,
            RpcOp::Write => 4 + padded(self.size),
        }
    }

    /// Bytes of inline results that carry the payload; 0: none do.
    pub(crate) fn results_len(&self) -> usize {
        match (self.form, self.op) {
            (Form::Chunk, _) | (_, RpcOp::Null | RpcOp::Write) => 0,
            (_, RpcOp::Echo) => padded(self.size),
            (_, RpcOp::Read) => 4 + padded(self.size),
        }
    }

    /// Writes the inline arguments, with `stamp` at the end of a payload among them. Returns the part of `stamp`
    /// that fits.
    pub(crate) fn write_args(&self, args: &mut [u8], stamp: u32) -> u32 {
        let len = (self.size as u32).to_be_bytes();
        match self.op {
            RpcOp::Null => 0,
            RpcOp::Echo => service::stamp(args, stamp),
            RpcOp::Read | RpcOp::Write => {
                let Some((first, payload)) = args.split_first_chunk_mut() else { return 0 };
                *first = len;
                let Some(payload) = payload.get_mut(..self.size) else { return 0 };
                service::stamp(payload, stamp)
            }
        }
    }

    /// Returns whether a reply matches its call. Takes the chunk's memory back.
    #[inline(always)]
    pub(crate) fn check_reply(&self, payload: &mut Payload, reply: &mut Reply) -> bool {
        match self.op {
            RpcOp::Null => reply.results().is_empty(),
            RpcOp::Echo => {
                let results = reply.results();
                results.len() == padded(self.size) && service::tail(results) == payload.expected
            }
            RpcOp::Read => self.check_read_reply(payload, reply),
            RpcOp::Write => {
                if self.form == Form::Chunk {
                    payload.chunk = reply.take_sent().next();
                }
                decode(reply.results()) == Ok(Received { len: self.size as u32, tail: payload.expected })
            }
        }
    }

    fn check_read_reply(&self, payload: &mut Payload, reply: &mut Reply) -> bool {
        let is_expected = |received: &[u8]| received.len() == self.size && ends_as_pattern(received);
        if self.form == Form::Chunk {
            payload.chunk = reply.take_chunks().next();
            return decode(reply.results()) == Ok(self.size as u32)
                && payload.chunk.as_deref().is_some_and(is_expected);
        }
        decode(reply.results()).is_ok_and(|protocol::Payload(received)| is_expected(received))
    }
}

#[inline]
fn ends_as_pattern(payload: &[u8]) -> bool {
    let start = payload.len().saturating_sub(4);
    (start..).zip(&payload[start..]).all(|(at, &byte)| byte == service::pattern(at))
}
