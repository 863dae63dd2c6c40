//! Converts messages to JSON objects, one per line.

use rpcrdma::wire::optional::OperationCode;
use rpcrdma::wire::properties::PropertyId;
use rpcrdma::wire::rpc::{AcceptStat, AuthStat, MessageType, RejectStat, ReplyBody};
use rpcrdma::wire::{ErrorBody, Segment, View, ViewBody};
use serde_json::{Map, Value, json};

use crate::body::Body;
use crate::message::{Flow, Message};
use crate::payload::{Rpc, RpcHeader};

/// Returns the object of a decoded message.
pub(crate) fn message(view: &View<'_>, rpc: Option<&Rpc<'_>>, rpc_body: Option<Body>) -> Map<String, Value> {
    let body = view.body();
    let reads: Vec<Value> = view
        .reads()
        .map(|read| {
            let Segment { handle, length, offset } = read.target;
            json!({"position": read.position, "handle": handle, "length": length, "offset": offset})
        })
        .collect();
    let mut object = Map::new();
    let mut put = |key: &str, value: Value| object.insert(key.to_owned(), value);
    put("vers", view.version().code().into());
    put("xid", view.xid().into());
    put("credit", view.credit().into());
    put("received", view.received().into());
    put("htype", view.htype().name().into());
    put("flags", view.flags().0.into());
    put("inv_handle", view.inv_handle().into());
    put("reads", reads.into());
    put("writes", view.writes().map(|chunk| segments(chunk.segments())).collect::<Vec<_>>().into());
    put("reply", view.reply_chunk().map(|chunk| segments(chunk.segments())).into());
    put("error", error(view, &body));
    put("props", properties(view, &body));
    if let ViewBody::Optional { opttype, optinfo } = body {
        let name = OperationCode::from_code(opttype).map(OperationCode::name);
        put("optional", json!({"opttype": opttype, "name": name, "optinfo": hex(optinfo)}));
    }
    put("payload_offset", view.payload_offset().into());
    put("rpc", rpc.map(|rpc| rpc_header(&rpc.header)).into());
    put("body", rpc_body.map(Body::json).into());
    object
}

/// Returns the object of a message that cannot be decoded.
pub(crate) fn failure(kind: &str, detail: &str) -> Map<String, Value> {
    Map::from_iter([("error_kind".to_owned(), kind.into()), ("detail".to_owned(), detail.into())])
}

/// Adds the location of a captured message.
pub(crate) fn add_send(object: &mut Map<String, Value>, send: &Message) {
    let (source, destination) = match send.flow {
        Flow::QueuePair { source, destination, .. } => (source, destination),
        Flow::Stream(tcp) => (tcp.source.ip(), tcp.destination.ip()),
    };
    let mut put = |key: &str, value: Value| object.insert(key.to_owned(), value);
    put("frame", send.frame.into());
    put("source", source.to_string().into());
    put("destination", destination.to_string().into());
    match send.flow {
        Flow::QueuePair { number, .. } => put("queue_pair", number.into()),
        Flow::Stream(tcp) => put("ports", json!([tcp.source.port(), tcp.destination.port()])),
    };
    put("invalidate", send.invalidate.into());
    put("immediate", send.immediate.into());
}

fn segments(segments: impl Iterator<Item = Segment>) -> Value {
    segments
        .map(|Segment { handle, length, offset }| json!({"handle": handle, "length": length, "offset": offset}))
        .collect()
}

fn error(view: &View<'_>, body: &ViewBody<'_>) -> Value {
    let ViewBody::Error(error) = *body else { return Value::Null };
    let (version, revision) = (view.version(), view.revision());
    let mut object = json!({"code": error.code(version, revision), "name": error.name_in(version)});
    match error {
        ErrorBody::Vers { low, high } => {
            object["low"] = low.into();
            object["high"] = high.into();
        }
        ErrorBody::ReadChunks { max } | ErrorBody::WriteChunks { max } | ErrorBody::Segments { max } => {
            object["max"] = max.into();
        }
        ErrorBody::WriteResource { chunk_index, length_needed } => {
            object["chunk_index"] = chunk_index.into();
            object["length_needed"] = length_needed.into();
        }
        ErrorBody::ReplyResource { length_needed } => object["length_needed"] = length_needed.into(),
        _ => {}
    }
    object
}

fn properties(view: &View<'_>, body: &ViewBody<'_>) -> Value {
    let ViewBody::Connprop(set) = body else { return Value::Array(Vec::new()) };
    set.iter()
        .map(|property| {
            let name = PropertyId::of_revision(property.which, view.revision()).map(PropertyId::name);
            json!({"which": property.which, "data": hex(property.data), "name": name})
        })
        .collect()
}

fn rpc_header(header: &RpcHeader<'_>) -> Value {
    match header {
        RpcHeader::Call(call) => json!({
            "xid": call.xid,
            "type": MessageType::Call.name(),
            "program": call.program,
            "version": call.version,
            "procedure": call.procedure,
            "flavor": call.credential.flavor,
        }),
        RpcHeader::Reply(reply) => {
            let mut object = json!({"xid": reply.xid, "type": MessageType::Reply.name()});
            match reply.body {
                ReplyBody::Accepted { verifier, stat } => {
                    object["flavor"] = verifier.flavor.into();
                    object["accept"] = stat.name().into();
                    if let AcceptStat::ProgMismatch { low, high } = stat {
                        object["low"] = low.into();
                        object["high"] = high.into();
                    }
                }
                ReplyBody::Denied(stat) => {
                    object["reject"] = stat.name().into();
                    match stat {
                        RejectStat::RpcMismatch { low, high } => {
                            object["low"] = low.into();
                            object["high"] = high.into();
                        }
                        RejectStat::AuthError(why) => {
                            object["auth_stat"] = why.into();
                            object["why"] = AuthStat::from_code(why).map(AuthStat::name).into();
                        }
                    }
                }
            }
            object
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
