//! File handles, which clients may keep for any time.
//!
//! ```text
//! 0   1 byte    format: 1
//! 1   1 byte    kind of the body: 1 for a handle of the kernel, 2 for a birth time
//! 2   2 bytes   the kernel handle's type
//! 4   8 bytes   inode number
//! 12  0 to 36   body
//! .   16 bytes  HMAC-SHA-256 over the root's inode number and all bytes before, truncated
//! ```
//!
//! A handle refers to no state of the server, so it survives a restart. The server accepts only handles that it made:
//! without the key, which is in a file, nobody can make a handle of a file outside the export.
#![forbid(unsafe_code)]

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use arrayvec::ArrayVec;
use hmac::{Hmac, KeyInit, Mac};
use rustix::fs::Stat;
use rustix::io::{self, Errno, fcntl_dupfd_cloexec};
use sha2::Sha256;

use crate::names::Names;
use crate::nfs3::Nfsstat3;
use crate::status::Outcome;
use crate::sys::{self, KernelHandle};

/// A handle on the wire, at most 64 bytes.
pub(crate) type FileHandle = ArrayVec<u8, FH_MAX>;
/// Longest handle, in bytes.
pub(crate) const FH_MAX: usize = 64;

const FORMAT: u8 = 1;
const KERNEL: u8 = 1;
const BIRTH: u8 = 2;
const HEAD: usize = 12;
const MAC: usize = 16;

/// How handles identify files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum HandleSource {
    /// The kernel's handles if available, else names.
    Auto,
    /// The kernel's handles, which need root and support of the file system.
    Kernel,
    /// Inode number and birth time. Files are found by their last known names, or by a search of the tree.
    Names,
}

/// Makes handles, and finds their files.
pub(crate) struct Handles {
    /// State of the MAC after the key and the root's inode number.
    mac: Hmac<Sha256>,
    finder: Finder,
}

enum Finder {
    Kernel(OwnedFd),
    Names(Box<Names>),
}

/// Key that seals handles.
pub type Key = [u8; 32];

impl Handles {
    /// Creates the handles of an export with an open root.
    ///
    /// # Errors
    /// The kernel's handles were requested, but are unavailable.
    pub(crate) fn new(source: HandleSource, key: &Key, root: &OwnedFd, root_stat: &Stat) -> io::Result<Self> {
        let finder = match (source, kernel_finder(root)) {
            (HandleSource::Auto | HandleSource::Kernel, Ok(mount)) => Finder::Kernel(mount),
            (HandleSource::Kernel, Err(error)) => return Err(error),
            _ => Finder::Names(Box::new(Names::new(fcntl_dupfd_cloexec(root, 0)?, root_stat))),
        };
        let mut mac = Hmac::<Sha256>::new_from_slice(key).map_err(|_| Errno::INVAL)?;
        mac.update(&root_stat.st_ino.to_be_bytes());
        Ok(Self { mac, finder })
    }

    pub(crate) fn describe(&self) -> &'static str {
        match self.finder {
            Finder::Kernel(_) => "kernel handles",
            Finder::Names(_) => "handles by inode and name",
        }
    }

    /// Makes the handle of an open file.
    pub(crate) fn make(&self, file: BorrowedFd<'_>, stat: &Stat) -> Outcome<FileHandle> {
        let KernelHandle { kind, bytes } = match &self.finder {
            Finder::Kernel(_) => sys::name_to_handle(file)?,
            Finder::Names(_) => KernelHandle { kind: 0, bytes: Names::birth(file)?.into_iter().collect() },
        };
        let kind = u16::try_from(kind).map_err(|_| Nfsstat3::ErrServerfault)?;
        let mut handle = FileHandle::from_iter([FORMAT, self.body_kind()]);
        handle.extend(kind.to_be_bytes());
        handle.extend(stat.st_ino.to_be_bytes());
        handle.try_extend_from_slice(&bytes).map_err(|_| Nfsstat3::ErrServerfault)?;
        let seal: [u8; 32] = self.mac.clone().chain_update(&handle).finalize().into_bytes().into();
        handle.try_extend_from_slice(&seal[..MAC]).map_err(|_| Nfsstat3::ErrServerfault)?;
        Ok(handle)
    }

    /// Kind of the body of the server's handles.
    fn body_kind(&self) -> u8 {
        match self.finder {
            Finder::Kernel(_) => KERNEL,
            Finder::Names(_) => BIRTH,
        }
    }

    /// Inode number that a handle claims, without verification.
    pub(crate) fn claimed_ino(handle: &[u8]) -> Option<u64> {
        let ino = handle.get(4..HEAD)?.try_into().ok()?;
        (handle[0] == FORMAT && handle.len() >= HEAD + MAC).then(|| u64::from_be_bytes(ino))
    }

    /// Verifies a handle and opens its file with `O_PATH`. Also returns the inode number.
    ///
    /// # Errors
    /// `NFS3ERR_BADHANDLE` for a malformed handle; `NFS3ERR_STALE` for a handle of another export or key.
    pub(crate) fn open(&self, handle: &[u8]) -> Outcome<(u64, OwnedFd)> {
        let ino = Self::claimed_ino(handle).ok_or(Nfsstat3::ErrBadhandle)?;
        let (bytes, seal) = handle.split_at(handle.len() - MAC);
        if self.mac.clone().chain_update(bytes).verify_truncated_left(seal).is_err() {
            return Err(Nfsstat3::ErrStale);
        }
        if bytes[1] != self.body_kind() {
            return Err(Nfsstat3::ErrStale);
        }
        let body = &bytes[HEAD..];
        let file = match &self.finder {
            Finder::Kernel(mount) => {
                let kind = u16::from_be_bytes([bytes[2], bytes[3]]).into();
                let handle = KernelHandle { kind, bytes: body.iter().copied().collect() };
                sys::open_by_handle(mount.as_fd(), &handle)?
            }
            Finder::Names(names) => names.find(ino, body)?,
        };
        Ok((ino, file))
    }

    /// Number of known names.
    #[cfg(test)]
    pub(crate) fn known_count(&self) -> usize {
        let Finder::Names(names) = &self.finder else { return 0 };
        names.known_count()
    }

    /// Forgets a removed name of an inode. If the inode has no name any more, any known name of it is forgotten.
    pub(crate) fn forget(&self, parent: u64, name: &[u8], ino: u64, is_last: bool) {
        if let Finder::Names(names) = &self.finder {
            names.forget(parent, name, ino, is_last);
        }
    }

    /// Records the name of an inode.
    pub(crate) fn learn(&self, parent: u64, name: &[u8], ino: u64) {
        if let Finder::Names(names) = &self.finder {
            names.learn(parent, name, ino);
        }
    }
}

/// Returns a descriptor for opening by handle, if the root can be opened that way.
fn kernel_finder(root: &OwnedFd) -> io::Result<OwnedFd> {
    let handle = sys::name_to_handle(root.as_fd())?;
    sys::open_by_handle(root.as_fd(), &handle)?;
    fcntl_dupfd_cloexec(root, 0)
}
