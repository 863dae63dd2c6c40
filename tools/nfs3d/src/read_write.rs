//! READ, WRITE, COMMIT, without copies between the file and registered memory.
#![forbid(unsafe_code)]

use std::os::fd::AsFd;

use rpcrdma::service::ResultWriter;
use rpcrdma::typed::Answer;
use rpcrdma::xdr::Bulk;
use rustix::fs::{Stat, fdatasync, fstat, fsync};
use rustix::io::{Errno, pwrite};

use crate::attr::{fattr, now, wcc};
use crate::export::Export;
use crate::identity::Identity;
use crate::lines;
use crate::nfs::{Answered, TRANSFER};
use crate::nfs3::nfs_v3::Read;
use crate::nfs3::*;
use crate::node::Node;
use crate::status::{Outcome, Results, failed, status};

pub(crate) fn read(export: &Export, who: &Identity, args: Read3Args<'_>, mut answer: Answer<'_, Read>) -> Answered {
    let Read3Args { file, offset, count } = args;
    let found = export.find(file);
    let outcome = found.as_ref().map_err(|&status| status).and_then(|node| {
        let room = answer.data().map_err(|_| Nfsstat3::ErrServerfault)?;
        read_into(node, who, offset, room, count.min(TRANSFER) as usize)
    });
    answer.send(&match outcome {
        Ok((len, stat)) => Read3Res::Ok(Read3Resok {
            // Always with attributes: clients locate the data by the length before it.
            file_attributes: Some(fattr(&stat)),
            count: len as u32,
            eof: offset.saturating_add(len as u64) >= stat.st_size as u64,
            data: Bulk::placed(len),
        }),
        Err(status) => {
            let file_attributes = found.ok().and_then(|node| now(&node));
            Read3Res::Default(status, Read3Resfail { file_attributes })
        }
    })
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
    let failed = |error: &std::io::Error| Errno::from_io_error(error).map_or(Nfsstat3::ErrIo, status);
    let len = room.read_from(file.as_fd(), offset, most).map_err(|error| failed(&error))?;
    // The current size: bytes beyond it did not exist at the read.
    Ok((len, fstat(&file).map_err(status)?))
}

pub(crate) fn write(export: &Export, who: &Identity, args: Write3Args<'_>) -> Results<Write3Resok, Write3Resfail> {
    let Write3Args { file, offset, count, stable, data } = args;
    if data.len() != count as usize {
        return Err(failed(Nfsstat3::ErrInval));
    }
    let node = export.find(file).map_err(failed)?;
    let outcome = export.check_writable().and_then(|()| write_all(export, &node, who, offset, data.bytes(), stable));
    let file_wcc = wcc(None, &node);
    let done = |count| Write3Resok { file_wcc, count, committed: stable, verf: export.verifier() };
    outcome.map(done).map_err(|status| (status, Write3Resfail { file_wcc }))
}

/// Writes, with the requested stability. A full disk shortens the count.
fn write_all(
    export: &Export,
    node: &Node,
    who: &Identity,
    offset: u64,
    data: &[u8],
    stable: StableHow,
) -> Outcome<u32> {
    node.check_regular()?;
    let end = offset.checked_add(data.len() as u64).and_then(|end| i64::try_from(end).ok());
    end.ok_or(Nfsstat3::ErrFbig)?;
    let file = node.writer(who, node.stat()?.st_uid)?;
    let mut len = 0;
    while len < data.len() {
        match pwrite(&file, &data[len..], offset + len as u64) {
            Ok(0) => return Err(Nfsstat3::ErrIo),
            Ok(more) => len += more,
            Err(Errno::INTR) => {}
            Err(_) if len > 0 => break,
            Err(error) => return Err(status(error)),
        }
    }
    let synced = match stable {
        StableHow::Unstable => Ok(()),
        StableHow::DataSync => fdatasync(file.as_fd()),
        StableHow::FileSync => fsync(file.as_fd()),
    };
    synced.map_err(|error| sync_failed(export, error))?;
    Ok(len as u32)
}

/// Earlier writes may be lost with a failed sync.
fn sync_failed(export: &Export, error: Errno) -> Nfsstat3 {
    let line = format_args!("fsync: {error}: clients are asked to write again what was not committed");
    lines::log(log::Level::Error, "times that fsync failed", line);
    export.lost_data();
    status(error)
}

pub(crate) fn commit(export: &Export, who: &Identity, args: Commit3Args<'_>) -> Results<Commit3Resok, Commit3Resfail> {
    let node = export.find(args.file).map_err(failed)?;
    // Syncs the whole file, whatever the range. A writer may do so.
    let outcome = export.check_writable().and_then(|()| {
        node.check_regular()?;
        let file = node.writer(who, node.stat()?.st_uid)?;
        fsync(file.as_fd()).map_err(|error| sync_failed(export, error))
    });
    let file_wcc = wcc(None, &node);
    let done = |()| Commit3Resok { file_wcc, verf: export.verifier() };
    outcome.map(done).map_err(|status| (status, Commit3Resfail { file_wcc }))
}
