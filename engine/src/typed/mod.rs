//! Typed services: procedures, calls and replies of generated types.
//!
//! `xdrgen` compiles an `.x` file to types, and each program version to a module: a `Server` trait with a method per
//! procedure, `add` for [`Services`](crate::Services), and a `Client`. The generated code uses this module.
//!
//! Opaque data that an upper-layer binding allows to be reduced is a [`Bulk`](crate::xdr::Bulk), on both sides. It may
//! travel in the message, as a Read or Write chunk, or in a long or continued message, always with the same types.
//!
//! | | server | client |
//! |---|---|---|
//! | bulk argument | [`Bulk::bytes`], in the memory that it arrived in | [`CallOptions::lend`] |
//! | bulk result | [`ReplySender::data`], [`ReplySender::lend`], or bytes | [`write_chunk`], [`write_chunk_into`] |
//!
//! [`Bulk::bytes`]: crate::xdr::Bulk::bytes
//! [`write_chunk`]: CallOptions::write_chunk
//! [`write_chunk_into`]: CallOptions::write_chunk_into

mod call_options;
mod reply;

use std::fmt;
use std::sync::Arc;

use rpcrdma_xdr::{BadXdr, Decode, Decoder, Encode, ReceivedChunks, padded};

pub use call_options::{CallOptions, Error, Response, Transport, call};
pub use reply::{Deferred, ReplySender, ReplySent, begin, take};

use crate::binding::Binding;
use crate::proto::Refusal;
pub use crate::service::CallInfo;
use crate::service::duplicate_requests::{ClientId, DuplicateRequestCache, DuplicateRequestCacheConfig, by_credential};
use crate::service::{Procedure, ProcedureCache, ServerCall, Sharing};

/// A procedure of a program version, as generated.
pub trait Signature: 'static {
    /// Program number.
    const PROGRAM: u32;
    /// Program version.
    const VERSION: u32;
    /// Procedure number.
    const NUMBER: u32;
    /// Name in the specification, without the prefix that all procedure names share.
    const NAME: &'static str;
    /// Upper-layer binding.
    const BINDING: Binding;
    /// Maximum bytes of results before the first DDP-eligible one, including its length word.
    #[doc(hidden)]
    const HEAD: usize;
    /// Maximum bytes of DDP-eligible results in a reply without Write chunk.
    #[doc(hidden)]
    const MAX_INLINE_RESULT: usize;
    /// Whether calls have no reply, like those of [`Procedure::one_way`].
    #[doc(hidden)]
    const ONE_WAY: bool = false;
    /// Arguments.
    type Args<'a>: Decode<'a> + Encode;
    /// Results.
    type Results<'a>: Decode<'a> + Encode;
}

/// Decodes all arguments of a call, or all results of a reply, inline and in chunks.
///
/// Without chunks, bulk items are decoded like other opaque data.
#[inline(always)]
fn decode<'a, T: Decode<'a>>(inline: &'a [u8], chunks: Option<&'a impl ReceivedChunks>) -> Result<T, BadXdr> {
    match chunks {
        None => rpcrdma_xdr::decode(inline),
        Some(chunks) => decode_with_chunks(inline, chunks),
    }
}

#[inline(never)]
fn decode_with_chunks<'a, T: Decode<'a>>(inline: &'a [u8], chunks: &'a dyn ReceivedChunks) -> Result<T, BadXdr> {
    let mut from = Decoder::with_chunks(inline, chunks);
    let body = T::decode(&mut from)?;
    from.end()?;
    Ok(body)
}

/// Runs a handler that answers immediately.
///
/// # Errors
/// The handler's refusal, or GARBAGE_ARGS if the arguments are invalid and the handler has not run.
#[inline]
pub fn run<P: Signature>(
    call: &mut ServerCall,
    handler: impl for<'a> FnOnce(CallInfo<'a>, P::Args<'a>, ReplySender<'a, P>) -> Result<ReplySent, Refusal>,
) -> Result<(), Refusal> {
    run_in(call, &mut 0, handler)
}

/// Runs a handler.
///
/// `inline_data` counts the bytes that the handler has written inline for the first DDP-eligible result.
#[inline]
fn run_in<P: Signature>(
    call: &mut ServerCall,
    inline_data: &mut usize,
    handler: impl for<'a> FnOnce(CallInfo<'a>, P::Args<'a>, ReplySender<'a, P>) -> Result<ReplySent, Refusal>,
) -> Result<(), Refusal> {
    let (info, (inline, chunks), out) = call.split(P::BINDING.results.count > 0);
    let args = decode(inline, chunks).map_err(|_| Refusal::GarbageArguments)?;
    handler(info, args, ReplySender::new(out, inline_data)).map(|_| ())
}

/// Sets a procedure's binding, its maximum reply, and whether it is one-way.
pub fn bound<P: Signature, S: Sharing>(procedure: Procedure<S>) -> Procedure<S> {
    let procedure = procedure.with_binding(P::BINDING).max_reply(longest_reply::<P>(true));
    if P::ONE_WAY { procedure.one_way() } else { procedure }
}

/// Maximum bytes of inline results, with or without the DDP-eligible ones.
const fn longest_reply<P: Signature>(with_eligible: bool) -> usize {
    let count = P::BINDING.results.count;
    // The padding of each further item is at most 4 bytes.
    let eligible = if with_eligible && count > 0 { padded(P::MAX_INLINE_RESULT) + 4 * (count - 1) } else { 0 };
    P::BINDING.max_reply.saturating_add(eligible)
}

/// Duplicate request cache of a program, with its function that identifies clients.
#[derive(Clone)]
pub struct ProgramCache(ProcedureCache);

impl ProgramCache {
    /// Uses this cache; `identify` returns the client's identity, as for [`Procedure::cached`].
    pub fn new(
        cache: Arc<DuplicateRequestCache>,
        identify: impl Fn(&ServerCall) -> Option<ClientId> + Send + Sync + 'static,
    ) -> Self {
        Self(ProcedureCache::new(cache, identify))
    }

    /// Attaches the cache to a procedure, so that each call runs once.
    #[doc(hidden)]
    pub fn on<S: Sharing>(&self, mut procedure: Procedure<S>) -> Procedure<S> {
        procedure.cached = Some(self.0.clone());
        procedure
    }
}

/// A new cache, which identifies clients [by credential](by_credential).
///
/// A client with AUTH_NONE has no identity, so its calls run each time, and the log reports it.
impl Default for ProgramCache {
    fn default() -> Self {
        Self::new(Arc::new(DuplicateRequestCache::new(DuplicateRequestCacheConfig::default())), by_credential)
    }
}

impl fmt::Debug for ProgramCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProgramCache").finish_non_exhaustive()
    }
}
