//! GETATTR, SETATTR, ACCESS, FSSTAT, FSINFO, PATHCONF.
#![forbid(unsafe_code)]

use rustix::fs::{Access as Right, StatVfs, fstatvfs};

use crate::attr::{self, fattr, wcc_data};
use crate::export::NAME_MAX;
use crate::nfs::{Call, DIRECTORY, TRANSFER};
use crate::nfs3::*;
use crate::node::Node;
use crate::status::{Outcome, Results};

impl Call<'_> {
    pub(crate) fn getattr(&self, args: Getattr3Args<'_>) -> Outcome<Getattr3Resok> {
        Ok(Getattr3Resok { obj_attributes: fattr(&self.export.find(args.object)?.stat()?) })
    }

    pub(crate) fn setattr(&self, args: Setattr3Args<'_>) -> Results<Setattr3Resok, Setattr3Resfail> {
        let node = self.export.find(args.object)?;
        let _lock = node.lock();
        let stat = node.stat();
        let before = stat.as_ref().ok().map(attr::wcc_attr);
        let outcome = stat.and_then(|stat| {
            self.export.check_writable()?;
            if args.guard.is_some_and(|ctime| ctime != attr::ctime(&stat)) {
                return Err(Nfsstat3::ErrNotSync);
            }
            let new = attr::NewAttributes::new(&args.new_attributes)?;
            self.export.prepare_sync(&node)?;
            new.apply(&node, &self.user)?;
            self.export.sync_change(&node)
        });
        let obj_wcc = wcc_data(before, &node);
        outcome.map(|()| Setattr3Resok { obj_wcc }).map_err(|status| (status, Setattr3Resfail { obj_wcc }))
    }

    pub(crate) fn access(&self, args: Access3Args<'_>) -> Results<Access3Resok, Access3Resfail> {
        let node = self.export.find(args.object)?;
        let obj_attributes = Some(fattr(&node.stat()?));
        Ok(Access3Resok { obj_attributes, access: self.granted_rights(&node, args.access) })
    }

    /// The requested rights that the user has.
    fn granted_rights(&self, node: &Node, requested: u32) -> u32 {
        let execute = if node.is_dir() { ACCESS3_LOOKUP } else { ACCESS3_EXECUTE };
        // Write permission for a directory allows deletion in it. A file's own permissions do not decide about its
        // deletion.
        let write = ACCESS3_MODIFY | ACCESS3_EXTEND | if node.is_dir() { ACCESS3_DELETE } else { 0 };
        let rights = [(ACCESS3_READ, Right::READ_OK), (write, Right::WRITE_OK), (execute, Right::EXEC_OK)];
        rights
            .into_iter()
            .filter(|&(bits, right)| {
                let is_requested = bits & requested != 0;
                let is_read_only = right == Right::WRITE_OK && self.export.options.read_only;
                is_requested && !is_read_only && node.permits(&self.user, right)
            })
            .fold(0, |granted, (bits, _)| granted | bits & requested)
    }

    /// State of the exported file system.
    fn file_system(&self) -> Outcome<StatVfs> {
        Ok(fstatvfs(self.export.root.server_reader()?)?)
    }

    pub(crate) fn fsstat(&self, args: Fsstat3Args<'_>) -> Results<Fsstat3Resok, Fsstat3Resfail> {
        let node = self.export.find(args.fsroot)?;
        let stat = self.file_system()?;
        let bytes = |blocks: u64| blocks.saturating_mul(stat.f_frsize);
        Ok(Fsstat3Resok {
            obj_attributes: attr::post_op_attr(&node),
            tbytes: bytes(stat.f_blocks),
            fbytes: bytes(stat.f_bfree),
            abytes: bytes(stat.f_bavail),
            tfiles: stat.f_files,
            ffiles: stat.f_ffree,
            afiles: stat.f_favail,
            invarsec: 0,
        })
    }

    pub(crate) fn fsinfo(&self, args: Fsinfo3Args<'_>) -> Results<Fsinfo3Resok, Fsinfo3Resfail> {
        let node = self.export.find(args.fsroot)?;
        Ok(Fsinfo3Resok {
            obj_attributes: attr::post_op_attr(&node),
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

    pub(crate) fn pathconf(&self, args: Pathconf3Args<'_>) -> Results<Pathconf3Resok, Pathconf3Resfail> {
        let node = self.export.find(args.object)?;
        let stat = self.file_system()?;
        Ok(Pathconf3Resok {
            obj_attributes: attr::post_op_attr(&node),
            // No system call reports this limit, and some file systems allow more links.
            linkmax: 32_000,
            name_max: (stat.f_namemax as u32).min(NAME_MAX as u32),
            no_trunc: true,
            chown_restricted: true,
            case_insensitive: false,
            case_preserving: true,
        })
    }
}
