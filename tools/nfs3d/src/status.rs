//! NFS status of system errors (RFC 1813 §2.6).
#![forbid(unsafe_code)]

use rpcrdma_mempool::exceeded_limit;
use rustix::io::Errno;

use crate::lines;
use crate::nfs3::Nfsstat3;

/// A value, or the status for the client.
pub(crate) type Outcome<T> = Result<T, Nfsstat3>;

/// Results, or the status with what else a failure has.
pub(crate) type Results<Done, Failure> = Result<Done, (Nfsstat3, Failure)>;

/// A failure before anything is known of the file.
impl<F: Default> From<Nfsstat3> for (Nfsstat3, F) {
    fn from(status: Nfsstat3) -> Self {
        (status, F::default())
    }
}

/// The status of an error, logged with the limit of the process that caused it.
fn limited(error: Errno, status: Nfsstat3) -> Nfsstat3 {
    if let Some(limit) = exceeded_limit(&error.into()) {
        let line = format_args!("{error}: answered with {}; {limit}", status.name());
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
            // EBUSY: something is mounted at a name that was to be removed.
            Errno::ACCESS | Errno::BUSY => Self::ErrAcces,
            Errno::EXIST => Self::ErrExist,
            Errno::XDEV => Self::ErrXdev,
            Errno::NODEV => Self::ErrNodev,
            Errno::NOTDIR => Self::ErrNotdir,
            Errno::ISDIR => Self::ErrIsdir,
            // ELOOP: a symbolic link, opened without following links.
            Errno::INVAL | Errno::LOOP => Self::ErrInval,
            Errno::FBIG => limited(error, Self::ErrFbig),
            Errno::NOSPC => Self::ErrNospc,
            Errno::ROFS => Self::ErrRofs,
            Errno::MLINK => Self::ErrMlink,
            Errno::NAMETOOLONG => Self::ErrNametoolong,
            Errno::NOTEMPTY => Self::ErrNotempty,
            Errno::DQUOT => Self::ErrDquot,
            Errno::STALE => Self::ErrStale,
            Errno::OPNOTSUPP => Self::ErrNotsupp,
            // Transient: the client retries.
            Errno::AGAIN | Errno::TXTBSY | Errno::NOMEM => Self::ErrJukebox,
            Errno::MFILE | Errno::NFILE => limited(error, Self::ErrJukebox),
            Errno::IO => Self::ErrIo,
            error => {
                lines::log(
                    log::Level::Error,
                    "errors without a status of their own",
                    format_args!("{error}: answered with NFS3ERR_IO"),
                );
                Self::ErrIo
            }
        }
    }
}
