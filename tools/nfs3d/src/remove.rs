//! REMOVE, RMDIR, RENAME.
#![forbid(unsafe_code)]

use std::sync::Arc;

use rustix::fs::{AtFlags, FileType, Stat, renameat, statat, unlinkat};

use crate::attr;
use crate::export::{Export, changeable};
use crate::nfs::Call;
use crate::nfs3::*;
use crate::node::Node;
use crate::status::{Outcome, Results};

impl Call<'_> {
    pub(crate) fn remove(&self, args: Remove3Args<'_>) -> Results<Remove3Resok, Remove3Resfail> {
        self.unlink(args.object, Nfsstat3::ErrInval, AtFlags::empty())
    }

    pub(crate) fn rmdir(&self, args: Rmdir3Args<'_>) -> Results<Remove3Resok, Remove3Resfail> {
        let dots = if args.object.name.0 == b"." { Nfsstat3::ErrInval } else { Nfsstat3::ErrExist };
        self.unlink(args.object, dots, AtFlags::REMOVEDIR)
    }

    fn unlink(&self, entry: Diropargs3<'_>, dots: Nfsstat3, flags: AtFlags) -> Results<Remove3Resok, Remove3Resfail> {
        let (outcome, dir_wcc) = self.in_dir(entry, dots, |dir, name| {
            let victim = name_stat(dir, name);
            self.who.act(|| unlinkat(dir.fd(), name, flags))?;
            bury(self.export, (dir, name), victim.as_ref());
            Ok(())
        });
        outcome.map(|()| Remove3Resok { dir_wcc }).map_err(|status| (status, Remove3Resfail { dir_wcc }))
    }

    pub(crate) fn rename(&self, args: Rename3Args<'_>) -> Results<Rename3Resok, Rename3Resfail> {
        let (from, to) = match (self.export.find_dir(args.from.dir), self.export.find_dir(args.to.dir)) {
            (Ok(from), Ok(to)) => (from, to),
            (from, to) => {
                let wcc = |dir: &Outcome<Arc<Node>>| {
                    let after = dir.as_ref().ok().and_then(|dir| attr::now(dir));
                    WccData { before: None, after }
                };
                let failure = Rename3Resfail { fromdir_wcc: wcc(&from), todir_wcc: wcc(&to) };
                let status = from.err().or(to.err()).unwrap_or_default();
                return Err((status, failure));
            }
        };
        // Locks directories in a fixed order, against deadlock.
        let (first, second) = if from.ino() <= to.ino() { (&from, &to) } else { (&to, &from) };
        let _alone = first.lock();
        let _alone_too = (first.ino() != second.ino()).then(|| second.lock());
        let before = |dir: &Node| dir.stat().ok().as_ref().map(attr::before);
        let (from_before, to_before) = (before(&from), before(&to));
        let outcome = self.renamed((&from, args.from.name.0), (&to, args.to.name.0));
        let fromdir_wcc = attr::wcc(from_before, &from);
        let todir_wcc = attr::wcc(to_before, &to);
        let failed = |status| (status, Rename3Resfail { fromdir_wcc, todir_wcc });
        outcome.map(|()| Rename3Resok { fromdir_wcc, todir_wcc }).map_err(failed)
    }

    fn renamed(&self, (from, from_name): (&Node, &[u8]), (to, to_name): (&Node, &[u8])) -> Outcome<()> {
        self.export.check_writable()?;
        let from_name = changeable(from_name, Nfsstat3::ErrInval)?;
        let to_name = changeable(to_name, Nfsstat3::ErrInval)?;
        self.export.prepare_settle(from)?;
        self.export.prepare_settle(to)?;
        let (moved, replaced) = (name_stat(from, from_name), name_stat(to, to_name));
        self.who.act(|| renameat(from.fd(), from_name, to.fd(), to_name))?;
        if let Some(moved) = &moved {
            // Two names of one file: RENAME replaced nothing.
            if replaced.as_ref().is_some_and(|replaced| replaced.st_ino != moved.st_ino) {
                bury(self.export, (to, to_name), replaced.as_ref());
            }
            self.export.handles.learn(to.ino(), to_name, moved.st_ino);
        }
        self.export.settle(from)?;
        if from.ino() != to.ino() {
            self.export.settle(to)?;
        }
        Ok(())
    }
}

/// Attributes of a name in a directory, if it exists. Follows no link.
pub(crate) fn name_stat(dir: &Node, name: &[u8]) -> Option<Stat> {
    statat(dir.fd(), name, AtFlags::SYMLINK_NOFOLLOW).ok()
}

/// A name was removed. With the last one, the file is removed once closed.
pub(crate) fn bury(export: &Export, (dir, name): (&Node, &[u8]), victim: Option<&Stat>) {
    let Some(stat) = victim else { return };
    let last = stat.st_nlink <= 1 || FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
    export.handles.forget(dir.ino(), name, stat.st_ino, last);
    if last {
        export.cache.remove(stat.st_ino);
    }
}
