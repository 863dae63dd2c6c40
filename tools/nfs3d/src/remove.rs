//! REMOVE, RMDIR, RENAME.
#![forbid(unsafe_code)]

use std::sync::Arc;

use nfs3_types::nfs3::{
    REMOVE3res, REMOVE3resfail, REMOVE3resok, RENAME3res, RENAME3resfail, RENAME3resok, RMDIR3res, RMDIR3resfail,
    RMDIR3resok, nfsstat3,
};
use rpcrdma::Refusal;
use rustix::fs::{AtFlags, FileType, Stat, renameat, statat, unlinkat};

use crate::attr;
use crate::codec::{Args, Outcome, or_fail};
use crate::create::in_dir;
use crate::export::{Export, changeable};
use crate::identity::Identity;
use crate::node::Node;
use crate::status::status;

pub(crate) fn remove(export: &Export, who: &Identity, mut args: Args<'_>) -> Result<REMOVE3res, Refusal> {
    let (dir, name) = args.entry()?;
    args.end()?;
    let (outcome, dir_wcc) = in_dir(export, &dir, |dir| {
        let name = changeable(name, nfsstat3::NFS3ERR_INVAL)?;
        unlink(export, dir, name, who, AtFlags::empty())
    });
    Ok(match outcome {
        Ok(()) => or_fail(Ok(REMOVE3resok { dir_wcc }), REMOVE3resfail::default()),
        Err(status) => or_fail(Err(status), REMOVE3resfail { dir_wcc }),
    })
}

pub(crate) fn rmdir(export: &Export, who: &Identity, mut args: Args<'_>) -> Result<RMDIR3res, Refusal> {
    let (dir, name) = args.entry()?;
    args.end()?;
    let (outcome, dir_wcc) = in_dir(export, &dir, |dir| {
        let dots = if name == b"." { nfsstat3::NFS3ERR_INVAL } else { nfsstat3::NFS3ERR_EXIST };
        let name = changeable(name, dots)?;
        unlink(export, dir, name, who, AtFlags::REMOVEDIR)
    });
    Ok(match outcome {
        Ok(()) => or_fail(Ok(RMDIR3resok { dir_wcc }), RMDIR3resfail { dir_wcc: attr::no_wcc() }),
        Err(status) => or_fail(Err(status), RMDIR3resfail { dir_wcc }),
    })
}

fn unlink(export: &Export, dir: &Node, name: &[u8], who: &Identity, flags: AtFlags) -> Outcome<()> {
    let victim = victim(dir, name);
    who.act(|| unlinkat(dir.fd(), name, flags)).map_err(status)?;
    bury(export, victim.as_ref());
    Ok(())
}

/// File of a name, before removal.
fn victim(dir: &Node, name: &[u8]) -> Option<Stat> {
    statat(dir.fd(), name, AtFlags::SYMLINK_NOFOLLOW).ok()
}

/// A name was removed. With the last one, the file is removed once closed.
fn bury(export: &Export, victim: Option<&Stat>) {
    if let Some(stat) = victim
        && (stat.st_nlink <= 1 || FileType::from_raw_mode(stat.st_mode) == FileType::Directory)
    {
        export.gone(stat.st_ino);
    }
}

pub(crate) fn rename(export: &Export, who: &Identity, mut args: Args<'_>) -> Result<RENAME3res, Refusal> {
    let (from, from_name) = args.entry()?;
    let (to, to_name) = args.entry()?;
    args.end()?;
    let (from, to) = match (export.find_dir(&from), export.find_dir(&to)) {
        (Ok(from), Ok(to)) => (from, to),
        (from, to) => {
            let wcc = |dir: &Outcome<Arc<Node>>| match dir {
                Ok(dir) => attr::wcc(None, dir),
                Err(_) => attr::no_wcc(),
            };
            let failure = RENAME3resfail { fromdir_wcc: wcc(&from), todir_wcc: wcc(&to) };
            return Ok(or_fail(Err(from.err().or(to.err()).unwrap_or_default()), failure));
        }
    };
    // Locks directories in a fixed order, against deadlock.
    let (first, second) = if from.ino() <= to.ino() { (&from, &to) } else { (&to, &from) };
    let _alone = first.lock();
    let _alone_too = (first.ino() != second.ino()).then(|| second.lock());
    let before = |dir: &Node| dir.stat().ok().as_ref().map(attr::before);
    let (from_before, to_before) = (before(&from), before(&to));
    let outcome = renamed(export, who, (&from, from_name), (&to, to_name));
    let fromdir_wcc = attr::wcc(from_before, &from);
    let todir_wcc = attr::wcc(to_before, &to);
    Ok(match outcome {
        Ok(()) => or_fail(Ok(RENAME3resok { fromdir_wcc, todir_wcc }), RENAME3resfail::default()),
        Err(status) => or_fail(Err(status), RENAME3resfail { fromdir_wcc, todir_wcc }),
    })
}

fn renamed(
    export: &Export,
    who: &Identity,
    (from, from_name): (&Node, &[u8]),
    (to, to_name): (&Node, &[u8]),
) -> Outcome<()> {
    export.check_writable()?;
    let from_name = changeable(from_name, nfsstat3::NFS3ERR_INVAL)?;
    let to_name = changeable(to_name, nfsstat3::NFS3ERR_INVAL)?;
    let (moved, replaced) = (victim(from, from_name), victim(to, to_name));
    who.act(|| renameat(from.fd(), from_name, to.fd(), to_name)).map_err(status)?;
    if let Some(moved) = &moved {
        export.handles.learn(to.ino(), to_name, moved.st_ino);
        // Two names of one file: RENAME replaced nothing.
        if replaced.as_ref().is_some_and(|replaced| replaced.st_ino != moved.st_ino) {
            bury(export, replaced.as_ref());
        }
    }
    export.settle(from)?;
    if from.ino() != to.ino() {
        export.settle(to)?;
    }
    Ok(())
}
