//! Conversion of attributes between the system and NFS (RFC 1813 §2.5, §2.6).
#![forbid(unsafe_code)]

use nfs3_types::nfs3::{
    fattr3, ftype3, nfsstat3, nfstime3, post_op_attr, sattr3, set_atime, set_mtime, specdata3, wcc_attr, wcc_data,
};
use rustix::fs::{
    AtFlags, CWD, FileType, Gid, Mode, Stat, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT, Uid, chmodat, chownat,
    ftruncate, major, minor, utimensat,
};

use crate::codec::{Outcome, given, optional};
use crate::identity::Identity;
use crate::node::Node;
use crate::status::status;

fn time(seconds: i64, nanoseconds: u64) -> nfstime3 {
    nfstime3 { seconds: seconds as u32, nseconds: nanoseconds as u32 }
}

fn kind(stat: &Stat) -> ftype3 {
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::Directory => ftype3::NF3DIR,
        FileType::BlockDevice => ftype3::NF3BLK,
        FileType::CharacterDevice => ftype3::NF3CHR,
        FileType::Symlink => ftype3::NF3LNK,
        FileType::Socket => ftype3::NF3SOCK,
        FileType::Fifo => ftype3::NF3FIFO,
        _ => ftype3::NF3REG,
    }
}

/// Time of the last change of attributes (ctime).
pub(crate) fn ctime(stat: &Stat) -> nfstime3 {
    time(stat.st_ctime, stat.st_ctime_nsec)
}

/// All attributes.
pub(crate) fn fattr(stat: &Stat) -> fattr3 {
    fattr3 {
        type_: kind(stat),
        mode: stat.st_mode & 0o7777,
        nlink: u32::try_from(stat.st_nlink).unwrap_or(u32::MAX),
        uid: stat.st_uid,
        gid: stat.st_gid,
        size: stat.st_size as u64,
        used: stat.st_blocks as u64 * 512,
        rdev: specdata3 { specdata1: major(stat.st_rdev), specdata2: minor(stat.st_rdev) },
        fsid: stat.st_dev,
        fileid: stat.st_ino,
        atime: time(stat.st_atime, stat.st_atime_nsec),
        mtime: time(stat.st_mtime, stat.st_mtime_nsec),
        ctime: ctime(stat),
    }
}

/// Attributes by which a client detects changes by others.
pub(crate) fn before(stat: &Stat) -> wcc_attr {
    wcc_attr { size: stat.st_size as u64, mtime: time(stat.st_mtime, stat.st_mtime_nsec), ctime: ctime(stat) }
}

/// Current attributes of a file, if readable.
pub(crate) fn now(node: &Node) -> post_op_attr {
    optional(node.stat().ok().as_ref().map(fattr))
}

/// Attributes before an operation, and now.
pub(crate) fn wcc(before_it: Option<wcc_attr>, node: &Node) -> wcc_data {
    wcc_data { before: optional(before_it), after: now(node) }
}

/// No attributes.
pub(crate) fn no_wcc() -> wcc_data {
    wcc_data::default()
}

fn timespec(time: nfstime3) -> Timespec {
    Timespec { tv_sec: time.seconds.into(), tv_nsec: time.nseconds.into() }
}

fn special(nanoseconds: i64) -> Timespec {
    Timespec { tv_sec: 0, tv_nsec: nanoseconds }
}

/// Requested times, beside those that a new length sets; `None` if there are none.
fn times(new: &sattr3) -> Option<Timestamps> {
    // A writer may set the length and thereby this time. To set it alone takes the owner.
    let by_length = matches!((&new.atime, &new.mtime), (set_atime::DONT_CHANGE, set_mtime::SET_TO_SERVER_TIME));
    if by_length && given(&new.size).is_some() {
        return None;
    }
    let atime = match new.atime {
        set_atime::DONT_CHANGE => None,
        set_atime::SET_TO_SERVER_TIME => Some(special(UTIME_NOW)),
        set_atime::SET_TO_CLIENT_TIME(time) => Some(timespec(time)),
    };
    let mtime = match new.mtime {
        set_mtime::DONT_CHANGE => None,
        set_mtime::SET_TO_SERVER_TIME => Some(special(UTIME_NOW)),
        set_mtime::SET_TO_CLIENT_TIME(time) => Some(timespec(time)),
    };
    let keep = || special(UTIME_OMIT);
    (atime.is_some() || mtime.is_some())
        .then(|| Timestamps { last_access: atime.unwrap_or_else(keep), last_modification: mtime.unwrap_or_else(keep) })
}

/// Permission bits of the client.
pub(crate) fn mode(new: &sattr3) -> Mode {
    Mode::from_raw_mode(given(&new.mode).unwrap_or(0) & 0o7777)
}

/// True if only the owner may set these times. A writer may set both to the present.
fn are_of_the_owner(times: &Timestamps) -> bool {
    [times.last_access, times.last_modification].iter().any(|time| time.tv_nsec != UTIME_NOW)
}

/// Sets attributes, all or none if failures are foreseeable (RFC 1813 §3.3.2): it checks first. The order is owner,
/// size, mode, times, as each may change the later ones.
pub(crate) fn apply(node: &Node, who: &Identity, new: &sattr3) -> Outcome<()> {
    let (size, uid, gid, times) = (given(&new.size), given(&new.uid), given(&new.gid), times(new));
    if size.is_some_and(|size| i64::try_from(size).is_err()) {
        return Err(nfsstat3::NFS3ERR_FBIG);
    }
    if uid == Some(u32::MAX) || gid == Some(u32::MAX) {
        return Err(nfsstat3::NFS3ERR_INVAL);
    }
    let owner = node.stat()?.st_uid;
    if (given(&new.mode).is_some() || times.as_ref().is_some_and(are_of_the_owner)) && !who.owns(owner) {
        return Err(nfsstat3::NFS3ERR_PERM);
    }
    let file = match size {
        Some(_) => Some(node.open_to_cut(who, owner)?),
        None => None,
    };
    if uid.is_some() || gid.is_some() {
        let (uid, gid) = (uid.map(Uid::from_raw), gid.map(Gid::from_raw));
        who.act(|| chownat(node.fd(), "", uid, gid, AtFlags::EMPTY_PATH)).map_err(status)?;
    }
    if let (Some(size), Some(file)) = (size, &file) {
        ftruncate(file, size).map_err(status)?;
    }
    if given(&new.mode).is_some() {
        who.act(|| chmodat(CWD, node.path(), mode(new), AtFlags::empty())).map_err(status)?;
    }
    if let Some(times) = times {
        who.act(|| utimensat(node.fd(), "", &times, AtFlags::EMPTY_PATH)).map_err(status)?;
    }
    Ok(())
}
