//! Conversion of attributes between the system and NFS (RFC 1813 §2.5, §2.6).
#![forbid(unsafe_code)]

use rustix::fs::{
    AtFlags, CWD, FileType, Gid, Mode, Stat, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT, Uid, chmodat, chownat,
    ftruncate, major, minor, utimensat,
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
pub(crate) fn before(stat: &Stat) -> WccAttr {
    WccAttr { size: stat.st_size as u64, mtime: time(stat.st_mtime, stat.st_mtime_nsec), ctime: ctime(stat) }
}

/// Current attributes of a file, if readable.
pub(crate) fn now(node: &Node) -> PostOpAttr {
    node.stat().ok().as_ref().map(fattr)
}

/// Attributes before an operation, and now.
pub(crate) fn wcc(before: PreOpAttr, node: &Node) -> WccData {
    WccData { before, after: now(node) }
}

fn special(nanoseconds: i64) -> Timespec {
    Timespec { tv_sec: 0, tv_nsec: nanoseconds }
}

/// Requested times, beside those that a new length sets; `None` if there are none.
fn times(new: &Sattr3) -> Option<Timestamps> {
    // A writer may set the length and thereby this time. To set it alone takes the owner.
    let by_length = (SetAtime::Default(TimeHow::DontChange), SetAtime::Default(TimeHow::SetToServerTime));
    if new.size.is_some() && (new.atime, new.mtime) == by_length {
        return None;
    }
    let time = |new: &SetAtime| match *new {
        SetAtime::SetToClientTime(time) => Timespec { tv_sec: time.seconds.into(), tv_nsec: time.nseconds.into() },
        SetAtime::Default(TimeHow::SetToServerTime) => special(UTIME_NOW),
        SetAtime::Default(_) => special(UTIME_OMIT),
    };
    let times = Timestamps { last_access: time(&new.atime), last_modification: time(&new.mtime) };
    [&times.last_access, &times.last_modification].iter().any(|time| time.tv_nsec != UTIME_OMIT).then_some(times)
}

/// Permission bits of the client.
pub(crate) fn mode(new: &Sattr3) -> Mode {
    Mode::from_raw_mode(new.mode.unwrap_or(0) & 0o7777)
}

/// Sets attributes, all or none if failures are foreseeable (RFC 1813 §3.3.2): it checks first. The order is owner,
/// size, mode, times, as each may change the later ones.
pub(crate) fn apply(node: &Node, who: &Identity, new: &Sattr3) -> Outcome<()> {
    let (size, uid, gid, times) = (new.size, new.uid, new.gid, times(new));
    if size.is_some_and(|size| i64::try_from(size).is_err()) {
        return Err(Nfsstat3::ErrFbig);
    }
    if uid == Some(u32::MAX) || gid == Some(u32::MAX) {
        return Err(Nfsstat3::ErrInval);
    }
    let owner = node.stat()?.st_uid;
    // A writer may set both times to the present.
    let other =
        |times: &Timestamps| [times.last_access, times.last_modification].iter().any(|time| time.tv_nsec != UTIME_NOW);
    if (new.mode.is_some() || times.as_ref().is_some_and(other)) && !who.owns(owner) {
        return Err(Nfsstat3::ErrPerm);
    }
    let file = size.map(|_| node.writer(who, owner)).transpose()?;
    if uid.is_some() || gid.is_some() {
        let (uid, gid) = (uid.map(Uid::from_raw), gid.map(Gid::from_raw));
        who.act(|| chownat(node.fd(), "", uid, gid, AtFlags::EMPTY_PATH))?;
    }
    if let (Some(size), Some(file)) = (size, &file) {
        who.act(|| ftruncate(file, size))?;
    }
    if new.mode.is_some() {
        who.act(|| chmodat(CWD, node.path(), mode(new), AtFlags::empty()))?;
    }
    if let Some(times) = times {
        who.act(|| utimensat(node.fd(), "", &times, AtFlags::EMPTY_PATH))?;
    }
    Ok(())
}
