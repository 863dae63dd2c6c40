//! NFS status of system errors (RFC 1813 §2.6).
#![forbid(unsafe_code)]

use nfs3_types::nfs3::nfsstat3;
use rustix::io::Errno;

use crate::lines;

/// Status for an error of a system call.
pub(crate) fn status(error: Errno) -> nfsstat3 {
    match error {
        Errno::PERM => nfsstat3::NFS3ERR_PERM,
        Errno::NOENT => nfsstat3::NFS3ERR_NOENT,
        Errno::NXIO => nfsstat3::NFS3ERR_NXIO,
        Errno::ACCESS => nfsstat3::NFS3ERR_ACCES,
        Errno::EXIST => nfsstat3::NFS3ERR_EXIST,
        Errno::XDEV => nfsstat3::NFS3ERR_XDEV,
        Errno::NODEV => nfsstat3::NFS3ERR_NODEV,
        Errno::NOTDIR => nfsstat3::NFS3ERR_NOTDIR,
        Errno::ISDIR => nfsstat3::NFS3ERR_ISDIR,
        // ELOOP: a symbolic link, opened without following links.
        Errno::INVAL | Errno::LOOP => nfsstat3::NFS3ERR_INVAL,
        Errno::FBIG => nfsstat3::NFS3ERR_FBIG,
        Errno::NOSPC => nfsstat3::NFS3ERR_NOSPC,
        Errno::ROFS => nfsstat3::NFS3ERR_ROFS,
        Errno::MLINK => nfsstat3::NFS3ERR_MLINK,
        Errno::NAMETOOLONG => nfsstat3::NFS3ERR_NAMETOOLONG,
        Errno::NOTEMPTY => nfsstat3::NFS3ERR_NOTEMPTY,
        Errno::DQUOT => nfsstat3::NFS3ERR_DQUOT,
        Errno::STALE => nfsstat3::NFS3ERR_STALE,
        Errno::OPNOTSUPP => nfsstat3::NFS3ERR_NOTSUPP,
        // Transient: the client retries.
        Errno::AGAIN | Errno::TXTBSY | Errno::MFILE | Errno::NFILE | Errno::NOMEM => nfsstat3::NFS3ERR_JUKEBOX,
        Errno::IO => nfsstat3::NFS3ERR_IO,
        error => {
            lines::log(
                log::Level::Error,
                "errors without a status of their own",
                format_args!("{error}: answered with NFS3ERR_IO"),
            );
            nfsstat3::NFS3ERR_IO
        }
    }
}
