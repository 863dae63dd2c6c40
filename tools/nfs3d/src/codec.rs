//! Arguments out of a call, results into its reply.
//!
//! Arguments are read in place: names and handles are of whatever length a client claims, and nothing is
//! allocated for them. What has no variable length is decoded by `nfs3_types`, which encodes the results too.
#![forbid(unsafe_code)]

use nfs3_types::nfs3::{Nfs3Option, Nfs3Result, nfs_fh3, nfsstat3};
use nfs3_types::xdr_codec::{Opaque, Pack, Unpack};
use rpcrdma::xdr::{BadXdr, Reader};
use rpcrdma::{Refusal, ServerCall};

use crate::handles::{FH_MAX, FileHandle};

/// What most of the server's functions give: a value, or the status that the client gets.
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

    /// `nfs_fh3`, and no more.
    pub(crate) fn only_handle(mut self) -> Result<FileHandle, Refusal> {
        let handle = self.handle()?;
        self.end()?;
        Ok(handle)
    }

    /// `diropargs3`: a directory, and a name in it.
    pub(crate) fn entry(&mut self) -> Result<(FileHandle, &'a [u8]), Refusal> {
        Ok((self.handle()?, self.opaque()?))
    }

    /// A name, a path, or data.
    pub(crate) fn opaque(&mut self) -> Result<&'a [u8], Refusal> {
        self.0.opaque(usize::MAX, "opaque").map_err(garbage)
    }

    /// The same, in the call's Read chunk if it has one: then its length stays in the message, and it belongs behind that.
    pub(crate) fn bulk(&mut self, call: &'a ServerCall) -> Result<&'a [u8], Refusal> {
        let Some(data) = call.read_chunk(0) else { return self.opaque() };
        let len = self.u32()? as usize;
        let fits = call.read_chunk_at(0) == Some(self.at()) && data.len() == len;
        if fits { Ok(data) } else { Err(Refusal::GarbageArguments) }
    }

    pub(crate) fn u32(&mut self) -> Result<u32, Refusal> {
        self.0.u32("word").map_err(garbage)
    }

    /// Something of a length that its own words bound.
    pub(crate) fn get<T: Unpack>(&mut self) -> Result<T, Refusal> {
        let (value, len) = T::unpack(&mut self.0.rest()).map_err(|_| Refusal::GarbageArguments)?;
        self.0.bytes(len, "value").map_err(garbage)?;
        Ok(value)
    }

    /// Where the next argument is.
    fn at(&self) -> usize {
        self.0.at()
    }

    /// There must be no more.
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

/// An outcome, with what goes with a failure.
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
