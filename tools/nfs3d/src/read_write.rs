//! READ, WRITE, COMMIT, without copies between the file and registered memory.
#![forbid(unsafe_code)]

use std::os::fd::AsFd;

use nfs3_types::nfs3::{
    COMMIT3res, COMMIT3resfail, COMMIT3resok, Nfs3Result, READ3resfail, WRITE3res, WRITE3resfail, WRITE3resok,
    nfsstat3, stable_how,
};
use nfs3_types::xdr_codec::{Pack, Void};
use rpcrdma::service::ResultWriter;
use rpcrdma::xdr::padded;
use rpcrdma::{Refusal, ServerCall};
use rustix::fs::{Stat, fdatasync, fstat, fsync};
use rustix::io::{Errno, pwrite};

use crate::attr::{fattr, no_wcc, now, wcc};
use crate::codec::{Args, Outcome, optional, or_fail, reply};
use crate::export::Export;
use crate::identity::Identity;
use crate::lines;
use crate::nfs::{INLINE_READ, TRANSFER};
use crate::node::Node;
use crate::status::status;

/// Bytes of `READ3res` before the data: status, attributes, count, eof, length.
const READ_HEAD: usize = 4 + 88 + 4 + 4 + 4;

pub(crate) fn read(export: &Export, who: &Identity, call: &mut ServerCall) -> Result<(), Refusal> {
    let mut args = Args::new(call.args());
    let (handle, offset, count) = (args.handle()?, args.get::<u64>()?, args.u32()?.min(TRANSFER) as usize);
    args.end()?;
    let found = export.find(&handle);
    let node = found.as_ref().ok();
    // An empty Write chunk requests inline data, as does none.
    let direct = call.write_chunk_capacity(0).filter(|&room| room > 0);
    let outcome = found.as_ref().map_err(|&status| status).and_then(|node| match direct {
        Some(room) => {
            let result = call.result_writer(0).map_err(|_| nfsstat3::NFS3ERR_SERVERFAULT)?;
            read_into(node, who, offset, result, count.min(room))
        }
        None => {
            // A multiple of 4, for the padding.
            let most = (call.reply_room().saturating_sub(READ_HEAD) & !3).min(INLINE_READ);
            let mut results = call.reply_writer();
            results.put_zeroes(READ_HEAD).map_err(|_| nfsstat3::NFS3ERR_SERVERFAULT)?;
            read_into(node, who, offset, results, count.min(most))
        }
    });
    match outcome {
        Ok((len, stat)) => {
            let eof = offset.saturating_add(len as u64) >= stat.st_size as u64;
            let inline = if direct.is_some() { 0 } else { padded(len) };
            // The data is in place, and its padding is 0.
            let room = call.reply_mut(READ_HEAD + inline)?;
            // Always with attributes: clients locate the data by the length before it.
            let mut head = &mut room[..READ_HEAD];
            let words = (nfsstat3::NFS3_OK, optional(Some(fattr(&stat))), len as u32, eof, len as u32);
            let packed = words.0.pack(&mut head).and_then(|_| words.1.pack(&mut head));
            let packed = packed.and_then(|_| words.2.pack(&mut head)).and_then(|_| words.3.pack(&mut head));
            packed.and_then(|_| words.4.pack(&mut head)).map_err(|_| Refusal::SystemError)?;
            Ok(())
        }
        Err(status) => {
            call.set_result_len(0, 0);
            let file_attributes = node.map_or_else(|| optional(None), |node| now(node));
            let failure: Nfs3Result<Void, _> = or_fail(Err(status), READ3resfail { file_attributes });
            reply(call, &failure)
        }
    }
}

/// Reads `most` bytes, or to the end of the file.
fn read_into(
    node: &Node,
    who: &Identity,
    offset: u64,
    mut room: ResultWriter<'_>,
    most: usize,
) -> Outcome<(usize, Stat)> {
    node.check_regular()?;
    let owner = node.stat()?.st_uid;
    let file = node.reader(who, owner)?;
    let failed = |error: &std::io::Error| Errno::from_io_error(error).map_or(nfsstat3::NFS3ERR_IO, status);
    let len = room.read_from(file.as_fd(), offset, most).map_err(|error| failed(&error))?;
    // The current size: bytes beyond it did not exist at the read.
    Ok((len, fstat(&file).map_err(status)?))
}

