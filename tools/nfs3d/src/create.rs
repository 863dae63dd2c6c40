//! CREATE, MKDIR, MKNOD.
#![forbid(unsafe_code)]

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rpcrdma::typed::{Answer, Signature};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, Timespec, Timestamps, makedev, mkdirat, mknodat, openat, utimensat};
use rustix::io::{self, Errno};

use crate::UNCHANGED;
use crate::attr;
use crate::export::changeable;
use crate::nfs::{Answered, Call};
use crate::nfs3::nfs_v3::{Create, Mkdir, Mknod};
use crate::nfs3::*;
use crate::node::Node;
use crate::status::Outcome;

/// A created or existing file.
pub(crate) type Made = Arc<Node>;

impl Call<'_> {
    /// Changes a name in a directory, with the directory's attributes before and after, and makes it stable. `dots` is
    /// the status for `.` and `..`.
    pub(crate) fn in_dir<T>(
        &self,
        entry: Diropargs3<'_>,
        dots: Nfsstat3,
        run: impl FnOnce(&Node, &[u8]) -> Outcome<T>,
    ) -> (Outcome<T>, WccData) {
        let dir = match self.export.find_dir(entry.dir) {
            Ok(dir) => dir,
            Err(status) => return (Err(status), WccData::default()),
        };
        let _alone = dir.lock();
        let before = dir.stat().ok().as_ref().map(attr::before);
        let outcome = self.export.check_writable().and_then(|()| {
            let done = run(&dir, changeable(entry.name, dots)?)?;
            self.export.settle(&dir)?;
            Ok(done)
        });
        (outcome, attr::wcc(before, &dir))
    }

    /// Creates a name in a directory, and sends the common results.
    pub(crate) fn make<P>(
        &self,
        entry: Diropargs3<'_>,
        answer: Answer<'_, P>,
        run: impl FnOnce(&Node, &[u8]) -> Outcome<Made>,
    ) -> Answered
    where
        P: for<'a> Signature<Results<'a> = Create3Res<'a>>,
    {
        let (made, dir_wcc) = self.in_dir(entry, Nfsstat3::ErrExist, run);
        let done = made.as_ref().map(|node| {
            let (obj, obj_attributes) = (Some(node.handle()), attr::now(node));
            Create3Resok { obj, obj_attributes, dir_wcc }
        });
        answer.send(&done.map_err(|status| (*status, Create3Resfail { dir_wcc })).into())
    }

    /// Opens the new file with `O_PATH`, sets its other attributes, and makes it stable.
    pub(crate) fn finish(&self, dir: &Node, name: &[u8], rest: &Sattr3) -> Outcome<Made> {
        let (node, _) = self.export.look_up(dir, name, &self.who)?;
        attr::apply(&node, &self.who, rest)?;
        if !node.is_symlink() {
            self.export.settle(&node)?;
        }
        Ok(node)
    }

    pub(crate) fn create(&self, args: Create3Args<'_>, answer: Answer<'_, Create>) -> Answered {
        self.make(args.r#where, answer, |dir, name| {
            let (new, must_be_new) = match &args.how {
                Createhow3::Exclusive(verifier) => return self.exclusive(dir, name, verifier),
                Createhow3::Guarded(new) => (new, true),
                Createhow3::Unchecked(new) => (new, false),
            };
            match self.make_file(dir, name, attr::mode(new)) {
                Err(Errno::EXIST) if !must_be_new => self.existing(dir, name, new.size),
                // Creation has set the mode.
                made => {
                    made.map_err(Nfsstat3::from).and_then(|_| self.finish(dir, name, &Sattr3 { mode: None, ..*new }))
                }
            }
        })
    }

    fn make_file(&self, dir: &Node, name: &[u8], mode: Mode) -> io::Result<OwnedFd> {
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        self.who.act(|| openat(dir.fd(), name, flags, mode))
    }

    /// Unchecked CREATE of an existing file: only the size applies.
    fn existing(&self, dir: &Node, name: &[u8], size: SetSize3) -> Outcome<Made> {
        let (node, _) = self.export.look_up(dir, name, &self.who)?;
        node.check_regular().map_err(|_| Nfsstat3::ErrExist)?;
        if size.is_some() {
            attr::apply(&node, &self.who, &Sattr3 { size, ..UNCHANGED })?;
            self.export.settle(&node)?;
        }
        Ok(node)
    }

    /// Exclusive CREATE: a file with the client's verifier is its own. The file's times hold the verifier until the
    /// client sets them.
    fn exclusive(&self, dir: &Node, name: &[u8], verifier: &Createverf3) -> Outcome<Made> {
        let [a, b, c, d, e, f, g, h] = *verifier;
        // All file systems keep 31 bits of seconds.
        let seconds = |bytes| Timespec { tv_sec: i64::from(u32::from_be_bytes(bytes) & 0x7FFF_FFFF), tv_nsec: 0 };
        let times = Timestamps { last_access: seconds([a, b, c, d]), last_modification: seconds([e, f, g, h]) };
        match self.make_file(dir, name, Mode::empty()) {
            Ok(file) => {
                self.who.act(|| utimensat(file.as_fd(), "", &times, AtFlags::EMPTY_PATH))?;
                drop(file);
                self.finish(dir, name, &UNCHANGED)
            }
            Err(Errno::EXIST) => {
                let (node, stat) = self.export.look_up(dir, name, &self.who)?;
                let its = (stat.st_atime, stat.st_mtime);
                let own = its == (times.last_access.tv_sec, times.last_modification.tv_sec);
                let same = own && node.check_regular().is_ok() && stat.st_size == 0;
                if same { Ok(node) } else { Err(Nfsstat3::ErrExist) }
            }
            Err(error) => Err(error.into()),
        }
    }

    pub(crate) fn mkdir(&self, args: Mkdir3Args<'_>, answer: Answer<'_, Mkdir>) -> Answered {
        let new = &args.attributes;
        self.make(args.r#where, answer, |dir, name| {
            self.who.act(|| mkdirat(dir.fd(), name, attr::mode(new)))?;
            // Systems treat special bits in the mode of mkdir differently.
            let mode = new.mode.filter(|mode| mode & 0o7000 != 0);
            self.finish(dir, name, &Sattr3 { mode, size: None, ..*new })
        })
    }

    pub(crate) fn mknod(&self, args: Mknod3Args<'_>, answer: Answer<'_, Mknod>) -> Answered {
        let device = |data: &Devicedata3| makedev(data.spec.specdata1, data.spec.specdata2);
        self.make(args.r#where, answer, |dir, name| {
            let (kind, new, dev) = match &args.what {
                Mknoddata3::Chr(data) => (FileType::CharacterDevice, &data.dev_attributes, device(data)),
                Mknoddata3::Blk(data) => (FileType::BlockDevice, &data.dev_attributes, device(data)),
                Mknoddata3::Sock(new) => (FileType::Socket, new, 0),
                Mknoddata3::Fifo(new) => (FileType::Fifo, new, 0),
                Mknoddata3::Default(_) => return Err(Nfsstat3::ErrBadtype),
            };
            self.who.act(|| mknodat(dir.fd(), name, kind, attr::mode(new), dev))?;
            // Special files cannot be opened for a sync: they are stable with the directory.
            let (node, _) = self.export.look_up(dir, name, &self.who)?;
            attr::apply(&node, &self.who, &Sattr3 { mode: None, size: None, ..*new })?;
            Ok(node)
        })
    }
}
