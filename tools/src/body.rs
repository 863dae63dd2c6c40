//! Decodes arguments and results of calls by the definitions of their programs.

mod decoder;
#[cfg(test)]
mod tests;
mod text;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::Path;
use std::slice;

use rpcrdma::wire::rpc::{AcceptStat, Flavor, ReplyBody};
use rpcrdma::wire::{Flags, HeaderType, View};
use serde_json::{Value, json};
use xdrgen::schema::{Procedure, Schema, Type};
use xdrgen::{CompileError, Source};

use crate::message::Flow;
use crate::payload::{Rpc, RpcHeader};
use decoder::{BodyDecoder, Chunks};

/// Maximum calls that await their reply, because a capture without replies must not exhaust memory.
const MAX_CALLS: usize = 1 << 16;

/// File name, definitions and placement of each built-in program.
const BUILT_IN: [(&str, &str, Option<&str>); 3] = [
    ("nfs3.x", include_str!("../xdr/nfs3.x"), Some(include_str!("../xdr/nfs3.placement.toml"))),
    ("mount.x", include_str!("../xdr/mount.x"), None),
    ("rpcbind.x", include_str!("../xdr/rpcbind.x"), None),
];

/// Numbers of program, version and procedure.
type ProcedureId = [u32; 3];

/// Addresses of caller and server; `None` for messages in hex text.
type EndpointPair = Option<(SocketAddr, SocketAddr)>;

/// Known programs, and the calls that await their reply.
#[derive(Debug, Default)]
pub(crate) struct Bodies {
    schemas: Vec<Schema>,
    calls: HashMap<(EndpointPair, u32), ProcedureId>,
}

/// Decoded arguments or results.
#[derive(Debug)]
pub(crate) struct Body {
    procedure: String,
    /// `arguments` or `results`.
    kind: &'static str,
    value: Value,
    /// Why and where decoding stopped.
    error: Option<String>,
    /// Whether the body is malformed, rather than continued in another message.
    pub(crate) is_malformed: bool,
}

impl Bodies {
    /// Loads the programs of `files`, then the built-in ones.
    ///
    /// # Errors
    /// A file is unreadable or malformed. Returns its name and the reason.
    pub(crate) fn new(files: &[impl AsRef<Path>]) -> Result<Self, (String, String)> {
        let mut schemas = Vec::new();
        for file in files {
            let schema = xdrgen::load(file.as_ref(), None, &xdrgen::Options::default()).map_err(|error| match error {
                CompileError::File { path, source } => (path.display().to_string(), source.to_string()),
                error => (file.as_ref().display().to_string(), error.to_string()),
            });
            schemas.push(schema?);
        }
        schemas.extend(BUILT_IN.map(|(name, xdr, placement)| {
            let source = |text: &str| Source { name: name.to_owned(), text: text.to_owned() };
            xdrgen::parse(&source(xdr), placement.map(source).as_ref())
                .expect("tests decode with the built-in programs")
        }));
        Ok(Self { schemas, calls: HashMap::new() })
    }

    /// Decodes the body of a message, if its program is known.
    ///
    /// A reply belongs to the last call with its XID between the same addresses.
    pub(crate) fn decode(&mut self, view: &View<'_>, rpc: Option<&Rpc<'_>>, flow: Option<&Flow>) -> Option<Body> {
        let ends = flow.map(Flow::ends);
        if let Some(Rpc { header: RpcHeader::Call(call), body }) = rpc {
            // RPCSEC_GSS may encrypt the body or add a checksum (RFC 2203 §5.3.2).
            if Flavor::from_code(call.credential.flavor) == Some(Flavor::Gss) {
                self.calls.remove(&(ends, view.xid()));
                return None;
            }
            let number = [call.program, call.version, call.procedure];
            if self.calls.len() == MAX_CALLS {
                self.calls.clear();
            }
            self.calls.insert((ends, view.xid()), number);
            let (schema, procedure) = self.find(number)?;
            let decoder = BodyDecoder::new(schema, view.payload(), *body, Chunks::of_call(view));
            return Some(Body::decode(procedure, "arguments", decoder, &procedure.arguments, view));
        }
        if rpc.is_none() && view.htype() != HeaderType::Nomsg {
            return None;
        }
        if view.reads().next().is_some() {
            // The RPC header of a long call is in the chunk, so its program is unknown.
            self.calls.remove(&(ends, view.xid()));
            return None;
        }
        let number = self.calls.remove(&(ends.map(|(source, destination)| (destination, source)), view.xid()))?;
        let (schema, procedure) = self.find(number)?;
        match rpc {
            Some(Rpc { header: RpcHeader::Reply(reply), body }) if is_success(&reply.body) => {
                let decoder = BodyDecoder::new(schema, view.payload(), *body, Chunks::of_reply(view));
                Some(Body::decode(procedure, "results", decoder, slice::from_ref(&procedure.results), view))
            }
            Some(_) => None,
            None => {
                let value = json!({"bytes": view.reply_chunk()?.total_length(), "chunk": "reply"});
                let procedure = procedure.name.text.clone();
                Some(Body { procedure, kind: "results", value, error: None, is_malformed: false })
            }
        }
    }

    fn find(&self, [program, version, procedure]: ProcedureId) -> Option<(&Schema, &Procedure)> {
        self.schemas.iter().find_map(|schema| {
            let programs = schema.programs.iter().filter(|found| found.number == program);
            let versions = programs.flat_map(|program| &program.versions).filter(|found| found.number == version);
            let mut procedures = versions.flat_map(|version| &version.procedures);
            Some((schema, procedures.find(|found| found.number == procedure)?))
        })
    }
}

fn is_success(reply: &ReplyBody<'_>) -> bool {
    matches!(reply, ReplyBody::Accepted { stat: AcceptStat::Success, .. })
}

impl Body {
    fn decode(
        procedure: &Procedure,
        kind: &'static str,
        decoder: BodyDecoder<'_, '_>,
        types: &[Type],
        view: &View<'_>,
    ) -> Self {
        let is_continued = view.flags().contains(Flags::MORE);
        let (value, mut error) = decoder.decode_all(types);
        if let Some(error) = &mut error
            && view.writes().next().is_some()
            && procedure.placement.results.is_none()
        {
            error.push_str("; a result in a Write chunk must be eligible in the placement file beside the .x file");
        }
        let error = if is_continued { Some("continued in the next message".to_owned()) } else { error };
        Self {
            procedure: procedure.name.text.clone(),
            kind,
            value,
            is_malformed: error.is_some() && !is_continued,
            error,
        }
    }

    /// Returns the body as a JSON object.
    pub(crate) fn json(self) -> Value {
        let Self { procedure, kind, value, error, .. } = self;
        json!({"procedure": procedure, kind: value, "error": error})
    }
}
