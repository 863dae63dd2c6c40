//! Protocol of clients and servers, compiled from `kv.x` and `kv.placement.toml`.
#![allow(missing_docs)]

include!(concat!(env!("OUT_DIR"), "/kv.rs"));

/// Longest value in the message of its PUT, in bytes.
pub const MAX_INLINE: usize = 256;
/// Maximum bytes of a page of names, so that it fits the `max_reply` of KV_LIST.
pub const MAX_PAGE: usize = 2048;
