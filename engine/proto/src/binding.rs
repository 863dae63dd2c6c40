//! Upper-layer bindings: DDP-eligible data items (RFC 8166 §6).
//!
//! A [`Binding`] covers one procedure, and a [`Bindings`] table covers programs. Both ends use the same bindings. A
//! server creates its procedures with them (`Procedure::with_binding`) and refuses calls that violate them. A client
//! checks calls before it sends them, and sizes their reply resources by the bindings.
//!
//! A binding does *not* restrict long messages. A Position Zero Read chunk can carry any call, and a Reply chunk any
//! reply (RFC 8166 §6.1).
#![forbid(unsafe_code)]

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use crate::wire::ErrorBody;
use crate::wire::rpc::{ACCEPTED_REPLY_LEN, Flavor};
use crate::wire::xdr::{Decoder, padded};

/// The DDP-eligible items of a procedure's arguments or results: those that may travel as chunks (RFC 8166 §6.1).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Eligible {
    /// Number of items.
    pub count: usize,
    /// Maximum bytes of each, without XDR round-up.
    pub max_len: usize,
}

/// One procedure's part of an upper-layer binding: its DDP-eligible items.
///
/// ```
/// # use rpcrdma_proto as rpcrdma;
/// use rpcrdma::binding::Binding;
///
/// const READ: Binding = Binding::inline(20, 104).results(1, 1 << 20);
/// assert!(READ.check_call(20, &[], &[65536], true).is_ok());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[doc(alias("upper layer binding", "ULB", "DDP-eligible"))]
pub struct Binding {
    /// Arguments that may travel as Read chunks.
    #[doc(hidden)]
    pub arguments: Eligible,
    /// Whether a byte count precedes each item, as for `opaque<>` and `string<>`. The count of a reduced item stays in
    /// the message. Default true.
    #[doc(hidden)]
    pub counted: bool,
    /// Results that may travel as Write chunks.
    #[doc(hidden)]
    pub results: Eligible,
    /// Maximum bytes of arguments without RPC header and eligible items.
    pub max_call: usize,
    /// Maximum bytes of results without RPC header and eligible items.
    pub max_reply: usize,
}

/// A call that its binding does not allow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BindingError {
    /// RPCSEC_GSS protects the call, so that nothing may be reduced (RFC 8166 §8.2.2).
    #[error("the call has reduced items, which its RPCSEC_GSS credential forbids")]
    ReductionOff,
    /// More Read chunks than eligible arguments.
    #[error("the call has {found} Read chunks, its procedure allows {max} (eligible arguments)")]
    TooManyArguments {
        /// Chunks in the call.
        found: usize,
        /// Limit of the binding.
        max: usize,
    },
    /// More Write chunks than eligible results.
    #[error("the call has {found} Write chunks, its procedure allows {max} (eligible results)")]
    TooManyResults {
        /// Chunks in the call.
        found: usize,
        /// Limit of the binding.
        max: usize,
        /// Bytes of an unreduced reply.
        reply_len: usize,
    },
    /// A Read chunk longer than an eligible argument can be.
    #[error("reduced argument {index} of {len} bytes exceeds {max}")]
    ArgumentTooLong {
        /// Index of the argument, from 0.
        index: usize,
        /// Bytes of the argument.
        len: usize,
        /// Limit of the binding.
        max: usize,
    },
    /// More arguments inline than the procedure has.
    #[error("inline arguments of {len} bytes exceed {max}")]
    CallTooLong {
        /// Bytes in the call.
        len: usize,
        /// Limit of the binding.
        max: usize,
    },
}

impl BindingError {
    /// The responder's transport error (version 2 §6.4.3). `None` for GARBAGE_ARGS, which is an RPC error. In version 1
    /// every transport error is ERR_CHUNK (RFC 8166 §4.5).
    pub fn answer(&self) -> Option<ErrorBody> {
        match *self {
            BindingError::ReductionOff | BindingError::ArgumentTooLong { .. } => Some(ErrorBody::BadXdr),
            BindingError::TooManyArguments { max, .. } => Some(ErrorBody::ReadChunks { max: max as u32 }),
            // If no result is eligible, the requester gets the needed length of a Reply chunk instead.
            BindingError::TooManyResults { max: 0, reply_len, .. } => {
                Some(ErrorBody::ReplyResource { length_needed: reply_len.min(u32::MAX as usize) as u32 })
            }
            BindingError::TooManyResults { max, .. } => Some(ErrorBody::WriteChunks { max: max as u32 }),
            BindingError::CallTooLong { .. } => None,
        }
    }
}

impl Binding {
    /// A procedure without DDP-eligible arguments and results.
    pub const fn inline(max_call: usize, max_reply: usize) -> Self {
        let none = Eligible { count: 0, max_len: 0 };
        Self { arguments: none, counted: true, results: none, max_call, max_reply }
    }

    /// Sets the count of DDP-eligible arguments and the maximum bytes of each.
    pub const fn arguments(mut self, count: usize, max_len: usize) -> Self {
        self.arguments = Eligible { count, max_len };
        self
    }

    /// Marks DDP-eligible arguments as neither `opaque<>` nor `string<>`. They are arrays of longer elements, optional
    /// data, or opaque data of fixed length. The word before them is not a byte count.
    pub const fn uncounted(mut self) -> Self {
        self.counted = false;
        self
    }

