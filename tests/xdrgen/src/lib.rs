//! Generated types of several files, and a table of the types.

use rpcrdma_xdr::{BadXdr, Decode, Encode, decode, encode};

/// Function that decodes a value and encodes it again.
pub type RoundTrip = fn(&[u8]) -> Result<Vec<u8>, BadXdr>;

/// Index of a type in its schema, and its function.
pub type TypeCase = (usize, RoundTrip);

/// A file and its types.
#[derive(Clone, Copy, Debug)]
pub struct File {
    /// Name without extension.
    pub name: &'static str,
    /// Content.
    pub text: &'static str,
    /// Types, without aliases.
    pub types: &'static [TypeCase],
}

fn round_trip<'a, T: Decode<'a> + Encode>(bytes: &'a [u8]) -> Result<Vec<u8>, BadXdr> {
    let value: T = decode(bytes)?;
    Ok(encode(&value).expect("a decoded value is within its bounds"))
}

include!(concat!(env!("OUT_DIR"), "/files.rs"));
