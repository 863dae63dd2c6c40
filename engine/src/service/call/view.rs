//! Views of a call, for a handler that reads its arguments while it writes results.

use std::net::IpAddr;

use super::chunks::{ReadArguments, Results};
use super::{CallMessage, CallOrigin, CallParts, Caller, PROCEDURE, PROGRAM, ServerCall, VERSION};

/// Origin and header of a call, readable while its results are written.
#[derive(Clone, Copy, Debug)]
pub struct CallInfo<'a> {
    from: &'a CallOrigin,
    message: &'a CallMessage,
    peer: Option<&'a str>,
    xid: u32,
}

impl<'a> CallInfo<'a> {
    /// RPC transaction identifier.
    #[must_use]
    pub fn xid(&self) -> u32 {
        self.xid
    }

    /// Program number.
    #[must_use]
    pub fn program(&self) -> u32 {
        self.message.word(PROGRAM)
    }

    /// Program version.
    #[must_use]
    pub fn version(&self) -> u32 {
        self.message.word(VERSION)
    }

    /// Procedure number.
    #[must_use]
    pub fn procedure(&self) -> u32 {
        self.message.word(PROCEDURE)
    }

    /// Connection of the caller.
    #[must_use]
    pub fn caller(&self) -> Caller {
        self.from.caller
    }

    /// Credential of the caller: flavor and body (RFC 5531 §8.2).
    #[must_use]
    pub fn credential(&self) -> (u32, &'a [u8]) {
        self.message.credential()
    }

    /// Address of the caller's host, unauthenticated; `None` without addresses.
    ///
    /// All connections of a host have the same one, across reconnects.
    #[must_use]
    pub fn peer_host(&self) -> Option<IpAddr> {
        self.from.host
    }

    /// Authenticated name of the caller's host, if any; see [`auth`](crate::auth).
    ///
    /// It names the host, not the user: that one is in the [credential](Self::credential).
    #[must_use]
    pub fn peer_identity(&self) -> Option<&'a str> {
        self.peer
    }
}

/// Arguments of a call.
pub(crate) struct CallArguments<'a> {
    /// Inline arguments.
    pub(crate) inline: &'a [u8],
    /// `None` without Read chunks.
    pub(crate) chunks: Option<&'a ReadArguments>,
}

impl<'a> CallArguments<'a> {
    #[inline]
    fn new(message: &'a CallMessage, chunks: Option<&'a ReadArguments>) -> Self {
        Self { inline: message.args(), chunks: chunks.filter(|chunks| !chunks.0.is_empty()) }
    }
}

/// Memory of a call's results.
pub(crate) struct ResultRoom<'a> {
    /// Memory of the inline results, uninitialized.
    pub(crate) inline: &'a mut [u8],
    /// Bytes of the inline results.
    pub(crate) len: &'a mut usize,
    /// Results in Write chunks.
    pub(crate) results: Results<'a>,
    /// Most bytes of inline results that the reply can carry.
    pub(crate) room: usize,
}

impl ResultRoom<'_> {
    /// This memory for a shorter time.
    #[inline]
    pub(crate) fn reborrow(&mut self) -> ResultRoom<'_> {
        ResultRoom { inline: self.inline, len: self.len, results: self.results.reborrow(), room: self.room }
    }
}

impl<T: ?Sized> ServerCall<T> {
    /// The call in parts. `needs_room` tells whether results may be written into the reply ahead of the others.
    #[inline(always)]
    pub(crate) fn split(&mut self, needs_room: bool) -> (CallInfo<'_>, CallArguments<'_>, ResultRoom<'_>) {
        let room = if needs_room { self.reply_room() } else { 0 };
        let CallParts { from, message, cold, xid, reply, .. } = &mut self.parts;
        let (peer, chunks, results) = match cold.get_mut() {
            None => (None, None, Results::default()),
            Some(cold) => {
                let (arguments, results) = cold.chunks.split();
                (cold.peer.as_deref(), Some(arguments), results)
            }
        };
        let incoming = CallArguments::new(message, chunks);
        let (inline, len) = reply.room();
        (CallInfo { from, message, peer, xid: *xid }, incoming, ResultRoom { inline, len, results, room })
    }

    /// Origin and header of the call.
    #[must_use]
    pub fn info(&self) -> CallInfo<'_> {
        let CallParts { from, message, cold, xid, .. } = &self.parts;
        CallInfo { from, message, peer: cold.get().and_then(|cold| cold.peer.as_deref()), xid: *xid }
    }

    /// Arguments of the call.
    pub(crate) fn incoming(&self) -> CallArguments<'_> {
        CallArguments::new(&self.parts.message, Some(&self.parts.chunks().arguments))
    }
}