    /// Bytes of the argument in a Read chunk of `chunk` bytes. The chunk may include the XDR round-up; the count in the
    /// message does not (RFC 8166 §3.4.5.2). `word` is the word of the message in front of the chunk, if any. Returns
    /// `None` if the word is not the count of these bytes, or exceeds the argument's maximum: the arguments are then
    /// garbage. An [uncounted](Self::uncounted) argument has all bytes of the chunk, up to its maximum.
    #[doc(hidden)]
    pub const fn argument_len(&self, chunk: usize, word: Option<u32>) -> Option<usize> {
        let max_len = self.arguments.max_len;
        if !self.counted {
            return Some(if chunk < max_len { chunk } else { max_len });
        }
        match word {
            Some(count) if count as usize == chunk || padded(count as usize) == chunk => {
                if count as usize <= max_len {
                    Some(count as usize)
                } else {
                    None
                }
            }
            _ => None,
        }
    }

    /// Sets the count of DDP-eligible results and the maximum bytes of each.
    pub const fn results(mut self, count: usize, max_len: usize) -> Self {
        self.results = Eligible { count, max_len };
        self
    }

    /// Maximum bytes of inline arguments when `reduced` eligible arguments travel as chunks.
    #[doc(hidden)]
    pub const fn call_len(&self, reduced: usize) -> usize {
        self.max_call.saturating_add(unreduced_len(&self.arguments, reduced))
    }

    /// Maximum bytes of inline results when `reduced` eligible results travel as chunks. A requester needs this room in
    /// addition to that of the RPC reply header (RFC 8166 §6.2).
    #[doc(hidden)]
    pub const fn reply_len(&self, reduced: usize) -> usize {
        self.max_reply.saturating_add(unreduced_len(&self.results, reduced))
    }

    /// Checks a call: a requester before sending, a responder before reading.
    ///
    /// `inline_len` is the number of argument bytes in the message. `reads` has the length of each Read chunk, except
    /// one at position zero, and `writes` that of each Write chunk. An empty Write chunk counts, and requests its
    /// result inline. A Write chunk may have more room than the result can need. `reduction` is the result of
    /// [`reduction_allowed`].
    ///
    /// # Errors
    /// The first violated rule.
    #[doc(hidden)]
    pub fn check_call(
        &self,
        inline_len: usize,
        reads: &[usize],
        writes: &[usize],
        reduction: bool,
    ) -> Result<(), BindingError> {
        let reduced = !reads.is_empty() || !writes.is_empty();
        if reduced && !reduction {
            return Err(BindingError::ReductionOff);
        }
        let Eligible { count, max_len } = self.arguments;
        if reads.len() > count {
            return Err(BindingError::TooManyArguments { found: reads.len(), max: count });
        }
        if let Some(index) = reads.iter().position(|len| *len > max_len) {
            return Err(BindingError::ArgumentTooLong { index, len: reads[index], max: max_len });
        }
        let max = self.call_len(reads.len());
        if inline_len > max {
            return Err(BindingError::CallTooLong { len: inline_len, max });
        }
        let max = self.results.count;
        if writes.len() > max {
            let reply_len = ACCEPTED_REPLY_LEN + self.reply_len(0);
            return Err(BindingError::TooManyResults { found: writes.len(), max, reply_len });
        }
        Ok(())
    }
}

/// Bytes of the eligible items that stay in the message.
const fn unreduced_len(items: &Eligible, reduced: usize) -> usize {
    items.count.saturating_sub(reduced).saturating_mul(padded(items.max_len))
}

/// The bindings of programs.
#[derive(Clone, Debug, Default)]
pub struct Bindings {
    /// By program, version and procedure.
    rows: BTreeMap<(u32, u32, u32), Binding>,
}

impl Bindings {
    /// An empty table.
    pub const fn new() -> Self {
        Self { rows: BTreeMap::new() }
    }

    /// Adds a procedure, or replaces it.
    pub fn add(&mut self, program: u32, version: u32, procedure: u32, binding: Binding) -> &mut Self {
        self.rows.insert((program, version, procedure), binding);
        self
    }

    /// The binding of a procedure. `None` if it has none, so that no item of it may be reduced (RFC 8166 §6.1).
    pub fn get(&self, program: u32, version: u32, procedure: u32) -> Option<&Binding> {
        self.rows.get(&(program, version, procedure))
    }
}

/// Whether items may be reduced in a call with this credential.
///
/// RPCSEC_GSS integrity and privacy cover whole messages, and RPCSEC_GSS control messages carry no arguments of the
/// program. No item of these calls is eligible: they are sent as on a transport without direct placement (RFC 8166
/// §8.2.2). The same holds for unknown services and unreadable credentials. Authentication alone (`rpc_gss_svc_none`)
/// does not restrict reduction.
pub fn reduction_allowed(flavor: u32, credential: &[u8]) -> bool {
    const DATA: u32 = 0;
    const SERVICE_NONE: u32 = 1;
    if flavor != Flavor::Gss.code() {
        return true;
    }
    let mut reader = Decoder::new(credential);
    let mut word = |what| reader.u32(what).ok();
    let head = [word("version"), word("gss_proc"), word("seq_num"), word("service")];
    let is_complete = reader.opaque(usize::MAX, "handle").is_ok() && reader.rest().is_empty();
    // The versions of RFC 2203, RFC 5403 and RFC 7861 have these fields at the same places.
    matches!(head, [Some(1..=3), Some(DATA), Some(_), Some(SERVICE_NONE)]) && is_complete
}
