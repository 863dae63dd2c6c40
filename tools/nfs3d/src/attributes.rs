//! GETATTR, SETATTR, ACCESS, FSSTAT, FSINFO, PATHCONF.
#![forbid(unsafe_code)]

use nfs3_types::nfs3::{
    ACCESS3_DELETE, ACCESS3_EXECUTE, ACCESS3_EXTEND, ACCESS3_LOOKUP, ACCESS3_MODIFY, ACCESS3_READ, ACCESS3res,
    ACCESS3resfail, ACCESS3resok, FSF3_CANSETTIME, FSF3_HOMOGENEOUS, FSF3_LINK, FSF3_SYMLINK, FSINFO3res,
    FSINFO3resfail, FSINFO3resok, FSSTAT3res, FSSTAT3resfail, FSSTAT3resok, GETATTR3res, GETATTR3resok, PATHCONF3res,
    PATHCONF3resfail, PATHCONF3resok, SETATTR3res, SETATTR3resfail, SETATTR3resok, nfsstat3, nfstime3, sattr3,
    sattrguard3,
};
use nfs3_types::xdr_codec::Void;
use rpcrdma::Refusal;
use rustix::fs::{Access, fstatvfs};

use crate::attr::{self, fattr, no_wcc, wcc};
use crate::codec::{Args, given, optional, or_fail};
use crate::export::{Export, NAME_MAX};
use crate::identity::Identity;
use crate::nfs::{DIRECTORY, TRANSFER};
use crate::node::Node;
use crate::status::status;

pub(crate) fn getattr(export: &Export, _: &Identity, args: Args<'_>) -> Result<GETATTR3res, Refusal> {
    let stat = export.find(&args.only_handle()?).and_then(|node| node.stat());
    Ok(or_fail(stat.map(|stat| GETATTR3resok { obj_attributes: fattr(&stat) }), Void))
}

pub(crate) fn setattr(export: &Export, who: &Identity, mut args: Args<'_>) -> Result<SETATTR3res, Refusal> {
    let handle = args.handle()?;
    let new: sattr3 = args.get()?;
    let guard: sattrguard3 = args.get()?;
    args.end()?;
    let node = match export.find(&handle) {
        Ok(node) => node,
        Err(status) => return Ok(or_fail(Err(status), SETATTR3resfail { obj_wcc: no_wcc() })),
    };
    let _alone = node.lock();
    let stat = node.stat();
    let before = stat.as_ref().ok().map(attr::before);
    let outcome = stat.and_then(|stat| {
        export.check_writable()?;
        if given(&guard).is_some_and(|ctime| ctime != attr::ctime(&stat)) {
            return Err(nfsstat3::NFS3ERR_NOT_SYNC);
        }
        attr::apply(&node, who, &new)?;
        export.settle(&node)
    });
    let obj_wcc = wcc(before, &node);
    Ok(match outcome {
        Ok(()) => or_fail(Ok(SETATTR3resok { obj_wcc }), SETATTR3resfail::default()),
        Err(status) => or_fail(Err(status), SETATTR3resfail { obj_wcc }),
    })
}

pub(crate) fn access(export: &Export, who: &Identity, mut args: Args<'_>) -> Result<ACCESS3res, Refusal> {
    let handle = args.handle()?;
    let asked = args.u32()?;
    args.end()?;
    let found = export.find(&handle).and_then(|node| Ok((node.stat()?, node)));
    let granted = found.map(|(stat, node)| ACCESS3resok {
        obj_attributes: optional(Some(fattr(&stat))),
        access: granted(export, &node, who, asked),
    });
    Ok(or_fail(granted, ACCESS3resfail::default()))
}

/// The requested rights that the user has.
fn granted(export: &Export, node: &Node, who: &Identity, asked: u32) -> u32 {
    let execute = if node.is_dir() { ACCESS3_LOOKUP } else { ACCESS3_EXECUTE };
    // Write permission on a directory allows deletion in it. A file's permissions do not tell who may delete the file.
    let write = ACCESS3_MODIFY | ACCESS3_EXTEND | if node.is_dir() { ACCESS3_DELETE } else { 0 };
    let rights = [(ACCESS3_READ, Access::READ_OK), (write, Access::WRITE_OK), (execute, Access::EXEC_OK)];
    rights
        .into_iter()
        .filter(|&(bits, what)| {
            let may_be = bits & asked != 0 && !(what == Access::WRITE_OK && export.options.read_only);
            may_be && node.permits(who, what)
        })
        .fold(0, |sum, (bits, _)| sum | bits & asked)
}

pub(crate) fn fsstat(export: &Export, _: &Identity, args: Args<'_>) -> Result<FSSTAT3res, Refusal> {
    let outcome = export.find(&args.only_handle()?).and_then(|node| {
        let stat = fstatvfs(export.root.own_reader()?).map_err(status)?;
        let bytes = |blocks: u64| blocks.saturating_mul(stat.f_frsize);
        Ok(FSSTAT3resok {
            obj_attributes: attr::now(&node),
            tbytes: bytes(stat.f_blocks),
            fbytes: bytes(stat.f_bfree),
            abytes: bytes(stat.f_bavail),
            tfiles: stat.f_files,
            ffiles: stat.f_ffree,
            afiles: stat.f_favail,
            invarsec: 0,
        })
    });
    Ok(or_fail(outcome, FSSTAT3resfail::default()))
}

pub(crate) fn fsinfo(export: &Export, _: &Identity, args: Args<'_>) -> Result<FSINFO3res, Refusal> {
    let outcome = export.find(&args.only_handle()?).map(|node| FSINFO3resok {
        obj_attributes: attr::now(&node),
        rtmax: TRANSFER,
        rtpref: TRANSFER,
        rtmult: 4096,
        wtmax: TRANSFER,
        wtpref: TRANSFER,
        wtmult: 4096,
        dtpref: DIRECTORY,
        maxfilesize: i64::MAX as u64,
        time_delta: nfstime3 { seconds: 0, nseconds: 1 },
        properties: FSF3_LINK | FSF3_SYMLINK | FSF3_HOMOGENEOUS | FSF3_CANSETTIME,
    });
    Ok(or_fail(outcome, FSINFO3resfail::default()))
}

pub(crate) fn pathconf(export: &Export, _: &Identity, args: Args<'_>) -> Result<PATHCONF3res, Refusal> {
    let outcome = export.find(&args.only_handle()?).and_then(|node| {
        let stat = fstatvfs(export.root.own_reader()?).map_err(status)?;
        Ok(PATHCONF3resok {
            obj_attributes: attr::now(&node),
            // No system call reports it; some file systems have more.
            linkmax: 32_000,
            name_max: (stat.f_namemax as u32).min(NAME_MAX as u32),
            no_trunc: true,
            chown_restricted: true,
            case_insensitive: false,
            case_preserving: true,
        })
    });
    Ok(or_fail(outcome, PATHCONF3resfail::default()))
}
