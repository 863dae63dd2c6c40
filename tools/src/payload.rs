//! Payloads of messages.

use rpcrdma::wire::View;
use rpcrdma::wire::rpc::{self, CallHeader, MessageType, ReplyHeader};

/// The RPC header of a payload.
pub(crate) enum RpcHeader<'a> {
    Call(CallHeader<'a>),
    Reply(ReplyHeader<'a>),
}

impl<'a> RpcHeader<'a> {
    /// The RPC header, if the payload starts with one. Later parts of a continued message have none, so the header's
    /// XID must equal the transport's.
    pub(crate) fn of(view: &View<'a>) -> Option<RpcHeader<'a>> {
        let (xid, message_type) = rpc::peek(view.payload())?;
        if xid != view.xid() {
            return None;
        }
        match message_type {
            MessageType::Call => Some(RpcHeader::Call(CallHeader::parse(view.payload()).ok()?.0)),
            MessageType::Reply => Some(RpcHeader::Reply(ReplyHeader::parse(view.payload()).ok()?.0)),
        }
    }
}
