//! State of a call that most calls do not need, in separate memory.

use std::sync::Arc;

use arrayvec::ArrayVec;

use super::chunks::CallChunks;
use crate::service::duplicate_requests::CacheReservation;
use crate::wire::rpc::{MAX_AUTH_LEN, OpaqueAuth};

/// Verifier of a reply: its flavor, which is not AUTH_NONE, and its body.
pub(super) type Verifier = (u32, ArrayVec<u8, MAX_AUTH_LEN>);

/// Measurements of a timed call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CallTiming {
    /// Time of arrival, in nanoseconds.
    pub(crate) arrived: u64,
    /// Bytes of its arguments; 0 until the call has run.
    pub(crate) bytes_in: u64,
    /// Bytes of its results; 0 until the call has run.
    pub(crate) bytes_out: u64,
}

/// State that most calls do not need.
#[derive(Debug, Default)]
pub(super) struct ColdPart {
    pub(super) chunks: CallChunks,
    /// `None` for AUTH_NONE.
    pub(super) verifier: Option<Verifier>,
    /// Authenticated name of the caller's host.
    pub(super) peer: Option<Arc<str>>,
    /// Entry of the call in the duplicate request cache.
    pub(super) reservation: Option<CacheReservation>,
    /// Text of the handler's panic.
    pub(super) panic: Option<Box<str>>,
    /// Whether the call was deferred, and dropped unanswered.
    pub(super) is_dropped: bool,
    /// Whether its message was assembled in a buffer of the pool.
    pub(super) is_assembled: bool,
    /// Measurements, if the call is timed.
    pub(super) timing: Option<CallTiming>,
}

impl ColdPart {
    /// Verifier of the reply.
    pub(super) fn verifier(&self) -> OpaqueAuth<'_> {
        self.verifier.as_ref().map_or(OpaqueAuth::NONE, |(flavor, body)| OpaqueAuth { flavor: *flavor, body })
    }

    /// Clears all fields. With `only_chunks`, all fields but the chunks are clear already.
    fn clear(&mut self, only_chunks: bool) {
        // Most calls with chunks have Read chunks only.
        if only_chunks && !self.chunks.returns_chunks() {
            return self.chunks.clear_reads();
        }
        let Self { chunks, verifier, peer, reservation, panic, is_dropped, is_assembled, timing } = self;
        chunks.clear();
        *verifier = None;
        (*peer, *reservation, *panic, *timing) = (None, None, None, None);
        (*is_dropped, *is_assembled) = (false, false);
    }
}

/// An optional [`ColdPart`], whose memory stays for the next call.
#[derive(Debug, Default)]
pub(super) struct ColdSlot {
    part: Option<Box<ColdPart>>,
    /// A cleared cold part for the next use, while the call has none.
    cleared: Option<Box<ColdPart>>,
    /// Whether anything but the chunks of the cold part is used.
    uses_more: bool,
}

impl ColdSlot {
    /// Whether the call has a cold part.
    pub(super) fn is_used(&self) -> bool {
        self.part.is_some()
    }

    /// Whether the call uses more of the cold part than its chunks.
    #[inline]
    pub(super) fn uses_more(&self) -> bool {
        self.uses_more
    }

    /// Whether the reply needs nothing of the cold part, because the call has at most Read chunks, which a reply does
    /// not return.
    #[inline]
    pub(super) fn is_unused_by_reply(&self) -> bool {
        self.get().is_none_or(|cold| !self.uses_more && !cold.chunks.returns_chunks())
    }

    /// The cold part, if the call has one.
    #[inline]
    pub(super) fn get(&self) -> Option<&ColdPart> {
        self.part.as_deref()
    }

    /// The cold part, if the call has one, mutable.
    #[inline]
    pub(super) fn get_mut(&mut self) -> Option<&mut ColdPart> {
        self.part.as_deref_mut()
    }

    /// Starts using the cold part.
    #[inline]
    pub(super) fn begin(&mut self) -> &mut ColdPart {
        self.uses_more = true;
        self.begin_part()
    }

    /// Starts using the chunks of the cold part.
    #[inline]
    pub(super) fn begin_chunks(&mut self) -> &mut CallChunks {
        &mut self.begin_part().chunks
    }

    #[inline]
    fn begin_part(&mut self) -> &mut ColdPart {
        self.part.get_or_insert_with(|| self.cleared.take().unwrap_or_default())
    }

    /// Ends the use of the cold part, if the call has one, and clears it.
    #[inline]
    pub(super) fn end(&mut self) {
        if self.is_used() {
            self.clear();
        }
    }

    #[inline(never)]
    fn clear(&mut self) {
        if let Some(mut part) = self.part.take() {
            part.clear(!std::mem::take(&mut self.uses_more));
            self.cleared.get_or_insert(part);
        }
    }
}
