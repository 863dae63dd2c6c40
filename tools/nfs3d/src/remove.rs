//! REMOVE, RMDIR, RENAME.
#![forbid(unsafe_code)]

use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::fs::{AtFlags, FileType, Stat, renameat, statat, unlinkat};

use crate::attr;
use crate::export::{Export, check_changeable_name};
use crate::names::open_path;
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
        // Dropped after the directory's lock.
        let mut removed = None;
        let (outcome, dir_wcc) = self.update_dir(entry, dots, |dir, name| {
            removed = RemovedFile::find(dir, name);
            self.user.run_as(|| unlinkat(dir.fd(), name, flags))?;
            removed.iter_mut().for_each(|removed| removed.forget(self.export, (dir, name)));
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
        // Dropped after the locks.
        let mut replaced = None;
        // A fixed order of locks prevents a deadlock.
        let (first, second) = if from.ino() <= to.ino() { (&from, &to) } else { (&to, &from) };
        let _first_lock = first.lock();
        let _second_lock = (first.ino() != second.ino()).then(|| second.lock());
        let before = |dir: &Node| dir.stat().ok().as_ref().map(attr::wcc_attr);
        let (from_before, to_before) = (before(&from), before(&to));
        let outcome = self.rename_within((&from, args.from.name.0), (&to, args.to.name.0), &mut replaced);
        let fromdir_wcc = attr::wcc_data(from_before, &from);
        let todir_wcc = attr::wcc_data(to_before, &to);
        let failed = |status| (status, Rename3Resfail { fromdir_wcc, todir_wcc });
        outcome.map(|()| Rename3Resok { fromdir_wcc, todir_wcc }).map_err(failed)
    }

    /// Renames a name, and sets `replaced` to the file that had the new name.
    fn rename_within(
        &self,
        (from, from_name): (&Node, &[u8]),
        (to, to_name): (&Node, &[u8]),
        replaced: &mut Option<RemovedFile>,
    ) -> Outcome<()> {
        self.export.check_writable()?;
        let from_name = check_changeable_name(from_name, Nfsstat3::ErrInval)?;
        let to_name = check_changeable_name(to_name, Nfsstat3::ErrInval)?;
        self.export.prepare_sync(from)?;
        self.export.prepare_sync(to)?;
        let moved = name_stat(from, from_name);
        *replaced = RemovedFile::find(to, to_name);
        self.user.run_as(|| renameat(from.fd(), from_name, to.fd(), to_name))?;
        if let Some(moved) = &moved {
            // If both names belonged to the same file, RENAME replaced nothing.
            let replaced = replaced.iter_mut().filter(|replaced| replaced.stat.st_ino != moved.st_ino);
            replaced.for_each(|replaced| replaced.forget(self.export, (to, to_name)));
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

/// The file of a name that a call removes.
///
/// Dropping this value closes the file. If it has no other name, that frees its space, which may take seconds, so it
/// must not happen while the lock of a directory is held.
pub(crate) struct RemovedFile {
    pub(crate) stat: Stat,
    /// `None` without a free descriptor: the removal itself may then free the space.
    _open: Option<OwnedFd>,
    /// The file's nodes that were in the cache.
    cached: [Option<Arc<Node>>; 3],
}

impl RemovedFile {
    /// Finds the file of a name in a directory, and opens it.
    pub(crate) fn find(dir: &Node, name: &[u8]) -> Option<Self> {
        let stat = name_stat(dir, name)?;
        Some(Self { stat, _open: open_path(dir.fd(), name).ok(), cached: Default::default() })
    }

    /// Forgets the removed name. If it was the file's last one, takes the file's nodes out of the cache.
    pub(crate) fn forget(&mut self, export: &Export, (dir, name): (&Node, &[u8])) {
        let stat = &self.stat;
        let is_last = stat.st_nlink <= 1 || FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
        export.handles.forget(dir.ino(), name, stat.st_ino, is_last);
        if is_last {
            self.cached = export.cache.remove(stat.st_ino);
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::fstat;

    use super::*;
    use crate::{HandleSource, Options, Policy, Squash};

    /// Otherwise the removal itself would free the space, with the directory's lock held.
    #[test]
    fn a_removed_file_stays_open_until_it_is_dropped() {
        let directory = tempfile::tempdir().expect("a directory");
        let (policy, handles, key) = (Policy::new(Squash::None), HandleSource::Names, [7; 32]);
        let options = Options { read_only: false, sync: false, policy, handles, key, max_open_files: 100 };
        let export = Export::open(directory.path(), options).expect("a directory");
        std::fs::write(directory.path().join("file"), "contents").expect("a file");
        let mut file = RemovedFile::find(&export.root, b"file").expect("it is there");
        unlinkat(export.root.fd(), "file", AtFlags::empty()).expect("removed");
        file.forget(&export, (&export.root, b"file"));
        let stat = fstat(file._open.as_ref().expect("open")).expect("attributes");
        assert_eq!((stat.st_ino, stat.st_nlink, stat.st_size), (file.stat.st_ino, 0, 8));
    }
}
