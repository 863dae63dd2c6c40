//! Counts the forms of sent messages, for the coverage check.

use rpcrdma::wire::{ErrorBody, Flags, HeaderType, Revision, Version, View, ViewBody};

use crate::journal::Journal;

/// Message type of an RPC reply, the second word of the message (RFC 5531 §9).
const RPC_REPLY: &[u8] = &[0, 0, 0, 1];

/// State of the census of one connection.
#[derive(Debug)]
pub(crate) struct Census {
    server: bool,
    initial_credits: u32,
    /// The last credit limit sent.
    credits: u32,
    /// Whether a multi-part message is being sent.
    continued: bool,
}

impl Census {
    pub(crate) fn new(server: bool, initial_credits: u32) -> Self {
        Self { server, initial_credits, credits: 0, continued: false }
    }

    /// Counts a sent message.
    pub(crate) fn count_message(&mut self, message: &[u8], revision: Revision, journal: &Journal) {
        let count = |form: &'static str| journal.count(form, 1);
        // Only an ERR_VERS may fail this check, because its version may be unknown.
        let Ok(view) = View::check(message, revision) else { return count("ERR_VERS") };
        match view.body() {
            ViewBody::Connprop(_) => return count("CONNPROP"),
            ViewBody::Error(error) => return count(error_name(&error)),
            _ => {}
        }
        let is_continued = view.flags().contains(Flags::MORE);
        if view.htype() == HeaderType::Nomsg && view.xid() == 0 && !view.has_chunks() {
            if self.continued {
                count("grants between the parts of a message");
            }
            return;
        }
        let was_continued = std::mem::replace(&mut self.continued, is_continued);
        if is_continued {
            return count("parts of messages");
        }
        let response = match view.version() {
            Version::V2 => view.flags().contains(Flags::RESPONSE),
            Version::V1 if view.htype() == HeaderType::Msg => view.payload().get(4..8) == Some(RPC_REPLY),
            Version::V1 => self.server,
        };
        let mut chunks: Vec<u32> = view.reads().map(|read| read.position).collect();
        chunks.dedup();
        let has_several_chunks = chunks.len() > 1 || view.writes().nth(1).is_some();
        if view.has_chunks() && was_continued {
            count(if response { "continued replies with chunks" } else { "continued calls with chunks" });
        }
        if has_several_chunks && !response {
            count("calls with several chunks");
        }
        if !response && chunks.first() == Some(&0) {
            count(if chunks.len() > 1 { "long calls with chunks" } else { "long calls" });
        }
        if let Some(chunk) = view.reply_chunk() {
            count(match (response, view.htype(), chunk.total_length()) {
                (false, ..) => "Reply chunks offered",
                (true, HeaderType::Nomsg, _) => "long replies",
                _ => "Reply chunks returned unused",
            });
        }
        let is_forward = response == self.server;
        match (is_forward, view.version(), view.received()) {
            (true, Version::V2, None) => count("messages with increments"),
            (true, Version::V2, Some(_)) => count("messages with counts"),
            (true, Version::V1, _) => count("messages of version 1"),
            (false, Version::V2, _) => count("reverse-direction messages of version 2"),
            (false, Version::V1, _) => count("reverse-direction messages of version 1"),
        }
        self.count_credit_limit(&view, count);
    }

    /// Counts a change of the credit limit, which only version 2 with increments sends.
    fn count_credit_limit(&mut self, view: &View<'_>, count: impl Fn(&'static str)) {
        if view.version() == Version::V1 || view.received().is_some() {
            return;
        }
        let credits = view.credit() >> 16;
        if credits < self.credits {
            count("credit limits lowered");
        }
        if credits > self.initial_credits && credits > self.credits {
            count("credit limits raised");
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
