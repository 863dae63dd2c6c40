//! GETATTR, SETATTR, ACCESS, FSSTAT, FSINFO, PATHCONF.
#![forbid(unsafe_code)]

use rustix::fs::{Access as Right, StatVfs, fstatvfs};

use crate::attr::{self, fattr, wcc};
use crate::export::{Export, NAME_MAX};
use crate::identity::Identity;
use crate::nfs::{DIRECTORY, TRANSFER};
use crate::nfs3::*;
use crate::node::Node;
use crate::status::{Outcome, Results, failed, status};

pub(crate) fn getattr(export: &Export, _: &Identity, args: Getattr3Args<'_>) -> Outcome<Getattr3Resok> {
    Ok(Getattr3Resok { obj_attributes: fattr(&export.find(args.object)?.stat()?) })
}

pub(crate) fn setattr(
    export: &Export,
    who: &Identity,
    args: Setattr3Args<'_>,
) -> Results<Setattr3Resok, Setattr3Resfail> {
    let node = export.find(args.object).map_err(failed)?;
    let _alone = node.lock();
    let stat = node.stat();
    let before = stat.as_ref().ok().map(attr::before);
    let outcome = stat.and_then(|stat| {
        export.check_writable()?;
        if args.guard.is_some_and(|ctime| ctime != attr::ctime(&stat)) {
            return Err(Nfsstat3::ErrNotSync);
        }
        attr::apply(&node, who, &args.new_attributes)?;
        export.settle(&node)
    });
    let obj_wcc = wcc(before, &node);
    outcome.map(|()| Setattr3Resok { obj_wcc }).map_err(|status| (status, Setattr3Resfail { obj_wcc }))
}

pub(crate) fn access(export: &Export, who: &Identity, args: Access3Args<'_>) -> Results<Access3Resok, Access3Resfail> {
    let node = export.find(args.object).map_err(failed)?;
    let obj_attributes = Some(fattr(&node.stat().map_err(failed)?));
    Ok(Access3Resok { obj_attributes, access: granted(export, &node, who, args.access) })
}

/// The requested rights that the user has.
fn granted(export: &Export, node: &Node, who: &Identity, asked: u32) -> u32 {
    let execute = if node.is_dir() { ACCESS3_LOOKUP } else { ACCESS3_EXECUTE };
    // Write permission on a directory allows deletion in it. A file's permissions do not tell who may delete the file.
    let write = ACCESS3_MODIFY | ACCESS3_EXTEND | if node.is_dir() { ACCESS3_DELETE } else { 0 };
    let rights = [(ACCESS3_READ, Right::READ_OK), (write, Right::WRITE_OK), (execute, Right::EXEC_OK)];
    rights
        .into_iter()
        .filter(|&(bits, what)| {
            let may_be = bits & asked != 0 && !(what == Right::WRITE_OK && export.options.read_only);
            may_be && node.permits(who, what)
        })
        .fold(0, |sum, (bits, _)| sum | bits & asked)
}

/// State of the exported file system.
fn file_system(export: &Export) -> Outcome<StatVfs> {
    fstatvfs(export.root.own_reader()?).map_err(status)
}

pub(crate) fn fsstat(export: &Export, _: &Identity, args: Fsstat3Args<'_>) -> Results<Fsstat3Resok, Fsstat3Resfail> {
    let node = export.find(args.fsroot).map_err(failed)?;
    let stat = file_system(export).map_err(failed)?;
    let bytes = |blocks: u64| blocks.saturating_mul(stat.f_frsize);
    Ok(Fsstat3Resok {
        obj_attributes: attr::now(&node),
        tbytes: bytes(stat.f_blocks),
        fbytes: bytes(stat.f_bfree),
        abytes: bytes(stat.f_bavail),
        tfiles: stat.f_files,
        ffiles: stat.f_ffree,
        afiles: stat.f_favail,
        invarsec: 0,
    })
}

pub(crate) fn fsinfo(export: &Export, _: &Identity, args: Fsinfo3Args<'_>) -> Results<Fsinfo3Resok, Fsinfo3Resfail> {
    let node = export.find(args.fsroot).map_err(failed)?;
    Ok(Fsinfo3Resok {
        obj_attributes: attr::now(&node),
        rtmax: TRANSFER,
        rtpref: TRANSFER,
        rtmult: 4096,
        wtmax: TRANSFER,
        wtpref: TRANSFER,
        wtmult: 4096,
        dtpref: DIRECTORY,
        maxfilesize: i64::MAX as u64,
        time_delta: Nfstime3 { seconds: 0, nseconds: 1 },
        properties: FSF3_LINK | FSF3_SYMLINK | FSF3_HOMOGENEOUS | FSF3_CANSETTIME,
    })
}

pub(crate) fn pathconf(
    export: &Export,
    _: &Identity,
    args: Pathconf3Args<'_>,
) -> Results<Pathconf3Resok, Pathconf3Resfail> {
    let node = export.find(args.object).map_err(failed)?;
    let stat = file_system(export).map_err(failed)?;
    Ok(Pathconf3Resok {
        obj_attributes: attr::now(&node),
        // No system call reports it; some file systems have more.
        linkmax: 32_000,
        name_max: (stat.f_namemax as u32).min(NAME_MAX as u32),
        no_trunc: true,
        chown_restricted: true,
        case_insensitive: false,
        case_preserving: true,
    })
}
