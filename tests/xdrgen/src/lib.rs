//! Generated types of several files, and a table of them.

use rpcrdma_xdr::{BadXdr, Decode, Encode, decode, encode};

/// Decodes a value, and encodes it again.
pub type Again = fn(&[u8]) -> Result<Vec<u8>, BadXdr>;

/// Index of a type in its schema, and its code.
pub type Case = (usize, Again);

/// A file and its types.
#[derive(Clone, Copy, Debug)]
pub struct File {
    /// Name without extension.
    pub name: &'static str,
    /// Content.
    pub text: &'static str,
    /// Types with code of their own.
    pub types: &'static [Case],
}

fn again<'a, T: Decode<'a> + Encode>(bytes: &'a [u8]) -> Result<Vec<u8>, BadXdr> {
    let value: T = decode(bytes)?;
    Ok(encode(&value).expect("it was decoded within its bounds"))
}

include!(concat!(env!("OUT_DIR"), "/files.rs"));
