//! NFS status of system errors (RFC 1813 §2.6).
#![forbid(unsafe_code)]

use rpcrdma_mempool::exceeded_limit;
use rustix::io::Errno;

use crate::lines;
use crate::nfs3::Nfsstat3;

/// A value, or the status for the client.
pub(crate) type Outcome<T> = Result<T, Nfsstat3>;

/// Results, or the status with the other fields of a failure.
pub(crate) type Results<Done, Failure> = Result<Done, (Nfsstat3, Failure)>;

/// A failure without attributes of the file.
impl<F: Default> From<Nfsstat3> for (Nfsstat3, F) {
    fn from(status: Nfsstat3) -> Self {
        (status, F::default())
    }
}

/// Returns the status of an error, and logs the limit of the process that caused it, if any.
fn log_limit(error: Errno, status: Nfsstat3) -> Nfsstat3 {
    if let Some(limit) = exceeded_limit(&error.into()) {
        let line = format_args!("{error}: replied {}; {limit}", status.name());
        lines::log(log::Level::Warn, "calls that failed at a limit of the process", line);
    }
    status
}

impl From<Errno> for Nfsstat3 {
    fn from(error: Errno) -> Self {
        match error {
            Errno::PERM => Self::ErrPerm,
            Errno::NOENT => Self::ErrNoent,
            Errno::NXIO => Self::ErrNxio,
            // EBUSY: the name to be removed or renamed is a mount point.
            Errno::ACCESS | Errno::BUSY => Self::ErrAcces,
            Errno::EXIST => Self::ErrExist,
            Errno::XDEV => Self::ErrXdev,
            Errno::NODEV => Self::ErrNodev,
            Errno::NOTDIR => Self::ErrNotdir,
            Errno::ISDIR => Self::ErrIsdir,
            // ELOOP: a symbolic link was opened, but links are not followed.
            Errno::INVAL | Errno::LOOP => Self::ErrInval,
            Errno::FBIG => log_limit(error, Self::ErrFbig),
            Errno::NOSPC => Self::ErrNospc,
            Errno::ROFS => Self::ErrRofs,
            Errno::MLINK => Self::ErrMlink,
            Errno::NAMETOOLONG => Self::ErrNametoolong,
            Errno::NOTEMPTY => Self::ErrNotempty,
            Errno::DQUOT => Self::ErrDquot,
            Errno::STALE => Self::ErrStale,
            Errno::OPNOTSUPP => Self::ErrNotsupp,
            // These errors are transient, and NFS3ERR_JUKEBOX makes the client retry.
            Errno::AGAIN | Errno::TXTBSY | Errno::NOMEM => Self::ErrJukebox,
            Errno::MFILE | Errno::NFILE => log_limit(error, Self::ErrJukebox),
            Errno::IO => Self::ErrIo,
            error => {
                lines::log(
                    log::Level::Error,
                    "system errors without an NFS status",
                    format_args!("{error}: replied NFS3ERR_IO, because NFS has no status for it"),
                );
                Self::ErrIo
            }
        }
    }
}
