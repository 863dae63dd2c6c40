//! READ, WRITE and COMMIT, without copies between the file and registered memory.
#![forbid(unsafe_code)]

use std::os::fd::{AsFd, BorrowedFd};

use rpcrdma::service::ResultWriter;
use rpcrdma::typed::ReplySender;
use rpcrdma::xdr::Bulk;
use rustix::fs::{Stat, fdatasync, fstat, fsync};
use rustix::io::{self, Errno, pwrite};

use crate::attr::{fattr, post_op_attr, wcc_data};
use crate::lines;
use crate::nfs::{Call, HandlerResult, TRANSFER};
use crate::nfs3::nfs_v3::Read;
use crate::nfs3::*;
use crate::node::Node;
use crate::status::{Outcome, Results};

impl Call<'_> {
    pub(crate) fn read(&self, args: Read3Args<'_>, mut answer: ReplySender<'_, Read>) -> HandlerResult {
        let Read3Args { file, offset, count } = args;
        let found = self.export.find(file);
        let outcome = found.as_ref().map_err(|&status| status).and_then(|node| {
            let writer = answer.data().map_err(|_| Nfsstat3::ErrServerfault)?;
            self.read_into(node, offset, writer, count.min(TRANSFER) as usize)
        });
        answer.send(&match outcome {
            Ok((len, stat)) => Read3Res::Ok(Read3Resok {
                // The attributes are always present, because clients expect the results before the data to have a fixed
                // length.
                file_attributes: Some(fattr(&stat)),
                count: len as u32,
                eof: offset.saturating_add(len as u64) >= stat.st_size as u64,
                data: Bulk::placed(len),
            }),
            Err(status) => {
                let file_attributes = found.ok().and_then(|node| post_op_attr(&node));
                Read3Res::Default(status, Read3Resfail { file_attributes })
            }
        })
    }

    /// Reads `max` bytes, or to the end of the file. Returns the number of bytes and the attributes.
    fn read_into(&self, node: &Node, offset: u64, mut writer: ResultWriter<'_>, max: usize) -> Outcome<(usize, Stat)> {
        let file = node.reader(&self.user, node.stat()?.st_uid)?;
        let failed = |error| Errno::from_io_error(&error).unwrap_or(Errno::IO);
        let len = writer.read_from(file, offset, max).map_err(failed)?;
        // The size is read after the data. If the file grew meanwhile, `eof` is false and the client reads on.
        Ok((len, fstat(file)?))
    }

    pub(crate) fn write(&self, args: Write3Args<'_>) -> Results<Write3Resok, Write3Resfail> {
        let Write3Args { file, offset, count, stable, data } = args;
        if data.len() != count as usize {
            return Err(Nfsstat3::ErrInval.into());
        }
        let node = self.export.find(file)?;
        let outcome = self.write_all(&node, offset, data.bytes(), stable);
        let file_wcc = wcc_data(None, &node);
        let done = |count| Write3Resok { file_wcc, count, committed: stable, verf: self.export.verifier() };
        outcome.map(done).map_err(|status| (status, Write3Resfail { file_wcc }))
    }

    /// Writes as the user, with the requested stability. Returns the number of written bytes, which is less
    /// than requested on a full disk.
    fn write_all(&self, node: &Node, offset: u64, data: &[u8], stable: StableHow) -> Outcome<u32> {
        self.export.check_writable()?;
        let file = node.writer(&self.user, node.owner_for_write()?)?;
        let end = offset.checked_add(data.len() as u64).and_then(|end| i64::try_from(end).ok());
        end.ok_or(Nfsstat3::ErrFbig)?;
        // Because this runs as the user, the kernel clears set-ID bits, and enforces reserved blocks and quotas.
        let (len, synced) = self.user.run_as(|| {
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

    /// Changes the write verifier after a failed sync, because earlier writes may be lost.
    fn check_sync(&self, synced: io::Result<()>) -> Outcome<()> {
        Ok(synced.inspect_err(|error| {
            let line = format_args!(
                "cannot make written data stable: {error}: clients will write uncommitted data again; check the disk \
                 and the file system of the exported directory"
            );
            lines::log(log::Level::Error, "failures to make written data stable", line);
            self.export.change_verifier();
        })?)
    }

    /// Syncs the whole file, although COMMIT names a range. The user must be allowed to write to the file.
    fn sync_written(&self, node: &Node) -> Outcome<()> {
        self.export.check_writable()?;
        let file = node.writer(&self.user, node.stat()?.st_uid)?;
        self.check_sync(self.user.run_as(|| Ok(fsync(file.as_fd())))?)
    }

    pub(crate) fn commit(&self, args: Commit3Args<'_>) -> Results<Commit3Resok, Commit3Resfail> {
        let node = self.export.find(args.file)?;
        let outcome = self.sync_written(&node);
        let file_wcc = wcc_data(None, &node);
        let done = |()| Commit3Resok { file_wcc, verf: self.export.verifier() };
        outcome.map(done).map_err(|status| (status, Commit3Resfail { file_wcc }))
    }
}

/// Writes at an offset. Returns the number of written bytes: all, or fewer if a later part failed.
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

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::export::{Export, Options};
    use crate::handles::HandleSource;
    use crate::identity::{Policy, Squash};
    use crate::lock::lock;

    /// Log lines of this process.
    static LINES: Mutex<String> = Mutex::new(String::new());

    struct Recorder;

    impl log::Log for Recorder {
        fn enabled(&self, _: &log::Metadata<'_>) -> bool {
            true
        }

        fn log(&self, record: &log::Record<'_>) {
            lock(&LINES).push_str(&format!("{}\n", record.args()));
        }

        fn flush(&self) {}
    }

    #[test]
    fn a_failed_sync_is_logged_without_the_name_of_a_system_call() {
        log::set_logger(&Recorder).expect("no other logger");
        log::set_max_level(log::LevelFilter::Warn);
        let directory = tempfile::tempdir().expect("a directory");
        let policy = Policy::new(Squash::None);
        let (read_only, sync, handles, key, max_open_files) = (false, false, HandleSource::Names, [7; 32], 100);
        let options = Options { read_only, sync, policy, handles, key, max_open_files };
        let export = Export::open(directory.path(), options).expect("a directory");
        let (call, before) = (Call { export: &export, user: policy.own(), host: None }, export.verifier());
        assert_eq!(call.check_sync(Err(Errno::IO)), Err(Nfsstat3::ErrIo));
        assert_ne!(export.verifier(), before);
        let lines = lock(&LINES).clone();
        let expected = "cannot make written data stable: Input/output error (os error 5): clients will write";
        assert!(lines.contains(expected) && !lines.contains("fsync"), "{lines}");
    }
}
