//! Conversion of attributes between the system and NFS (RFC 1813 §2.5, §2.6).
#![forbid(unsafe_code)]

use rustix::fs::{
    Access, AtFlags, CWD, FileType, Gid, Mode, Stat, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT, Uid, chmodat,
    chownat, ftruncate, major, minor, utimensat,
};

use crate::identity::Identity;
use crate::nfs3::*;
use crate::node::Node;
use crate::status::Outcome;

fn time(seconds: i64, nanoseconds: u64) -> Nfstime3 {
    Nfstime3 { seconds: seconds as u32, nseconds: nanoseconds as u32 }
}

fn kind(stat: &Stat) -> Ftype3 {
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::Directory => Ftype3::Dir,
        FileType::BlockDevice => Ftype3::Blk,
        FileType::CharacterDevice => Ftype3::Chr,
        FileType::Symlink => Ftype3::Lnk,
        FileType::Socket => Ftype3::Sock,
        FileType::Fifo => Ftype3::Fifo,
        _ => Ftype3::Reg,
    }
}

/// Time of the last change of attributes (ctime).
pub(crate) fn ctime(stat: &Stat) -> Nfstime3 {
    time(stat.st_ctime, stat.st_ctime_nsec)
}

/// All attributes.
pub(crate) fn fattr(stat: &Stat) -> Fattr3 {
    Fattr3 {
        r#type: kind(stat),
        mode: stat.st_mode & 0o7777,
        nlink: u32::try_from(stat.st_nlink).unwrap_or(u32::MAX),
        uid: stat.st_uid,
        gid: stat.st_gid,
        size: stat.st_size as u64,
        used: stat.st_blocks as u64 * 512,
        rdev: Specdata3 { specdata1: major(stat.st_rdev), specdata2: minor(stat.st_rdev) },
        fsid: stat.st_dev,
        fileid: stat.st_ino,
        atime: time(stat.st_atime, stat.st_atime_nsec),
        mtime: time(stat.st_mtime, stat.st_mtime_nsec),
        ctime: ctime(stat),
    }
}

/// Attributes by which a client detects changes by others.
pub(crate) fn wcc_attr(stat: &Stat) -> WccAttr {
    WccAttr { size: stat.st_size as u64, mtime: time(stat.st_mtime, stat.st_mtime_nsec), ctime: ctime(stat) }
}

/// Current attributes of a file, if the server can read them.
pub(crate) fn post_op_attr(node: &Node) -> PostOpAttr {
    node.stat().ok().as_ref().map(fattr)
}

/// Attributes before an operation and now.
pub(crate) fn wcc_data(before: PreOpAttr, node: &Node) -> WccData {
    WccData { before, after: post_op_attr(node) }
}

/// Attributes to set. All checks that do not depend on the file have been made.
#[derive(Clone, Default)]
pub(crate) struct NewAttributes {
    /// Permission bits.
    pub(crate) mode: Option<Mode>,
    pub(crate) uid: Option<Uid>,
    pub(crate) gid: Option<Gid>,
    /// Bytes.
    pub(crate) size: Option<u64>,
    /// Times, except those that a new size sets by itself.
    pub(crate) times: Option<Timestamps>,
}

/// Privilege needed to change times of a file that the user does not own.
#[derive(PartialEq, Eq)]
enum TimesPrivilege {
    /// Only the owner may set them, because the client chooses a time.
    Owner,
    /// Both times become the present, for which the kernel requires write permission.
    Writer,
    /// One of the times becomes the present. RFC 1813 §3.3.2 requires write permission, but the kernel
    /// requires ownership.
    WriterAsOwner,
}

impl NewAttributes {
    /// Checks a client's attributes.
    ///
    /// # Errors
    /// `NFS3ERR_INVAL` for the user or group ID 2^32-1, and for 10^9 and more nanoseconds. `NFS3ERR_FBIG` for a size
    /// above 2^63-1.
    pub(crate) fn new(new: &Sattr3) -> Outcome<Self> {
        if new.uid == Some(u32::MAX) || new.gid == Some(u32::MAX) {
            return Err(Nfsstat3::ErrInval);
        }
        if new.size.is_some_and(|size| i64::try_from(size).is_err()) {
            return Err(Nfsstat3::ErrFbig);
        }
        Ok(Self {
            mode: new.mode.map(|mode| Mode::from_raw_mode(mode & 0o7777)),
            uid: new.uid.map(Uid::from_raw),
            gid: new.gid.map(Gid::from_raw),
            size: new.size,
            times: times(new)?,
        })
    }