pub(crate) fn write(export: &Export, who: &Identity, call: &mut ServerCall) -> Result<(), Refusal> {
    let mut args = Args::new(call.args());
    let (handle, offset, count) = (args.handle()?, args.get::<u64>()?, args.u32()? as usize);
    let stable: stable_how = args.get()?;
    let data = args.bulk(call)?;
    args.end()?;
    let results = if data.len() == count {
        written(export, who, export.find(&handle), offset, data, stable)
    } else {
        or_fail(Err(nfsstat3::NFS3ERR_INVAL), WRITE3resfail { file_wcc: no_wcc() })
    };
    reply(call, &results)
}

fn written(
    export: &Export,
    who: &Identity,
    node: Outcome<std::sync::Arc<Node>>,
    offset: u64,
    data: &[u8],
    stable: stable_how,
) -> WRITE3res {
    let node = match node {
        Ok(node) => node,
        Err(status) => return or_fail(Err(status), WRITE3resfail { file_wcc: no_wcc() }),
    };
    let outcome = export.check_writable().and_then(|()| write_all(export, &node, who, offset, data, stable));
    let file_wcc = wcc(None, &node);
    match outcome {
        Ok(count) => Nfs3Result::Ok(WRITE3resok { file_wcc, count, committed: stable, verf: export.verifier() }),
        Err(status) => Nfs3Result::Err((status, WRITE3resfail { file_wcc })),
    }
}

/// Writes, with the requested stability. A full disk shortens the count.
fn write_all(
    export: &Export,
    node: &Node,
    who: &Identity,
    offset: u64,
    data: &[u8],
    stable: stable_how,
) -> Outcome<u32> {
    node.check_regular()?;
    let end = offset.checked_add(data.len() as u64).and_then(|end| i64::try_from(end).ok());
    end.ok_or(nfsstat3::NFS3ERR_FBIG)?;
    let file = node.writer(who, node.stat()?.st_uid)?;
    let mut len = 0;
    while len < data.len() {
        match pwrite(&file, &data[len..], offset + len as u64) {
            Ok(0) => return Err(nfsstat3::NFS3ERR_IO),
            Ok(more) => len += more,
            Err(Errno::INTR) => {}
            Err(_) if len > 0 => break,
            Err(error) => return Err(status(error)),
        }
    }
    let synced = match stable {
        stable_how::UNSTABLE => Ok(()),
        stable_how::DATA_SYNC => fdatasync(file.as_fd()),
        stable_how::FILE_SYNC => fsync(file.as_fd()),
    };
    synced.map_err(|error| sync_failed(export, error))?;
    Ok(len as u32)
}

/// Earlier writes may be lost with a failed sync.
fn sync_failed(export: &Export, error: Errno) -> nfsstat3 {
    let line = format_args!("fsync: {error}: clients are asked to write again what was not committed");
    lines::log(log::Level::Error, "times that fsync failed", line);
    export.lost_data();
    status(error)
}

pub(crate) fn commit(export: &Export, who: &Identity, mut args: Args<'_>) -> Result<COMMIT3res, Refusal> {
    let handle = args.handle()?;
    let (_offset, _count) = (args.get::<u64>()?, args.u32()?);
    args.end()?;
    let node = match export.find(&handle) {
        Ok(node) => node,
        Err(status) => return Ok(or_fail(Err(status), COMMIT3resfail { file_wcc: no_wcc() })),
    };
    // Syncs the whole file, whatever the range. A writer may do so.
    let outcome = export.check_writable().and_then(|()| {
        node.check_regular()?;
        let file = node.writer(who, node.stat()?.st_uid)?;
        fsync(file.as_fd()).map_err(|error| sync_failed(export, error))
    });
    let file_wcc = wcc(None, &node);
    Ok(match outcome {
        Ok(()) => Nfs3Result::Ok(COMMIT3resok { file_wcc, verf: export.verifier() }),
        Err(status) => Nfs3Result::Err((status, COMMIT3resfail { file_wcc })),
    })
}
