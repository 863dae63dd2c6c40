//! READLINK, SYMLINK, LINK.
#![forbid(unsafe_code)]

use rpcrdma::typed::ReplySender;
use rustix::fs::{AtFlags, CWD, linkat, readlinkat, symlinkat};

use crate::attr::{NewAttributes, fattr, post_op_attr};
use crate::names::PATH_MAX;
use crate::nfs::{Call, HandlerResult};
use crate::nfs3::nfs_v3::{Readlink, Symlink};
use crate::nfs3::*;
use crate::node::Node;
use crate::status::{Outcome, Results};

impl Call<'_> {
    pub(crate) fn readlink(&self, args: Readlink3Args<'_>, answer: ReplySender<'_, Readlink>) -> HandlerResult {
        let found = self.export.find(args.symlink);
        let path = found.as_ref().map_err(|status| *status).and_then(|node| target(node));
        let symlink_attributes = found.ok().and_then(|node| post_op_attr(&node));
        let done = path.as_ref().map(|path| Readlink3Resok { symlink_attributes, data: Nfspath3(path[..].into()) });
        answer.send(&done.map_err(|status| (*status, Readlink3Resfail { symlink_attributes })).into())
    }

    pub(crate) fn symlink(&self, args: Symlink3Args<'_>, answer: ReplySender<'_, Symlink>) -> HandlerResult {
        let path = args.symlink.symlink_data.0.bytes();
        self.create_name(args.r#where, answer, |dir, name| {
            if path.len() > PATH_MAX {
                return Err(Nfsstat3::ErrNametoolong);
            }
            if path.is_empty() || path.contains(&0) {
                return Err(Nfsstat3::ErrInval);
            }
            let new = NewAttributes::new(&args.symlink.symlink_attributes)?;
            self.user.run_as(|| symlinkat(path, dir.fd(), name))?;
            // The mode and size of a symbolic link cannot be set.
            self.complete_creation(dir, name, &NewAttributes { mode: None, size: None, ..new })
        })
    }

    pub(crate) fn link(&self, args: Link3Args<'_>) -> Results<Link3Resok, Link3Resfail> {
        let node = match self.export.find(args.file) {
            Ok(node) => node,
            Err(status) => {
                let after = self.export.find_dir(args.link.dir).ok().and_then(|dir| post_op_attr(&dir));
                let linkdir_wcc = WccData { before: None, after };
                return Err((status, Link3Resfail { file_attributes: None, linkdir_wcc }));
            }
        };
        let (outcome, linkdir_wcc) = self.update_dir(args.link, Nfsstat3::ErrExist, |dir, name| {
            if node.is_dir() {
                return Err(Nfsstat3::ErrInval);
            }
            // Following `node.path()` leads to this inode itself, even if it is a symbolic link.
            self.user.run_as(|| linkat(CWD, node.path(), dir.fd(), name, AtFlags::SYMLINK_FOLLOW))?;
            self.export.handles.learn(dir.ino(), name, node.ino());
            node.stat()
        });
        let done = |stat| Link3Resok { file_attributes: Some(fattr(&stat)), linkdir_wcc };
        outcome.map(done).map_err(|status| (status, Link3Resfail { file_attributes: post_op_attr(&node), linkdir_wcc }))
    }
}

/// Target of a symbolic link.
fn target(node: &Node) -> Outcome<Vec<u8>> {
    if !node.is_symlink() {
        return Err(Nfsstat3::ErrInval);
    }
    let path = readlinkat(node.fd(), "", Vec::new())?.into_bytes();
    // Linux does not create a longer target, but a file system may contain one.
    if path.len() > PATH_MAX { Err(Nfsstat3::ErrNametoolong) } else { Ok(path) }
}