    /// Permission bits of a new file.
    pub(crate) fn initial_mode(&self) -> Mode {
        self.mode.unwrap_or(Mode::empty())
    }

    /// Sets the attributes. Permissions are checked first, so that a foreseeable failure changes nothing (RFC 1813
    /// §3.3.2). The order is owner, size, mode, times, because each may change the later ones. All system calls use an
    /// `O_PATH` descriptor, and only regular files are opened.
    pub(crate) fn apply(&self, node: &Node, user: &Identity) -> Outcome<()> {
        let stat = node.stat()?;
        let is_owner = user.owns(stat.st_uid);
        let times_privilege = self.times.as_ref().filter(|_| !is_owner).map(privilege_for_times);
        let needs_owner = self.mode.is_some() || times_privilege == Some(TimesPrivilege::Owner);
        if needs_owner && !is_owner {
            return Err(Nfsstat3::ErrPerm);
        }
        let as_owner = times_privilege == Some(TimesPrivilege::WriterAsOwner);
        if as_owner && !node.permits(user, Access::WRITE_OK) {
            return Err(Nfsstat3::ErrAcces);
        }
        let file = self.size.map(|_| node.writer(user, stat.st_uid)).transpose()?;
        if self.uid.is_some() || self.gid.is_some() {
            user.run_as(|| chownat(node.fd(), "", self.uid, self.gid, AtFlags::EMPTY_PATH))?;
        }
        if let (Some(size), Some(file)) = (self.size, &file) {
            user.run_as(|| ftruncate(file, size))?;
        }
        if let Some(mode) = self.mode {
            user.run_as(|| chmodat(CWD, node.path(), mode, AtFlags::empty()))?;
        }
        if let Some(times) = &self.times {
            let owner = as_owner.then(|| user.owner(&stat));
            owner.as_ref().unwrap_or(user).run_as(|| utimensat(node.fd(), "", times, AtFlags::EMPTY_PATH))?;
        }
        Ok(())
    }
}

/// Requested times, except those that a new size sets by itself; `None` if there are none.
fn times(new: &Sattr3) -> Outcome<Option<Timestamps>> {
    // Setting the size also sets the modification time to the server's time, and needs only write permission.
    let set_by_size = (SetAtime::Default(TimeHow::DontChange), SetAtime::Default(TimeHow::SetToServerTime));
    if new.size.is_some() && (new.atime, new.mtime) == set_by_size {
        return Ok(None);
    }
    let special = |tv_nsec| Ok(Timespec { tv_sec: 0, tv_nsec });
    let time = |new: &SetAtime| match *new {
        // The system gives some larger values a special meaning.
        SetAtime::SetToClientTime(time) if time.nseconds >= 1_000_000_000 => Err(Nfsstat3::ErrInval),
        SetAtime::SetToClientTime(time) => Ok(Timespec { tv_sec: time.seconds.into(), tv_nsec: time.nseconds.into() }),
        SetAtime::Default(TimeHow::SetToServerTime) => special(UTIME_NOW),
        SetAtime::Default(_) => special(UTIME_OMIT),
    };
    let times = Timestamps { last_access: time(&new.atime)?, last_modification: time(&new.mtime)? };
    Ok([&times.last_access, &times.last_modification].iter().any(|time| time.tv_nsec != UTIME_OMIT).then_some(times))
}

fn privilege_for_times(times: &Timestamps) -> TimesPrivilege {
    match (times.last_access.tv_nsec, times.last_modification.tv_nsec) {
        (UTIME_NOW, UTIME_NOW) => TimesPrivilege::Writer,
        (UTIME_NOW, UTIME_OMIT) | (UTIME_OMIT, UTIME_NOW) => TimesPrivilege::WriterAsOwner,
        _ => TimesPrivilege::Owner,
    }
}
