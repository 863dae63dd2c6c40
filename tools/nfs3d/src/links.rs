//! READLINK, SYMLINK, LINK.
#![forbid(unsafe_code)]

use rpcrdma::typed::{Answer, Signature};
use rustix::fs::{AtFlags, CWD, linkat, readlinkat, symlinkat};

use crate::attr::{self, fattr, now};
use crate::create::{self, in_dir};
use crate::export::{Export, changeable};
use crate::identity::Identity;
use crate::nfs::Answered;
use crate::nfs3::nfs_v3::{Readlink, Symlink};
use crate::nfs3::*;
use crate::node::Node;
use crate::status::{Outcome, Results, status};

/// Longest path, in bytes.
const PATH_MAX: usize = Readlink::BINDING.results.max_len;

pub(crate) fn readlink(
    export: &Export,
    _: &Identity,
    args: Readlink3Args<'_>,
    answer: Answer<'_, Readlink>,
) -> Answered {
    let found = export.find(args.symlink);
    let path = found.as_ref().map_err(|status| *status).and_then(|node| target(node));
    let symlink_attributes = found.ok().and_then(|node| now(&node));
    let done = path.as_ref().map(|path| Readlink3Resok { symlink_attributes, data: path[..].into() });
    answer.send(&done.map_err(|status| (*status, Readlink3Resfail { symlink_attributes })).into())
}

/// Target of a symbolic link.
fn target(node: &Node) -> Outcome<Vec<u8>> {
    if !node.is_symlink() {
        return Err(Nfsstat3::ErrInval);
    }
    let path = readlinkat(node.fd(), "", Vec::new()).map_err(status)?.into_bytes();
    // Longer than announced to clients; made by a local user.
    if path.len() > PATH_MAX { Err(Nfsstat3::ErrNametoolong) } else { Ok(path) }
}

pub(crate) fn symlink(
    export: &Export,
    who: &Identity,
    args: Symlink3Args<'_>,
    answer: Answer<'_, Symlink>,
) -> Answered {
    let path = args.symlink.symlink_data.bytes();
    let made = in_dir(export, args.r#where.dir, |dir| {
        let name = changeable(args.r#where.name, Nfsstat3::ErrExist)?;
        if path.len() > PATH_MAX {
            return Err(Nfsstat3::ErrNametoolong);
        }
        if path.is_empty() || path.contains(&0) {
            return Err(Nfsstat3::ErrInval);
        }
        who.act(|| symlinkat(path, dir.fd(), name)).map_err(status)?;
        // A link has no mode and no size of its own.
        create::finish(export, dir, name, who, &Sattr3 { mode: None, size: None, ..args.symlink.symlink_attributes })
    });
    create::send(answer, made)
}

pub(crate) fn link(export: &Export, who: &Identity, args: Link3Args<'_>) -> Results<Link3Resok, Link3Resfail> {
    let node = match export.find(args.file) {
        Ok(node) => node,
        Err(status) => {
            let dir = export.find_dir(args.link.dir);
            let linkdir_wcc = dir.map_or_else(|_| WccData::default(), |dir| attr::wcc(None, &dir));
            return Err((status, Link3Resfail { file_attributes: None, linkdir_wcc }));
        }
    };
    let (outcome, linkdir_wcc) = in_dir(export, args.link.dir, |dir| {
        let name = changeable(args.link.name, Nfsstat3::ErrExist)?;
        if node.is_dir() {
            return Err(Nfsstat3::ErrInval);
        }
        // The path leads to this inode, even if that is a symbolic link.
        who.act(|| linkat(CWD, node.path(), dir.fd(), name, AtFlags::SYMLINK_FOLLOW)).map_err(status)?;
        export.handles.learn(dir.ino(), name, node.ino());
        node.stat()
    });
    let done = |stat| Link3Resok { file_attributes: Some(fattr(&stat)), linkdir_wcc };
    outcome.map(done).map_err(|status| (status, Link3Resfail { file_attributes: now(&node), linkdir_wcc }))
}
