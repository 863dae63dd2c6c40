//! REMOVE, RMDIR, RENAME.
#![forbid(unsafe_code)]

use std::sync::Arc;

use rustix::fs::{AtFlags, FileType, Stat, renameat, statat, unlinkat};

use crate::attr;
use crate::export::{Export, check_changeable_name};
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
        let (outcome, dir_wcc) = self.update_dir(entry, dots, |dir, name| {
            let removed = name_stat(dir, name);
            self.user.run_as(|| unlinkat(dir.fd(), name, flags))?;
            forget_removed(self.export, (dir, name), removed.as_ref());
            Ok(())
        });
        outcome.map(|()| Remove3Resok { dir_wcc }).map_err(|status| (status, Remove3Resfail { dir_wcc }))
    }

    pub(crate) fn rename(&self, args: Rename3Args<'_>) -> Results<Rename3Resok, Rename3Resfail> {
        let (from, to) = match (self.export.find_dir(args.from.dir), self.export.find_dir(args.to.dir)) {
            (Ok(from), Ok(to)) => (from, to),
            (from, to) => {
                let wcc = |dir: &Outcome<Arc<Node>>| {
                    let after = dir.as_ref().ok().and_then(|dir| attr::post_op_attr(dir));
                    WccData { before: None, after }
                };
                let failure = Rename3Resfail { fromdir_wcc: wcc(&from), todir_wcc: wcc(&to) };
                let status = from.err().or(to.err()).unwrap_or_default();
                return Err((status, failure));
            }
        };
        // A fixed order of locks prevents a deadlock.
        let (first, second) = if from.ino() <= to.ino() { (&from, &to) } else { (&to, &from) };
        let _first_lock = first.lock();
        let _second_lock = (first.ino() != second.ino()).then(|| second.lock());
        let before = |dir: &Node| dir.stat().ok().as_ref().map(attr::wcc_attr);
        let (from_before, to_before) = (before(&from), before(&to));
        let outcome = self.rename_within((&from, args.from.name.0), (&to, args.to.name.0));
        let fromdir_wcc = attr::wcc_data(from_before, &from);
        let todir_wcc = attr::wcc_data(to_before, &to);
        let failed = |status| (status, Rename3Resfail { fromdir_wcc, todir_wcc });
        outcome.map(|()| Rename3Resok { fromdir_wcc, todir_wcc }).map_err(failed)
    }

    fn rename_within(&self, (from, from_name): (&Node, &[u8]), (to, to_name): (&Node, &[u8])) -> Outcome<()> {
        self.export.check_writable()?;
        let from_name = check_changeable_name(from_name, Nfsstat3::ErrInval)?;
        let to_name = check_changeable_name(to_name, Nfsstat3::ErrInval)?;
        self.export.prepare_sync(from)?;
        self.export.prepare_sync(to)?;
        let (moved, replaced) = (name_stat(from, from_name), name_stat(to, to_name));
        self.user.run_as(|| renameat(from.fd(), from_name, to.fd(), to_name))?;
        if let Some(moved) = &moved {
            // If both names belonged to the same file, RENAME replaced nothing.
            if replaced.as_ref().is_some_and(|replaced| replaced.st_ino != moved.st_ino) {
                forget_removed(self.export, (to, to_name), replaced.as_ref());
            }
            self.export.handles.learn(to.ino(), to_name, moved.st_ino);
        }
        self.export.sync_change(from)?;
        if from.ino() != to.ino() {
            self.export.sync_change(to)?;
        }
        Ok(())
    }
}

/// Attributes of a name in a directory, if it exists. A symbolic link is not followed.
pub(crate) fn name_stat(dir: &Node, name: &[u8]) -> Option<Stat> {
    statat(dir.fd(), name, AtFlags::SYMLINK_NOFOLLOW).ok()
}

/// Forgets a removed name. If it was the file's last name, closes the file, so that its space is freed.
pub(crate) fn forget_removed(export: &Export, (dir, name): (&Node, &[u8]), removed: Option<&Stat>) {
    let Some(stat) = removed else { return };
    let is_last = stat.st_nlink <= 1 || FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
    export.handles.forget(dir.ino(), name, stat.st_ino, is_last);
    if is_last {
        export.cache.remove(stat.st_ino);
    }
}
