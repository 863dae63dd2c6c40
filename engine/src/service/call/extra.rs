//! Rare parts of a call, in separate memory.

use std::sync::Arc;

use super::chunks::Chunks;
use crate::service::duplicate_requests::Claim;
use crate::wire::rpc::{ACCEPTED_REPLY_LEN, Flavor, OpaqueAuth};
use crate::wire::xdr::padded;

/// Verifier of the reply; AUTH_NONE if unset.
#[derive(Debug, Default)]
pub(super) struct Verifier {
    flavor: u32,
    body: Vec<u8>,
}

impl Verifier {
    /// Whether it is not AUTH_NONE.
    #[inline(always)]
    pub(super) fn is_some(&self) -> bool {
        self.flavor != Flavor::None.code()
    }

    /// Bytes of RPC header of a successful reply with it.
    #[inline(always)]
    pub(super) fn header_len(&self) -> usize {
        ACCEPTED_REPLY_LEN + if self.is_some() { padded(self.body.len()) } else { 0 }
    }

    pub(super) fn get(&self) -> OpaqueAuth<'_> {
        OpaqueAuth { flavor: self.flavor, body: &self.body }
    }

    pub(super) fn set(&mut self, flavor: u32, body: &[u8]) {
        self.flavor = flavor;
        self.body.clear();
        self.body.extend_from_slice(body);
    }
}

/// Measurements of a timed call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stamp {
    /// Arrival, in nanoseconds.
    pub(crate) arrived: u64,
    /// Bytes of its arguments, once it has run.
    pub(crate) bytes_in: u64,
    /// Bytes of its results, once it has run.
    pub(crate) bytes_out: u64,
}

#[derive(Debug, Default)]
pub(super) struct Extra {
    pub(super) chunks: Chunks,
    pub(super) verifier: Verifier,
    /// Authenticated name of the caller's host.
    pub(super) peer: Option<Arc<str>>,
    /// Ticket in the duplicate request cache.
    pub(super) claim: Option<Claim>,
    /// Text of its handler's panic.
    pub(super) panic: Option<Box<str>>,
    /// Deferred, and dropped unanswered.
    pub(super) dropped: bool,
    /// Its message was assembled in a buffer of the pool.
    pub(super) put_together: bool,
    pub(super) stamp: Option<Stamp>,
}

impl Extra {
    /// Whether the call has only Read chunks, which its reply need not return.
    fn has_only_reads(&self) -> bool {
        let Self { chunks, verifier, peer, claim, panic, dropped, put_together, stamp } = self;
        let none = || peer.is_none() && claim.is_none() && panic.is_none() && stamp.is_none();
        !chunks.is_returned() && !verifier.is_some() && verifier.body.is_empty() && !dropped && !put_together && none()
    }

    fn clear(&mut self) {
        // Most calls with chunks have arguments in them, and no results.
        if self.has_only_reads() {
            return self.chunks.clear_reads();
        }
        let Self { chunks, verifier, peer, claim, panic, dropped, put_together, stamp } = self;
        chunks.clear();
        verifier.set(Flavor::None.code(), &[]);
        (*peer, *claim, *panic, *stamp) = (None, None, None, None);
        (*dropped, *put_together) = (false, false);
    }
}

/// Optional [`Extra`]. Its memory stays for the next call.
#[derive(Debug, Default)]
pub(super) struct Extras {
    /// Cleared while unused.
    memory: Option<Box<Extra>>,
    has_any: bool,
}

impl Extras {
    /// Whether the call has any.
    #[inline(always)]
    pub(super) fn has_any(&self) -> bool {
        self.has_any
    }

    /// Whether the reply ignores them.
    #[inline(always)]
    pub(super) fn leave_reply_plain(&self) -> bool {
        !self.has_any || self.have_only_reads()
    }

    #[inline(never)]
    fn have_only_reads(&self) -> bool {
        self.memory.as_ref().is_none_or(|extra| extra.has_only_reads())
    }

    /// The parts; `None` if there are none.
    #[inline(always)]
    pub(super) fn get(&self) -> Option<&Extra> {
        if self.has_any { self.memory.as_deref() } else { None }
    }

    /// As `get`, mutable.
    #[inline(always)]
    pub(super) fn get_mut(&mut self) -> Option<&mut Extra> {
        if self.has_any { self.memory.as_deref_mut() } else { None }
    }

    /// Starts using them.
    #[inline]
    pub(super) fn begin(&mut self) -> &mut Extra {
        self.has_any = true;
        self.memory.get_or_insert_default()
    }

    /// Clears and ends their use.
    #[inline(always)]
    pub(super) fn end(&mut self) {
        if self.has_any {
            self.clear();
        }
    }

    #[inline(never)]
    fn clear(&mut self) {
        self.has_any = false;
        if let Some(extra) = &mut self.memory {
            extra.clear();
        }
    }
}
