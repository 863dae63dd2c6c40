//! Flow control as an onlooker sees it: from the headers that pass a device, without a look at the engine's own counts.

use rpcrdma::wire::{ERR_VERS_LEN, ErrorBody, HeaderType, Revision, Version, View, ViewBody, WireErrorKind};

/// Credits that are more than anybody has: beyond, counters would wrap.
const PLENTY: u32 = 1 << 20;

/// One connection's credits, as its headers say them. Counters wrap.
#[derive(Debug)]
pub(crate) struct Flow {
    server: bool,
    /// The peer keeps to no rule: what it grants means nothing.
    hostile: bool,
    version_1: bool,
    /// Messages sent, and how far the peer has said that they may go (version 1: calls).
    sent: u32,
    limit: u32,
    /// Messages received, and how far this side has said that they may go (version 1: calls, or replies).
    received: u32,
    told: u32,
}

impl Flow {
    /// A new connection: one message each way is free.
    pub(crate) fn new(server: bool, hostile: bool) -> Self {
        Self { server, hostile, version_1: false, sent: 0, limit: 1, received: 0, told: 1 }
    }

    /// A message goes out.
    ///
    /// # Errors
    /// What is wrong with that.
    pub(crate) fn send(&mut self, message: &[u8], revision: Revision) -> Result<(), String> {
        if is_err_vers(message, revision) {
            self.sent = self.sent.wrapping_add(1);
            return Ok(());
        }
        let view = View::check(message, revision);
        let view = view.map_err(|e| format!("it sends what cannot be read: {e:?}"))?;
        if view.version() == Version::V1 {
            return self.send_1(&view);
        }
        let pure = view.htype() == HeaderType::Nomsg && view.xid() == 0 && !view.has_chunks();
        self.sent = self.sent.wrapping_add(1);
        let beyond = self.sent.wrapping_sub(self.limit) as i32;
        if beyond > i32::from(pure) && !self.hostile {
            return Err(format!("it sends message {} with a limit of {}", self.sent, self.limit));
        }
        let told = match view.received() {
            Some(received) => {
                if (received.wrapping_sub(self.received) as i32) > 0 {
                    return Err(format!("it says that {received} have come, of {}", self.received));
                }
                received.wrapping_add(view.credit())
            }
            None => self.told.wrapping_add(view.credit() & 0xFFFF),
        };
        if (told.wrapping_sub(self.told) as i32) < 0 {
            return Err(format!("it takes back what it granted: {told} after {}", self.told));
        }
        self.told = told;
        Ok(())
    }

    /// The same in version 1, where only calls count.
    fn send_1(&mut self, view: &View<'_>) -> Result<(), String> {
        self.version_1 = true;
        if self.server {
            // The reply makes room for one more call.
            self.told = self.sent.wrapping_add(1).wrapping_add(view.credit());
        }
        self.sent = self.sent.wrapping_add(1);
        let beyond = self.sent.wrapping_sub(self.limit) as i32;
        if !self.server && beyond > 0 && !self.hostile {
            return Err(format!("it makes call {} with a limit of {}", self.sent, self.limit));
        }
        Ok(())
    }

    /// A message has come.
    pub(crate) fn receive(&mut self, message: &[u8], revision: Revision) {
        self.received = self.received.wrapping_add(1);
        if is_err_vers(message, revision) {
            return;
        }
        let Ok(view) = View::check(message, revision) else { return };
        let limit = match (view.version(), view.received()) {
            (Version::V1, _) => {
                self.version_1 = true;
                self.received.wrapping_add(view.credit().clamp(1, PLENTY))
            }
            // It says that more has come than was sent.
            (_, Some(received)) if self.sent.wrapping_sub(received) > PLENTY => return,
            (_, Some(received)) => received.wrapping_add(view.credit().min(PLENTY)),
            (_, None) => self.limit.wrapping_add(view.credit() & 0xFFFF),
        };
        // Nobody honest takes back what was granted. Of others, an earlier message may be believed still: it was handed out in
        // the same poll.
        if (limit.wrapping_sub(self.limit) as i32) > 0 {
            self.limit = limit;
        }
    }

    /// Messages that the peer may still send: each must find a Receive.
    pub(crate) fn promised(&self) -> u32 {
        let may_come = match (self.version_1, self.server) {
            // Every call is answered once.
            (true, false) => self.sent.wrapping_sub(self.received),
            (true, true) => self.told.wrapping_sub(self.received),
            // One more, for a pure grant.
            (false, _) => self.told.wrapping_sub(self.received).wrapping_add(1),
        };
        (may_come as i32).max(0) as u32
    }
}

/// An error that names versions: its layout is that of all versions, and says nothing of credits. It may name a version
/// that nobody knows.
fn is_err_vers(message: &[u8], revision: Revision) -> bool {
    match View::check(message, revision) {
        Ok(view) => matches!(view.body(), ViewBody::Error(ErrorBody::Vers { .. })),
        Err(error) => {
            let unknown = matches!(error.kind, WireErrorKind::UnsupportedVersion { .. });
            unknown
                && message.len() == ERR_VERS_LEN
                && message[12..16] == HeaderType::Error.code().to_be_bytes()
        }
    }
}
