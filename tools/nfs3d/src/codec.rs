//! Decoding of arguments, encoding of results.
//!
//! Arguments are read in place: clients choose the length of names and handles, and nothing is allocated for them.
//! `nfs3_types` decodes the rest, and encodes the results.
#![forbid(unsafe_code)]

use nfs3_types::nfs3::{Nfs3Option, Nfs3Result, nfs_fh3, nfsstat3};
use nfs3_types::xdr_codec::{Opaque, Pack, Unpack};
use rpcrdma::xdr::{BadXdr, Reader};
use rpcrdma::{Refusal, ServerCall};

use crate::handles::{FH_MAX, FileHandle};

/// A value, or the status for the client.
pub(crate) type Outcome<T> = Result<T, nfsstat3>;

/// The arguments of a call.
pub(crate) struct Args<'a>(Reader<'a>);

/// Any failure to decode.
fn garbage(_: BadXdr) -> Refusal {
    Refusal::GarbageArguments
}

impl<'a> Args<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self(Reader::new(bytes))
    }

    /// `nfs_fh3`.
    pub(crate) fn handle(&mut self) -> Result<FileHandle, Refusal> {
        let bytes = self.0.opaque(FH_MAX, "handle").map_err(garbage)?;
        Ok(bytes.iter().copied().collect())
    }

    /// `nfs_fh3` alone.
    pub(crate) fn only_handle(mut self) -> Result<FileHandle, Refusal> {
        let handle = self.handle()?;
        self.end()?;
        Ok(handle)
    }

    /// `diropargs3`: a directory and a name.
    pub(crate) fn entry(&mut self) -> Result<(FileHandle, &'a [u8]), Refusal> {
        Ok((self.handle()?, self.opaque()?))
    }

    /// A name, path or data.
    pub(crate) fn opaque(&mut self) -> Result<&'a [u8], Refusal> {
        self.0.opaque(usize::MAX, "opaque").map_err(garbage)
    }

    /// The same, from the call's Read chunk, if any. Its length word stays in the message.
    pub(crate) fn bulk(&mut self, call: &'a ServerCall) -> Result<&'a [u8], Refusal> {
        let Some(data) = call.read_chunk(0) else { return self.opaque() };
        let len = self.u32()? as usize;
        let fits = call.read_chunk_at(0) == Some(self.at()) && data.len() == len;
        if fits { Ok(data) } else { Err(Refusal::GarbageArguments) }
    }

    pub(crate) fn u32(&mut self) -> Result<u32, Refusal> {
        self.0.u32("word").map_err(garbage)
    }

    /// A value whose own words give its length.
    pub(crate) fn get<T: Unpack>(&mut self) -> Result<T, Refusal> {
        let (value, len) = T::unpack(&mut self.0.rest()).map_err(|_| Refusal::GarbageArguments)?;
        self.0.bytes(len, "value").map_err(garbage)?;
        Ok(value)
    }

    /// Position of the next argument.
    fn at(&self) -> usize {
        self.0.at()
    }

    /// Checks that nothing is left.
    pub(crate) fn end(&self) -> Result<(), Refusal> {
        if self.0.rest().is_empty() { Ok(()) } else { Err(Refusal::GarbageArguments) }
    }
}

/// Writes the results of a call.
pub(crate) fn reply<T: Pack>(call: &mut ServerCall, results: &T) -> Result<(), Refusal> {
    let mut room = call.reply_writer();
    results.pack(&mut room).map_err(|_| Refusal::SystemError)?;
    Ok(())
}

/// An outcome, with the data of a failure.
pub(crate) fn or_fail<T, E>(outcome: Outcome<T>, failure: E) -> Nfs3Result<T, E> {
    match outcome {
        Ok(results) => Nfs3Result::Ok(results),
        Err(status) => Nfs3Result::Err((status, failure)),
    }
}

pub(crate) fn optional<T: Pack + Unpack>(value: Option<T>) -> Nfs3Option<T> {
    value.map_or(Nfs3Option::None, Nfs3Option::Some)
}

pub(crate) fn given<T: Pack + Unpack + Copy>(value: &Nfs3Option<T>) -> Option<T> {
    match value {
        Nfs3Option::Some(value) => Some(*value),
        Nfs3Option::None => None,
    }
}

pub(crate) fn fh(handle: &FileHandle) -> nfs_fh3 {
    nfs_fh3 { data: Opaque::owned(handle.to_vec()) }
}
