//! NFS status of system errors (RFC 1813 §2.6).
#![forbid(unsafe_code)]

use rustix::io::Errno;

use crate::lines;
use crate::nfs3::Nfsstat3;

/// A value, or the status for the client.
pub(crate) type Outcome<T> = Result<T, Nfsstat3>;

/// Results, or the status with what else a failure has.
pub(crate) type Results<Done, Failure> = Result<Done, (Nfsstat3, Failure)>;

/// A failure before anything is known of the file.
pub(crate) fn failed<F: Default>(status: Nfsstat3) -> (Nfsstat3, F) {
    (status, F::default())
}

/// Status for an error of a system call.
pub(crate) fn status(error: Errno) -> Nfsstat3 {
    match error {
        Errno::PERM => Nfsstat3::ErrPerm,
        Errno::NOENT => Nfsstat3::ErrNoent,
        Errno::NXIO => Nfsstat3::ErrNxio,
        Errno::ACCESS => Nfsstat3::ErrAcces,
        Errno::EXIST => Nfsstat3::ErrExist,
        Errno::XDEV => Nfsstat3::ErrXdev,
        Errno::NODEV => Nfsstat3::ErrNodev,
        Errno::NOTDIR => Nfsstat3::ErrNotdir,
        Errno::ISDIR => Nfsstat3::ErrIsdir,
        // ELOOP: a symbolic link, opened without following links.
        Errno::INVAL | Errno::LOOP => Nfsstat3::ErrInval,
        Errno::FBIG => Nfsstat3::ErrFbig,
        Errno::NOSPC => Nfsstat3::ErrNospc,
        Errno::ROFS => Nfsstat3::ErrRofs,
        Errno::MLINK => Nfsstat3::ErrMlink,
        Errno::NAMETOOLONG => Nfsstat3::ErrNametoolong,
        Errno::NOTEMPTY => Nfsstat3::ErrNotempty,
        Errno::DQUOT => Nfsstat3::ErrDquot,
        Errno::STALE => Nfsstat3::ErrStale,
        Errno::OPNOTSUPP => Nfsstat3::ErrNotsupp,
        // Transient: the client retries.
        Errno::AGAIN | Errno::TXTBSY | Errno::MFILE | Errno::NFILE | Errno::NOMEM => Nfsstat3::ErrJukebox,
        Errno::IO => Nfsstat3::ErrIo,
        error => {
            lines::log(
                log::Level::Error,
                "errors without a status of their own",
                format_args!("{error}: answered with NFS3ERR_IO"),
            );
            Nfsstat3::ErrIo
        }
    }
}
