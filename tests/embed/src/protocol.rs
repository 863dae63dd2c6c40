//! Protocol of clients and servers.
//!
//! ```text
//! typedef opaque key<1024>;
//! typedef opaque value<262144>;                 /* the only DDP-eligible item */
//! union found switch (bool there) { case TRUE: value is; case FALSE: void; };
//! struct page { key names<>; bool more; };
//!
//! found  GET(key)         = 1;
//! void   PUT(key, value)  = 2;
//! bool   DELETE(key)      = 3;                  /* true if it existed */
//! page   LIST(key, key)   = 4;                  /* a prefix; the keys after the second key, in order */
//! ```

/// In the user-defined range (RFC 5531 §13).
pub const PROGRAM: u32 = 0x2000_4B56;
/// Version of [`PROGRAM`].
pub const VERSION: u32 = 1;

/// Returns the value of a key.
pub const GET: u32 = 1;
/// Sets the value of a key.
pub const PUT: u32 = 2;
/// Deletes the value of a key.
pub const DELETE: u32 = 3;
/// Returns a page of the names with a prefix.
pub const LIST: u32 = 4;

/// Longest key, in bytes.
pub const MAX_KEY: usize = 1024;
/// Longest value, in bytes.
pub const MAX_VALUE: usize = 256 << 10;
/// Longest value in the message of its PUT, in bytes.
pub const MAX_INLINE: usize = 256;
/// Longest page of names, in bytes.
pub const MAX_PAGE: usize = 2048;
