//! CREATE, MKDIR, MKNOD.
#![forbid(unsafe_code)]

use std::cell::Cell;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rpcrdma::typed::{ReplySender, Signature};
use rustix::fs::{
    AtFlags, FileType, Mode, OFlags, Stat, Timespec, Timestamps, makedev, mkdirat, mknodat, openat, unlinkat,
};
use rustix::io::{self, Errno};

use crate::attr::{self, NewAttributes};
use crate::export::check_changeable_name;
use crate::nfs::{Call, HandlerResult};
use crate::nfs3::nfs_v3::{Create, Mkdir, Mknod};
use crate::nfs3::*;
use crate::node::Node;
use crate::remove::{RemovedFile, name_stat};
use crate::status::Outcome;

impl Call<'_> {
    /// Runs a change of a name in a directory and makes it stable. Also returns the directory's attributes before and
    /// after. `dots` is the status for `.` and `..`.
    pub(crate) fn update_dir<T>(
        &self,
        entry: Diropargs3<'_>,
        dots: Nfsstat3,
        run: impl FnOnce(&Node, &[u8]) -> Outcome<T>,
    ) -> (Outcome<T>, WccData) {
        let dir = match self.export.find_dir(entry.dir) {
            Ok(dir) => dir,
            Err(status) => return (Err(status), WccData::default()),
        };
        let _lock = dir.lock();
        let stat = dir.stat();
        let before = stat.as_ref().ok().map(attr::wcc_attr);
        let outcome = stat.and_then(|_| {
            self.export.check_writable()?;
            let name = check_changeable_name(entry.name.0, dots)?;
            self.export.prepare_sync(&dir)?;
            let done = run(&dir, name)?;
            self.export.sync_change(&dir)?;
            Ok(done)
        });
        (outcome, attr::wcc_data(before, &dir))
    }

    /// Creates a name in a directory, and sends the results that all such procedures share.
    pub(crate) fn create_name<P>(
        &self,
        entry: Diropargs3<'_>,
        answer: ReplySender<'_, P>,
        run: impl FnOnce(&Node, &[u8]) -> Outcome<Arc<Node>>,
    ) -> HandlerResult
    where
        P: for<'a> Signature<Results<'a> = Create3Res<'a>>,
    {
        self.create_name_and_finish(entry, answer, |_| Ok(()), run)
    }

    /// Creates a name in a directory, runs `finish` without the directory's lock, and sends the results.
    fn create_name_and_finish<P>(
        &self,
        entry: Diropargs3<'_>,
        answer: ReplySender<'_, P>,
        finish: impl FnOnce(&Node) -> Outcome<()>,
        run: impl FnOnce(&Node, &[u8]) -> Outcome<Arc<Node>>,
    ) -> HandlerResult
    where
        P: for<'a> Signature<Results<'a> = Create3Res<'a>>,
    {
        let (created, dir_wcc) = self.update_dir(entry, Nfsstat3::ErrExist, run);
        let created = created.and_then(|node| finish(&node).map(|()| node));
        let done = created.as_ref().map(|node| {
            let (obj, obj_attributes) = (Some(node.handle()), attr::post_op_attr(node));
            Create3Resok { obj, obj_attributes, dir_wcc }
        });
        answer.send(&done.map_err(|status| (*status, Create3Resfail { dir_wcc })).into())
    }

    /// Opens a new file with `O_PATH`, sets its remaining attributes, and makes it stable. Removes it if that fails.
    pub(crate) fn complete_creation(&self, dir: &Node, name: &[u8], remaining: &NewAttributes) -> Outcome<Arc<Node>> {
        self.complete_creation_with(dir, name, remaining, None)
    }

    /// Completes a creation with the descriptor that created a regular file, if there is one.
    fn complete_creation_with(
        &self,
        dir: &Node,
        name: &[u8],
        remaining: &NewAttributes,
        creator: Option<OwnedFd>,
    ) -> Outcome<Arc<Node>> {
        let created = name_stat(dir, name).ok_or(Nfsstat3::ErrNoent)?;
        let finished = self.export.look_up(dir, name, &self.user).and_then(|(node, _)| {
            if let Some(creator) = creator {
                node.keep_creator(&self.user, creator)?;
                // If the mode denies access, a server that is not root cannot open the file again.
                if self.user.is_fixed() && created.st_mode & 0o600 != 0o600 {
                    self.export.keep_open(&node, self.host);
                }
            }
            remaining.apply(&node, &self.user)?;
            self.export.sync_change(&node)?;
            Ok(node)
        });
        if finished.is_err() {
            self.discard(dir, name, &created);
        }
        finished
    }

    /// Removes a new file, unless its name now belongs to another file.
    fn discard(&self, dir: &Node, name: &[u8], created: &Stat) {
        let is_dir = FileType::from_raw_mode(created.st_mode) == FileType::Directory;
        let flags = if is_dir { AtFlags::REMOVEDIR } else { AtFlags::empty() };
        let is_same = |now: &RemovedFile| (now.stat.st_dev, now.stat.st_ino) == (created.st_dev, created.st_ino);
        let Some(mut file) = RemovedFile::find(dir, name).filter(is_same) else { return };
        if self.user.run_as(|| unlinkat(dir.fd(), name, flags)).is_ok() {
            file.forget(self.export, (dir, name));
        }
    }

    pub(crate) fn create(&self, args: Create3Args<'_>, answer: ReplySender<'_, Create>) -> HandlerResult {
        let existing_size = Cell::new(None);
        let set_existing_size = |node: &Node| match existing_size.take() {
            Some(size) => {
                NewAttributes { size: Some(size), ..NewAttributes::default() }.apply(node, &self.user)?;
                self.export.sync_change(node)
            }
            None => Ok(()),
        };
        self.create_name_and_finish(args.r#where, answer, set_existing_size, |dir, name| {
            let (new, must_be_new) = match &args.how {
                Createhow3::Exclusive(verifier) => return self.create_exclusive(dir, name, verifier),
                Createhow3::Guarded(new) => (new, true),
                Createhow3::Unchecked(new) => (new, false),
            };
            let new = NewAttributes::new(new)?;
            match self.make_file(dir, name, new.initial_mode()) {
                // The creation has set the mode.
                Ok(file) => self.complete_creation_with(dir, name, &NewAttributes { mode: None, ..new }, Some(file)),
                // Of the attributes, only the size applies.
                Err(Errno::EXIST) if !must_be_new => {
                    let (node, _) = self.export.look_up(dir, name, &self.user)?;
                    node.check_regular().map_err(|_| Nfsstat3::ErrExist)?;
                    existing_size.set(new.size);
                    Ok(node)
                }
                Err(error) => Err(error.into()),
            }
        })
    }

    fn make_file(&self, dir: &Node, name: &[u8], mode: Mode) -> io::Result<OwnedFd> {
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        self.user.run_as(|| openat(dir.fd(), name, flags, mode))
    }

    /// Handles an exclusive CREATE. An existing file with the client's verifier is the result of an earlier attempt.
    /// The file's times hold the verifier until the client sets them.
    fn create_exclusive(&self, dir: &Node, name: &[u8], verifier: &Createverf3) -> Outcome<Arc<Node>> {
        let [a, b, c, d, e, f, g, h] = *verifier;
        // All file systems store at least 31 bits of seconds.
        let seconds = |bytes| Timespec { tv_sec: i64::from(u32::from_be_bytes(bytes) & 0x7FFF_FFFF), tv_nsec: 0 };
        let times = Timestamps { last_access: seconds([a, b, c, d]), last_modification: seconds([e, f, g, h]) };
        match self.make_file(dir, name, Mode::empty()) {
            Ok(file) => {
                let new = NewAttributes { times: Some(times), ..NewAttributes::default() };
                self.complete_creation_with(dir, name, &new, Some(file))
            }
            Err(Errno::EXIST) => {
                let (node, stat) = self.export.look_up(dir, name, &self.user)?;
                let stored = (stat.st_atime, stat.st_mtime);
                let has_verifier = stored == (times.last_access.tv_sec, times.last_modification.tv_sec);
                let is_retry = has_verifier && node.check_regular().is_ok() && stat.st_size == 0;
                if is_retry { Ok(node) } else { Err(Nfsstat3::ErrExist) }
            }
            Err(error) => Err(error.into()),
        }
    }

    pub(crate) fn mkdir(&self, args: Mkdir3Args<'_>, answer: ReplySender<'_, Mkdir>) -> HandlerResult {
        self.create_name(args.r#where, answer, |dir, name| {
            let new = NewAttributes::new(&args.attributes)?;
            // Linux ignores set-ID bits here, and inherits the set-group-ID bit of the parent.
            self.user.run_as(|| mkdirat(dir.fd(), name, new.initial_mode()))?;
            self.complete_creation(dir, name, &NewAttributes { mode: None, size: None, ..new })
        })
    }

    pub(crate) fn mknod(&self, args: Mknod3Args<'_>, answer: ReplySender<'_, Mknod>) -> HandlerResult {
        // Linux has 12 bits of major and 20 bits of minor numbers, and would drop the others.
        let device = |data: &Devicedata3| match (data.spec.specdata1, data.spec.specdata2) {
            (major @ 0..0x1000, minor @ 0..0x10_0000) => Ok(makedev(major, minor)),
            _ => Err(Nfsstat3::ErrInval),
        };
        self.create_name(args.r#where, answer, |dir, name| {
            let (kind, new, dev) = match &args.what {
                Mknoddata3::Chr(data) => (FileType::CharacterDevice, &data.dev_attributes, device(data)?),
                Mknoddata3::Blk(data) => (FileType::BlockDevice, &data.dev_attributes, device(data)?),
                Mknoddata3::Sock(new) => (FileType::Socket, new, 0),
                Mknoddata3::Fifo(new) => (FileType::Fifo, new, 0),
                Mknoddata3::Default(_) => return Err(Nfsstat3::ErrBadtype),
            };
            let new = NewAttributes::new(new)?;
            self.user.run_as(|| mknodat(dir.fd(), name, kind, new.initial_mode(), dev))?;
            self.complete_creation(dir, name, &NewAttributes { mode: None, size: None, ..new })
        })
    }
}
