//! READLINK, SYMLINK, LINK.
#![forbid(unsafe_code)]

use nfs3_types::nfs3::{
    LINK3res, LINK3resfail, LINK3resok, Nfs3Result, READLINK3resfail, READLINK3resok, SYMLINK3resfail, SYMLINK3resok,
    nfspath3, nfsstat3, sattr3,
};
use nfs3_types::xdr_codec::Pack;
use rpcrdma::xdr::padded;
use rpcrdma::{Refusal, ServerCall};
use rpcrdma_proto::binding::nfs3::PATH_MAX;
use rustix::fs::{AtFlags, CWD, linkat, readlinkat, symlinkat};

use crate::attr::{self, fattr, now};
use crate::codec::{Args, Outcome, fh, optional, reply};
use crate::create::{self, in_dir};
use crate::export::{Export, changeable};
use crate::identity::Identity;
use crate::node::Node;
use crate::status::status;

pub(crate) fn readlink(export: &Export, _: &Identity, call: &mut ServerCall) -> Result<(), Refusal> {
    let found = export.find(&Args::new(call.args()).only_handle()?);
    let path = found.as_ref().map_err(|status| *status).and_then(|node| target(node));
    let symlink_attributes = found.map_or_else(|_| optional(None), |node| now(&node));
    match path {
        Ok(path) => place(call, READLINK3resok { symlink_attributes, data: nfspath3::from(path) }),
        Err(status) => {
            let failure = READLINK3resfail { symlink_attributes };
            reply(call, &Nfs3Result::<READLINK3resok<'_>, _>::Err((status, failure)))
        }
    }
}

/// Sends the path in the Write chunk, if any. Its length word stays in the message.
fn place(call: &mut ServerCall, results: READLINK3resok<'_>) -> Result<(), Refusal> {
    let path = results.data.as_ref().to_vec();
    let whole: Nfs3Result<_, READLINK3resfail> = Nfs3Result::Ok(results);
    if call.write_chunk_capacity(0).is_none_or(|room| room == 0) {
        return reply(call, &whole);
    }
    let needed = path.len();
    if call.result_writer(0).map_or(true, |mut room| room.put(&path).is_err()) {
        return Err(Refusal::ShortChunk { index: 0, needed: needed as u32 });
    }
    let mut bytes = Vec::with_capacity(whole.packed_size());
    whole.pack(&mut bytes).map_err(|_| Refusal::SystemError)?;
    bytes.truncate(bytes.len() - padded(needed));
    let mut room = call.reply_writer();
    room.put(&bytes).map_err(|_| Refusal::SystemError)
}

/// Target of a symbolic link.
fn target(node: &Node) -> Outcome<Vec<u8>> {
    if !node.is_symlink() {
        return Err(nfsstat3::NFS3ERR_INVAL);
    }
    let path = readlinkat(node.fd(), "", Vec::new()).map_err(status)?.into_bytes();
    // Longer than announced to clients; made by a local user.
    if path.len() > PATH_MAX { Err(nfsstat3::NFS3ERR_NAMETOOLONG) } else { Ok(path) }
}

pub(crate) fn symlink(export: &Export, who: &Identity, call: &mut ServerCall) -> Result<(), Refusal> {
    let mut args = Args::new(call.args());
    let (dir, name) = args.entry()?;
    let new: sattr3 = args.get()?;
    let path = args.bulk(call)?;
    args.end()?;
    let (outcome, dir_wcc) = in_dir(export, &dir, |dir| {
        let name = changeable(name, nfsstat3::NFS3ERR_EXIST)?;
        if path.len() > PATH_MAX {
            return Err(nfsstat3::NFS3ERR_NAMETOOLONG);
        }
        if path.is_empty() || path.contains(&0) {
            return Err(nfsstat3::NFS3ERR_INVAL);
        }
        who.act(|| symlinkat(path, dir.fd(), name)).map_err(status)?;
        // A link has no mode and no size of its own.
        let rest = sattr3 { mode: optional(None), size: optional(None), ..new.clone() };
        create::finish(export, dir, name, who, &rest)
    });
    let results = create::results!(SYMLINK3resok, SYMLINK3resfail, outcome, dir_wcc);
    reply(call, &results)
}

pub(crate) fn link(export: &Export, who: &Identity, mut args: Args<'_>) -> Result<LINK3res, Refusal> {
    let file = args.handle()?;
    let (dir, name) = args.entry()?;
    args.end()?;
    let node = match export.find(&file) {
        Ok(node) => node,
        Err(status) => {
            let linkdir_wcc = export.find_dir(&dir).map_or_else(|_| attr::no_wcc(), |dir| attr::wcc(None, &dir));
            return Ok(Nfs3Result::Err((status, LINK3resfail { file_attributes: optional(None), linkdir_wcc })));
        }
    };
    let (outcome, linkdir_wcc) = in_dir(export, &dir, |dir| {
        let name = changeable(name, nfsstat3::NFS3ERR_EXIST)?;
        if node.is_dir() {
            return Err(nfsstat3::NFS3ERR_INVAL);
        }
        // The path leads to this inode, even if that is a symbolic link.
        who.act(|| linkat(CWD, node.path(), dir.fd(), name, AtFlags::SYMLINK_FOLLOW)).map_err(status)?;
        export.handles.learn(dir.ino(), name, node.ino());
        node.stat()
    });
    Ok(match outcome {
        Ok(stat) => Nfs3Result::Ok(LINK3resok { file_attributes: optional(Some(fattr(&stat))), linkdir_wcc }),
        Err(status) => Nfs3Result::Err((status, LINK3resfail { file_attributes: now(&node), linkdir_wcc })),
    })
}
