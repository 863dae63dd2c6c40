//! What a message carries behind its header.

use rpcrdma::wire::View;
use rpcrdma::wire::rpc::{self, CallHeader, MessageType, ReplyHeader};

/// The RPC header of a payload.
pub(crate) enum RpcHeader<'a> {
    Call(CallHeader<'a>),
    Reply(ReplyHeader<'a>),
}

impl<'a> RpcHeader<'a> {
    /// The header, if the payload starts with one. The later parts of a continued message do not: only a
    /// header with the XID of the transport's is taken for one.
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
