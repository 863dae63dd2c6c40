//! Counts of message forms in sent headers, for the coverage check.

use rpcrdma::wire::{ErrorBody, Flags, HeaderType, Revision, Version, View, ViewBody};

use crate::journal::Journal;

/// Census of one connection.
#[derive(Debug)]
pub(crate) struct Census {
    server: bool,
    /// The initial credits, and the last credit value sent.
    first: u32,
    credits: u32,
    /// A multi-part message is being sent.
    continued: bool,
}

impl Census {
    pub(crate) fn new(server: bool, first: u32) -> Self {
        Self { server, first, credits: 0, continued: false }
    }

    /// Counts a sent message.
    pub(crate) fn take(&mut self, message: &[u8], revision: Revision, journal: &Journal) {
        let see = |what: &'static str| journal.count(what, 1);
        let Ok(view) = View::check(message, revision) else { return see("ERR_VERS") };
        match view.body() {
            ViewBody::Connprop(_) => return see("CONNPROP"),
            ViewBody::Error(error) => return see(error_name(&error)),
            _ => {}
        }
        let (more, grant) = (view.flags().contains(Flags::MORE), view.xid() == 0 && !view.has_chunks());
        if view.htype() == HeaderType::Nomsg && grant {
            return if self.continued {
                see("grants between the parts of a message")
            };
        }
        let was_continued = std::mem::replace(&mut self.continued, more);
        if more {
            return see("parts of messages");
        }
        let response = match view.version() {
            Version::V2 => view.flags().contains(Flags::RESPONSE),
            Version::V1 if view.htype() == HeaderType::Msg => view.payload().get(4..8) == Some(&[0, 0, 0, 1]),
            Version::V1 => self.server,
        };
        let mut chunks: Vec<u32> = view.reads().map(|read| read.position).collect();
        chunks.dedup();
        let many = chunks.len() > 1 || view.writes().nth(1).is_some();
        if view.has_chunks() && was_continued {
            see(if response { "continued replies with chunks" } else { "continued calls with chunks" });
        }
        if many && !response {
            see("calls with several chunks");
        }
        if !response && chunks.first() == Some(&0) {
            see(if chunks.len() > 1 { "long calls with chunks" } else { "long calls" });
        }
        if let Some(chunk) = view.reply_chunk() {
            see(match (response, view.htype(), chunk.total_length()) {
                (false, ..) => "Reply chunks offered",
                (true, HeaderType::Nomsg, _) => "long replies",
                _ => "Reply chunks that come back unused",
            });
        }
        match (response == self.server, view.version(), view.received()) {
            (true, Version::V2, None) => see("messages with increments"),
            (true, Version::V2, Some(_)) => see("messages with counts"),
            (true, Version::V1, _) => see("messages of version 1"),
            (false, Version::V2, _) => see("messages of the reverse direction, version 2"),
            (false, Version::V1, _) => see("messages of the reverse direction, version 1"),
        }
        self.size(&view, see);
    }

    fn size(&mut self, view: &View<'_>, see: impl Fn(&'static str)) {
        if view.version() == Version::V1 || view.received().is_some() {
            return;
        }
        let credits = view.credit() >> 16;
        if credits < self.credits {
            see("credit limits that shrink");
        }
        if credits > self.first && credits > self.credits {
            see("credit limits that grow");
        }
        self.credits = credits;
    }
}

fn error_name(error: &ErrorBody) -> &'static str {
    match error {
        ErrorBody::Vers { .. } => "ERR_VERS",
        error => error.name(),
    }
}
