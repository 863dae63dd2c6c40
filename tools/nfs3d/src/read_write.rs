//! READ, WRITE, COMMIT, without copies between the file and registered memory.
#![forbid(unsafe_code)]

use std::os::fd::{AsFd, BorrowedFd};

use rpcrdma::service::ResultWriter;
use rpcrdma::typed::Answer;
use rpcrdma::xdr::Bulk;
use rustix::fs::{Stat, fdatasync, fstat, fsync};
use rustix::io::{self, Errno, pwrite};

use crate::attr::{fattr, now, wcc};
use crate::lines;
use crate::nfs::{Answered, Call, TRANSFER};
use crate::nfs3::nfs_v3::Read;
use crate::nfs3::*;
use crate::node::{Node, Opened};
use crate::status::{Outcome, Results};

impl Call<'_> {
    pub(crate) fn read(&self, args: Read3Args<'_>, mut answer: Answer<'_, Read>) -> Answered {
        let Read3Args { file, offset, count } = args;
        let found = self.export.find(file);
        let outcome = found.as_ref().map_err(|&status| status).and_then(|node| {
            let room = answer.data().map_err(|_| Nfsstat3::ErrServerfault)?;
            self.read_into(node, offset, room, count.min(TRANSFER) as usize)
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
    fn read_into(&self, node: &Node, offset: u64, mut room: ResultWriter<'_>, most: usize) -> Outcome<(usize, Stat)> {
        let file = node.reader(&self.who, node.stat()?.st_uid)?;
        let failed = |error| Errno::from_io_error(&error).unwrap_or(Errno::IO);
        let len = room.read_from(file, offset, most).map_err(failed)?;
        // The current size: bytes beyond it did not exist at the read.
        Ok((len, fstat(file)?))
    }

    pub(crate) fn write(&self, args: Write3Args<'_>) -> Results<Write3Resok, Write3Resfail> {
        let Write3Args { file, offset, count, stable, data } = args;
        if data.len() != count as usize {
            return Err(Nfsstat3::ErrInval.into());
        }
        let node = self.export.find(file)?;
        let outcome = self.write_all(&node, offset, data.bytes(), stable);
        let file_wcc = wcc(None, &node);
        let done = |count| Write3Resok { file_wcc, count, committed: stable, verf: self.export.verifier() };
        outcome.map(done).map_err(|status| (status, Write3Resfail { file_wcc }))
    }

    /// The file, open for data.
    fn writer<'n>(&self, node: &'n Node) -> Outcome<Opened<'n>> {
        self.export.check_writable()?;
        node.writer(&self.who, node.stat()?.st_uid)
    }

    /// Writes as the user, with the requested stability. A full disk shortens the count.
    fn write_all(&self, node: &Node, offset: u64, data: &[u8], stable: StableHow) -> Outcome<u32> {
        let file = self.writer(node)?;
        let end = offset.checked_add(data.len() as u64).and_then(|end| i64::try_from(end).ok());
        end.ok_or(Nfsstat3::ErrFbig)?;
        // With the user's privileges the kernel clears set-ID bits, and denies reserved blocks and quotas.
        let (len, synced) = self.who.act(|| {
            let len = write_at(file.as_fd(), data, offset)?;
            let synced = match stable {
                StableHow::Unstable => Ok(()),
                StableHow::DataSync => fdatasync(file.as_fd()),
                StableHow::FileSync => fsync(file.as_fd()),
            };
            Ok((len, synced))
        })?;
        self.check_sync(synced)?;
        Ok(len as u32)
    }

    /// Earlier writes may be lost with a failed sync.
    fn check_sync(&self, synced: io::Result<()>) -> Outcome<()> {
        Ok(synced.inspect_err(|error| {
            let line = format_args!("fsync: {error}: clients are asked to write again what was not committed");
            lines::log(log::Level::Error, "times that fsync failed", line);
            self.export.lost_data();
        })?)
    }

    pub(crate) fn commit(&self, args: Commit3Args<'_>) -> Results<Commit3Resok, Commit3Resfail> {
        let node = self.export.find(args.file)?;
        // Syncs the whole file, whatever the range. A writer may do so.
        let outcome = self.writer(&node).and_then(|file| self.check_sync(self.who.act(|| Ok(fsync(file.as_fd())))?));
        let file_wcc = wcc(None, &node);
        let done = |()| Commit3Resok { file_wcc, verf: self.export.verifier() };
        outcome.map(done).map_err(|status| (status, Commit3Resfail { file_wcc }))
    }
}

/// Writes at an offset. Returns how many bytes were written: all, or fewer if a later part failed.
fn write_at(file: BorrowedFd<'_>, data: &[u8], offset: u64) -> io::Result<usize> {
    let mut len = 0;
    while len < data.len() {
        match pwrite(file, &data[len..], offset + len as u64) {
            Ok(0) => return Err(Errno::IO),
            Ok(more) => len += more,
            Err(Errno::INTR) => {}
            Err(_) if len > 0 => break,
            Err(error) => return Err(error),
        }
    }
    Ok(len)
}
