//! RPC headers in the payloads of messages.

use rpcrdma::wire::View;
use rpcrdma::wire::rpc::{self, CallHeader, MessageType, ReplyHeader};

/// The RPC header of a payload.
pub(crate) enum RpcHeader<'a> {
    Call(CallHeader<'a>),
    Reply(ReplyHeader<'a>),
}

/// An RPC message in a payload.
pub(crate) struct Rpc<'a> {
    pub(crate) header: RpcHeader<'a>,
    /// Offset of the arguments or results in the message.
    pub(crate) body: usize,
}

impl<'a> Rpc<'a> {
    /// Returns the RPC message, if the payload starts with one.
    ///
    /// Later parts of a continued message start with arbitrary data, so the XID must equal that of the transport
    /// header.
    pub(crate) fn parse(view: &View<'a>) -> Option<Self> {
        let (xid, message_type) = rpc::peek(view.payload())?;
        if xid != view.xid() {
            return None;
        }
        let (header, body) = match message_type {
            MessageType::Call => {
                let (call, body) = CallHeader::parse(view.payload()).ok()?;
                (RpcHeader::Call(call), body)
            }
            MessageType::Reply => {
                let (reply, body) = ReplyHeader::parse(view.payload()).ok()?;
                (RpcHeader::Reply(reply), body)
            }
        };
        Some(Self { header, body })
    }
}
