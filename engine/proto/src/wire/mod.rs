//! Codec of RPC-over-RDMA versions 1 and 2, and their RPC headers.
//!
//! A header has two forms. A [`View`] is a received message whose header was checked once. Its accessors read the bytes
//! in place and cannot fail. A [`Header`] is a value to send. [`Header::emit`] writes it into the caller's
//! buffer. Every view can be encoded again. Nothing here allocates, reads a clock or keeps state, and no input causes a
//! panic.
//!
//! ```
//! use rpcrdma_proto::wire::{Body, Chunks, Flags, Header, Revision, Segment, Version, View};
//!
//! let segment = Segment { handle: 7, length: 4096, offset: 0x1000 };
//! let reply = Some(std::slice::from_ref(&segment));
//! let chunks = Chunks { inv_handle: 7, reply, ..Chunks::NONE };
//! let header = Header { xid: 1, credit: 32, received: None, flags: Flags::NONE, body: Body::Msg(chunks) };
//! let mut buffer = [0; 128];
//! let len = header.emit(&mut buffer, Version::V2, Revision::Ietf00)?;
//!
//! let view = View::check(&buffer[..len], Revision::Ietf00).expect("a valid header");
//! assert_eq!(view.reply_chunk().expect("a Reply chunk").total_length(), 4096);
//! assert_eq!(view.to_string(), "v2 MSG xid=0x00000001 credit=0x20 inv_handle=0x7 reply=[0x7:4096@0x1000]");
//! # Ok::<(), rpcrdma_proto::wire::EncodeError>(())
//! ```
//!
//! | file | holds |
//! | --- | --- |
//! | `codes` | versions, revisions, header types, flags |
//! | `view`, `header` | a received header, a header to send |
//! | `head` | fast-path header decoding |
//! | `chunks` | segments and chunk lists, both ways |
//! | `error` | header errors; the protocol's own errors |
//! | [`properties`], [`optional`] | version 2: properties, and operations that change them |
//! | [`private_data`] | version 1: properties in the connect message |
//! | [`rpc`] | RFC 5531 call and reply headers |
//! | `word` | words of checked bytes |
//! | `display` | one line of text for a header |
#![forbid(unsafe_code)]

mod chunks;
mod codes;
mod display;
mod error;
mod head;
mod header;
#[cfg(any(test, feature = "testing"))]
#[doc(hidden)]
#[path = "../../tests/harness/invariants.rs"]
pub mod invariants;
pub mod optional;
pub mod private_data;
pub mod properties;
pub mod rpc;
mod view;
mod word;

#[cfg(test)]
mod tests;
#[cfg(test)]
mod tests_golden;
#[cfg(test)]
mod tests_limits;
#[cfg(test)]
mod tests_rpc;

pub use chunks::{ChunkCounts, Chunks, READ_SEGMENT_LEN, ReadSegment, SEGMENT_LEN, Segment, WriteChunk, WriteList};
pub use codes::{Flags, HeaderType, Revision, Version};
pub use error::{ErrorBody, WireError, WireErrorKind};
pub use head::{Head, HeadLayout, SingleChunks};
pub use header::{Body, Header, WINDOWED_LEN, emit_msg, emit_windowed, emit_windowed_single, msg_len};
pub use rpcrdma_xdr as xdr;
pub use rpcrdma_xdr::{BadXdr, EncodeError};
pub use view::{COMMON_LEN, CheckedHeader, ChunkLimits, ERR_VERS_LEN, View, ViewBody};
