//! What most calls do not have, in memory of its own.

use std::sync::Arc;

use super::chunks::Chunks;
use crate::service::duplicate_requests::Claim;
use crate::wire::rpc::{ACCEPTED_REPLY_LEN, Flavor, OpaqueAuth};
use crate::wire::xdr::padded;

/// What proves who answers: AUTH_NONE, if nothing was set.
#[derive(Debug, Default)]
pub(super) struct Verifier {
    flavor: u32,
    body: Vec<u8>,
}

impl Verifier {
    /// It is not AUTH_NONE.
    #[inline(always)]
    pub(super) fn is_some(&self) -> bool {
        self.flavor != Flavor::None.code()
    }

    /// Bytes of RPC header that a successful reply with it has.
    #[inline(always)]
    pub(super) fn header_len(&self) -> usize {
        ACCEPTED_REPLY_LEN + if self.is_some() { padded(self.body.len()) } else { 0 }
    }

    /// Nothing was set.
    fn is_clear(&self) -> bool {
        !self.is_some() && self.body.is_empty()
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

/// A call that is timed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stamp {
    /// When it arrived, in nanoseconds.
    pub(super) arrived: u64,
    /// Bytes of its arguments, once it has run.
    pub(super) bytes_in: u64,
    /// Bytes of its results, once it has run.
    pub(super) bytes_out: u64,
}

impl Stamp {
    /// When the call arrived, in nanoseconds.
    pub(crate) fn arrived(&self) -> u64 {
        self.arrived
    }

    /// Bytes of the call's arguments, and of its results.
    pub(crate) fn bytes(&self) -> (u64, u64) {
        (self.bytes_in, self.bytes_out)
    }
}

/// See the module page.
#[derive(Debug, Default)]
pub(super) struct Extra {
    pub(super) chunks: Chunks,
    pub(super) verifier: Verifier,
    /// The name that the caller's host has proved.
    pub(super) peer: Option<Arc<str>>,
    /// It is to be remembered.
    pub(super) claim: Option<Claim>,
    /// What its handler said when it panicked.
    pub(super) panic: Option<Box<str>>,
    /// It was taken by its handler, and dropped unanswered.
    pub(super) dropped: bool,
    /// Its message was put together in a buffer of the pool.
    pub(super) put_together: bool,
    pub(super) stamp: Option<Stamp>,
}

impl Extra {
    /// There is nothing but Read chunks: nothing that its reply must heed.
    fn has_only_reads(&self) -> bool {
        let Self { chunks, verifier, peer, claim, panic, dropped, put_together, stamp } = self;
        let none = || peer.is_none() && claim.is_none() && panic.is_none() && stamp.is_none();
        !chunks.is_returned() && verifier.is_clear() && !dropped && !put_together && none()
    }

    fn clear(&mut self) {
        // Most calls with chunks come with data, and are answered without.
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

/// What a call has of that. The memory stays when the call is over: the next one need not allocate any.
#[derive(Debug, Default)]
pub(super) struct Extras {
    /// Clear while the call has none.
    memory: Option<Box<Extra>>,
    has_any: bool,
}

impl Extras {
    /// The call has some.
    #[inline(always)]
    pub(super) fn has_any(&self) -> bool {
        self.has_any
    }

    /// The reply need not heed them.
    #[inline(always)]
    pub(super) fn leave_reply_plain(&self) -> bool {
        !self.has_any || self.have_only_reads()
    }

    #[inline(never)]
    fn have_only_reads(&self) -> bool {
        self.memory.as_ref().is_none_or(|extra| extra.has_only_reads())
    }

    /// `None` if the call has none.
    #[inline(always)]
    pub(super) fn get(&self) -> Option<&Extra> {
        if self.has_any { self.memory.as_deref() } else { None }
    }

    /// The same, to be changed.
    #[inline(always)]
    pub(super) fn get_mut(&mut self) -> Option<&mut Extra> {
        if self.has_any { self.memory.as_deref_mut() } else { None }
    }

    /// It has some from now on.
    #[inline]
    pub(super) fn begin(&mut self) -> &mut Extra {
        self.has_any = true;
        self.memory.get_or_insert_default()
    }

    /// It has none any more.
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
