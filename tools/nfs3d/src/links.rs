//! READLINK, SYMLINK, LINK.
#![forbid(unsafe_code)]

use rpcrdma::typed::Answer;
use rustix::fs::{AtFlags, CWD, linkat, readlinkat, symlinkat};

use crate::attr::{NewAttributes, fattr, now};
use crate::names::PATH_MAX;
use crate::nfs::{Answered, Call};
use crate::nfs3::nfs_v3::{Readlink, Symlink};
use crate::nfs3::*;
use crate::node::Node;
use crate::status::{Outcome, Results};

impl Call<'_> {
    pub(crate) fn readlink(&self, args: Readlink3Args<'_>, answer: Answer<'_, Readlink>) -> Answered {
        let found = self.export.find(args.symlink);
        let path = found.as_ref().map_err(|status| *status).and_then(|node| target(node));
        let symlink_attributes = found.ok().and_then(|node| now(&node));
        let done = path.as_ref().map(|path| Readlink3Resok { symlink_attributes, data: Nfspath3(path[..].into()) });
        answer.send(&done.map_err(|status| (*status, Readlink3Resfail { symlink_attributes })).into())
    }

    pub(crate) fn symlink(&self, args: Symlink3Args<'_>, answer: Answer<'_, Symlink>) -> Answered {
        let path = args.symlink.symlink_data.0.bytes();
        self.make(args.r#where, answer, |dir, name| {
            if path.len() > PATH_MAX {
                return Err(Nfsstat3::ErrNametoolong);
            }
            if path.is_empty() || path.contains(&0) {
                return Err(Nfsstat3::ErrInval);
            }
            let new = NewAttributes::new(&args.symlink.symlink_attributes)?;
            self.who.act(|| symlinkat(path, dir.fd(), name))?;
            // A link has no mode and no size of its own.
            self.finish(dir, name, &NewAttributes { mode: None, size: None, ..new })
        })
    }

    pub(crate) fn link(&self, args: Link3Args<'_>) -> Results<Link3Resok, Link3Resfail> {
        let node = match self.export.find(args.file) {
            Ok(node) => node,
            Err(status) => {
                let after = self.export.find_dir(args.link.dir).ok().and_then(|dir| now(&dir));
                let linkdir_wcc = WccData { before: None, after };
                return Err((status, Link3Resfail { file_attributes: None, linkdir_wcc }));
            }
        };
        let (outcome, linkdir_wcc) = self.in_dir(args.link, Nfsstat3::ErrExist, |dir, name| {
            if node.is_dir() {
                return Err(Nfsstat3::ErrInval);
            }
            // The path leads to this inode, even if that is a symbolic link.
            self.who.act(|| linkat(CWD, node.path(), dir.fd(), name, AtFlags::SYMLINK_FOLLOW))?;
            self.export.handles.learn(dir.ino(), name, node.ino());
            node.stat()
        });
        let done = |stat| Link3Resok { file_attributes: Some(fattr(&stat)), linkdir_wcc };
        outcome.map(done).map_err(|status| (status, Link3Resfail { file_attributes: now(&node), linkdir_wcc }))
    }
}

/// Target of a symbolic link.
fn target(node: &Node) -> Outcome<Vec<u8>> {
    if !node.is_symlink() {
        return Err(Nfsstat3::ErrInval);
    }
    let path = readlinkat(node.fd(), "", Vec::new())?.into_bytes();
    // Linux makes no longer one; a file system may hold it.
    if path.len() > PATH_MAX { Err(Nfsstat3::ErrNametoolong) } else { Ok(path) }
}
