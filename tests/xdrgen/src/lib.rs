//! Generated types of several files, and a table of the types.

use rpcrdma_xdr::{BadXdr, Decode, Encode, decode, encode};

/// A function that decodes a value and encodes the result.
pub type RoundTrip = fn(&[u8]) -> Result<Vec<u8>, BadXdr>;

/// A type: its index in its schema, and its function.
pub type TypeCase = (usize, RoundTrip);

/// A specification and its types.
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
