//! Arguments and results of calls, by the definitions of their programs.

#[cfg(test)]
mod tests;
mod text;
mod walk;

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
use walk::{Chunks, Walk};

/// Calls that await their reply, at most. A capture without replies must not fill the memory.
const CALLS: usize = 1 << 16;

/// File name, definitions and placement of the programs that are built in.
const BUILT_IN: [(&str, &str, Option<&str>); 3] = [
    ("nfs3.x", include_str!("../xdr/nfs3.x"), Some(include_str!("../xdr/nfs3.placement.toml"))),
    ("mount.x", include_str!("../xdr/mount.x"), None),
    ("rpcbind.x", include_str!("../xdr/rpcbind.x"), None),
];

/// Program, version and procedure.
type Number = [u32; 3];

/// Caller and server. `None` without a capture.
type Ends = Option<(SocketAddr, SocketAddr)>;

/// Known programs, and the calls that await their reply.
#[derive(Debug, Default)]
pub(crate) struct Bodies {
    schemas: Vec<Schema>,
    calls: HashMap<(Ends, u32), Number>,
}

/// Arguments or results.
#[derive(Debug)]
pub(crate) struct Body {
    procedure: String,
    /// `arguments` or `results`.
    kind: &'static str,
    value: Value,
    /// Reason and place of what could not be decoded.
    error: Option<String>,
    /// The message is malformed.
    pub(crate) is_bad: bool,
}

impl Bodies {
    /// Knows the programs of `files`, then those that are built in.
    ///
    /// # Errors
    /// The name of a file that is unreadable or malformed, and the reason.
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
            xdrgen::parse(&source(xdr), placement.map(source).as_ref()).expect("tests decode with them")
        }));
        Ok(Self { schemas, calls: HashMap::new() })
    }

    /// Decodes the body of a message, if its program is known.
    ///
    /// A reply belongs to the last call with its XID between the same addresses.
    pub(crate) fn of(&mut self, view: &View<'_>, rpc: Option<&Rpc<'_>>, flow: Option<&Flow>) -> Option<Body> {
        let ends = flow.map(Flow::ends);
        if let Some(Rpc { header: RpcHeader::Call(call), body }) = rpc {
            // A protected body has another form (RFC 2203 section 5.3.2).
            if Flavor::from_code(call.credential.flavor) == Some(Flavor::Gss) {
                self.calls.remove(&(ends, view.xid()));
                return None;
            }
            let number = [call.program, call.version, call.procedure];
            if self.calls.len() == CALLS {
                self.calls.clear();
            }
            self.calls.insert((ends, view.xid()), number);
            let (schema, procedure) = self.find(number)?;
            let walk = Walk::new(schema, view.payload(), *body, Chunks::of_call(view));
            return Some(Body::decode(procedure, "arguments", walk, &procedure.arguments, view));
        }
        if rpc.is_none() && view.htype() != HeaderType::Nomsg {
            return None;
        }
        if view.reads().next().is_some() {
            // A long call: its program is in the chunk.
            self.calls.remove(&(ends, view.xid()));
            return None;
        }
        let number = self.calls.remove(&(ends.map(|(source, destination)| (destination, source)), view.xid()))?;
        let (schema, procedure) = self.find(number)?;
        match rpc {
            Some(Rpc { header: RpcHeader::Reply(reply), body }) if is_success(&reply.body) => {
                let walk = Walk::new(schema, view.payload(), *body, Chunks::of_reply(view));
                Some(Body::decode(procedure, "results", walk, slice::from_ref(&procedure.results), view))
            }
            Some(_) => None,
            None => {
                let value = json!({"bytes": view.reply_chunk()?.total_length(), "chunk": "reply"});
                let procedure = procedure.name.text.clone();
                Some(Body { procedure, kind: "results", value, error: None, is_bad: false })
            }
        }
    }

    fn find(&self, [program, version, procedure]: Number) -> Option<(&Schema, &Procedure)> {
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
    fn decode(procedure: &Procedure, kind: &'static str, walk: Walk<'_, '_>, types: &[Type], view: &View<'_>) -> Self {
        let is_continued = view.flags().contains(Flags::MORE);
        let (value, mut error) = walk.all(types);
        if let Some(error) = &mut error
            && view.writes().next().is_some()
            && procedure.placement.results.is_none()
        {
            error.push_str(
                "; a Write chunk is of an eligible result, which the placement file beside the .x file names",
            );
        }
        let error = if is_continued { Some("continued in the next message".to_owned()) } else { error };
        Self { procedure: procedure.name.text.clone(), kind, value, is_bad: error.is_some() && !is_continued, error }
    }

    /// As a JSON object.
    pub(crate) fn json(self) -> Value {
        let Self { procedure, kind, value, error, .. } = self;
        json!({"procedure": procedure, kind: value, "error": error})
    }
}
