//! What clients and servers agree on.
//!
//! ```text
//! typedef opaque key<1024>;
//! typedef opaque value<262144>;                 /* the one item that may be reduced to a chunk */
//! union found switch (bool there) { case TRUE: value is; case FALSE: void; };
//! struct page { key names<>; bool more; };
//!
//! found  GET(key)         = 1;
//! void   PUT(key, value)  = 2;
//! bool   DELETE(key)      = 3;                  /* whether it was there */
//! page   LIST(key, key)   = 4;                  /* a prefix; those behind this one, in order */
//! ```

/// Of everybody's own (RFC 5531 §13).
pub const PROGRAM: u32 = 0x2000_4B56;
/// Of the program.
pub const VERSION: u32 = 1;

/// The value of a key.
pub const GET: u32 = 1;
/// A new value for a key.
pub const PUT: u32 = 2;
/// No value for a key.
pub const DELETE: u32 = 3;
/// The names that begin alike, some at a time.
pub const LIST: u32 = 4;

/// Most bytes of a key.
pub const MAX_KEY: usize = 1024;
/// Most bytes of a value.
pub const MAX_VALUE: usize = 256 << 10;
/// Values up to so many bytes travel within the message of their PUT.
pub const MAX_INLINE: usize = 256;
/// Most bytes of a page of names.
pub const MAX_PAGE: usize = 2048;
