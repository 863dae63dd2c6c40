//! GETATTR, SETATTR, ACCESS, FSSTAT, FSINFO, PATHCONF.
#![forbid(unsafe_code)]

use rpcrdma::typed::Answer;
use rustix::fs::{Access as Right, StatVfs, fstatvfs};

use crate::attr::{self, fattr, wcc};
use crate::export::{Export, NAME_MAX};
use crate::identity::Identity;
use crate::nfs::{Answered, DIRECTORY, TRANSFER};
use crate::nfs3::nfs_v3::{Access, Fsinfo, Fsstat, Getattr, Pathconf, Setattr};
use crate::nfs3::{
    ACCESS3_DELETE, ACCESS3_EXECUTE, ACCESS3_EXTEND, ACCESS3_LOOKUP, ACCESS3_MODIFY, ACCESS3_READ, Access3Args,
    Access3Res, Access3Resfail, Access3Resok, FSF3_CANSETTIME, FSF3_HOMOGENEOUS, FSF3_LINK, FSF3_SYMLINK, Fsinfo3Args,
    Fsinfo3Res, Fsinfo3Resfail, Fsinfo3Resok, Fsstat3Args, Fsstat3Res, Fsstat3Resfail, Fsstat3Resok, Getattr3Args,
    Getattr3Res, Getattr3Resok, Nfsstat3, Nfstime3, Pathconf3Args, Pathconf3Res, Pathconf3Resfail, Pathconf3Resok,
    Setattr3Args, Setattr3Res, Setattr3Resfail, Setattr3Resok,
};
use crate::node::Node;
use crate::status::{Outcome, status};

pub(crate) fn getattr(export: &Export, _: &Identity, args: Getattr3Args<'_>, answer: Answer<'_, Getattr>) -> Answered {
    answer.send(&match export.find(args.object).and_then(|node| node.stat()) {
        Ok(stat) => Getattr3Res::Ok(Getattr3Resok { obj_attributes: fattr(&stat) }),
        Err(status) => Getattr3Res::Default(status),
    })
}

pub(crate) fn setattr(
    export: &Export,
    who: &Identity,
    args: Setattr3Args<'_>,
    answer: Answer<'_, Setattr>,
) -> Answered {
    let node = match export.find(args.object) {
        Ok(node) => node,
        Err(status) => return answer.send(&Setattr3Res::Default(status, Setattr3Resfail::default())),
    };
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
    answer.send(&match outcome {
        Ok(()) => Setattr3Res::Ok(Setattr3Resok { obj_wcc }),
        Err(status) => Setattr3Res::Default(status, Setattr3Resfail { obj_wcc }),
    })
}

pub(crate) fn access(export: &Export, who: &Identity, args: Access3Args<'_>, answer: Answer<'_, Access>) -> Answered {
    let found = export.find(args.object).and_then(|node| Ok((node.stat()?, node)));
    answer.send(&match found {
        Ok((stat, node)) => Access3Res::Ok(Access3Resok {
            obj_attributes: Some(fattr(&stat)),
            access: granted(export, &node, who, args.access),
        }),
        Err(status) => Access3Res::Default(status, Access3Resfail::default()),
    })
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

pub(crate) fn fsstat(export: &Export, _: &Identity, args: Fsstat3Args<'_>, answer: Answer<'_, Fsstat>) -> Answered {
    let found = export.find(args.fsroot).and_then(|node| Ok((file_system(export)?, node)));
    answer.send(&match found {
        Ok((stat, node)) => {
            let bytes = |blocks: u64| blocks.saturating_mul(stat.f_frsize);
            Fsstat3Res::Ok(Fsstat3Resok {
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
        Err(status) => Fsstat3Res::Default(status, Fsstat3Resfail::default()),
    })
}

pub(crate) fn fsinfo(export: &Export, _: &Identity, args: Fsinfo3Args<'_>, answer: Answer<'_, Fsinfo>) -> Answered {
    answer.send(&match export.find(args.fsroot) {
        Ok(node) => Fsinfo3Res::Ok(Fsinfo3Resok {
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
        }),
        Err(status) => Fsinfo3Res::Default(status, Fsinfo3Resfail::default()),
    })
}

pub(crate) fn pathconf(
    export: &Export,
    _: &Identity,
    args: Pathconf3Args<'_>,
    answer: Answer<'_, Pathconf>,
) -> Answered {
    let found = export.find(args.object).and_then(|node| Ok((file_system(export)?, node)));
    answer.send(&match found {
        Ok((stat, node)) => Pathconf3Res::Ok(Pathconf3Resok {
            obj_attributes: attr::now(&node),
            // No system call reports it; some file systems have more.
            linkmax: 32_000,
            name_max: (stat.f_namemax as u32).min(NAME_MAX as u32),
            no_trunc: true,
            chown_restricted: true,
            case_insensitive: false,
            case_preserving: true,
        }),
        Err(status) => Pathconf3Res::Default(status, Pathconf3Resfail::default()),
    })
}
