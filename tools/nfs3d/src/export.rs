//! The exported directory: files by handle and by name.
#![forbid(unsafe_code)]

use std::ffi::OsString;
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::Context;
use rustix::fs::{CWD, Mode, OFlags, Stat, fstat, fstatfs, openat, readlinkat};
use rustix::io::Errno;

use crate::cache::NodeCache;
use crate::handles::{FileHandle, HandleSource, Handles, Key};
use crate::identity::{Identity, Policy};
use crate::names::open_path;
use crate::nfs3::{NfsFh3, Nfsstat3, Writeverf3};
use crate::node::Node;
use crate::status::Outcome;

/// Longest name, in bytes.
pub(crate) const NAME_MAX: usize = 255;

/// Options of an export.
#[derive(Clone, Debug)]
pub struct Options {
    /// Refuses changes.
    pub read_only: bool,
    /// Makes changes of names and attributes stable before the reply.
    pub sync: bool,
    /// Policy that determines the user of each call.
    pub policy: Policy,
    /// How file handles identify files.
    pub handles: HandleSource,
    /// Key that seals file handles.
    pub key: Key,
    /// Limit of open files.
    pub max_open_files: usize,
}

/// `f_type` of overlayfs.
const OVERLAYFS: rustix::fs::FsWord = 0x794c_7630;

/// An exported directory.
pub struct Export {
    /// Path that clients mount.
    pub path: PathBuf,
    pub(crate) options: Options,
    pub(crate) root: Arc<Node>,
    pub(crate) handles: Handles,
    dev: u64,
    pub(crate) cache: NodeCache,
    /// Write verifier. It changes at each start and each failed sync, because uncommitted data may then be lost.
    verifier: AtomicU64,
}

impl Export {
    /// Opens a directory.
    ///
    /// # Errors
    /// The path is not a readable directory, or the requested kind of handles is unavailable.
    pub fn open(path: &Path, options: Options) -> anyhow::Result<Self> {
        let path = path.canonicalize().with_context(|| path.display().to_string())?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = openat(CWD, &path, flags, Mode::empty()).with_context(|| path.display().to_string())?;
        let stat = fstat(&root)?;
        if fstatfs(&root)?.f_type == OVERLAYFS {
            log::warn!(
                "{}: on overlayfs, files may have other device numbers than directories (LOOKUP then fails with \
                 NFS3ERR_ACCES), and get another inode when first written to (NFS3ERR_STALE): export a directory of \
                 one of its underlying file systems",
                path.display()
            );
        }
        let handles = Handles::new(options.handles, &options.key, &root, &stat).with_context(|| {
            format!(
                "{}: kernel file handles are unavailable, because they need root and support by the file system: use \
                 --handles names",
                path.display()
            )
        })?;
        let handle = handles
            .make(root.as_fd(), &stat)
            .map_err(|status| anyhow::anyhow!("{}: cannot make its file handle: {}", path.display(), status.name()))?;
        let path_fd = openat(&root, ".", OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        let mut verifier = [0; 8];
        getrandom::fill(&mut verifier)
            .map_err(|error| anyhow::anyhow!("cannot get random bytes from the system: {error}"))?;
        Ok(Self {
            path,
            root: Arc::new(Node::new(path_fd, handle, &stat)),
            dev: stat.st_dev,
            handles,
            cache: NodeCache::new(options.max_open_files),
            verifier: AtomicU64::new(u64::from_be_bytes(verifier)),
            options,
        })
    }

    /// Name of the way in which file handles identify files, for the log.
    pub fn handle_source_name(&self) -> &'static str {
        self.handles.describe()
    }

    pub(crate) fn is_root(&self, node: &Node) -> bool {
        node.ino() == self.root.ino()
    }

    /// Keeps open a new file whose mode denies access to its owner, so that this host can write it.
    pub(crate) fn keep_open(&self, node: &Arc<Node>, host: Option<IpAddr>) {
        self.cache.keep(node, host);
    }

    /// Closes files that were not used since the second last call of this method.
    pub fn close_unused(&self) {
        self.cache.rotate();
    }

    /// The write verifier.
    pub(crate) fn verifier(&self) -> Writeverf3 {
        self.verifier.load(Ordering::Relaxed).to_be_bytes()
    }

    /// Changes the write verifier, so that clients write uncommitted data again.
    pub(crate) fn change_verifier(&self) {
        self.verifier.fetch_add(1, Ordering::Relaxed);
    }

    /// Fails in a read-only export.
    pub(crate) fn check_writable(&self) -> Outcome<()> {
        if self.options.read_only { Err(Nfsstat3::ErrRofs) } else { Ok(()) }
    }

    /// Makes a change stable, unless `--async` is set.
    pub(crate) fn sync_change(&self, node: &Node) -> Outcome<()> {
        if self.options.sync { node.sync() } else { Ok(()) }
    }

    /// Opens the descriptor that `sync_change` needs. A lack of descriptors therefore fails a call before it has
    /// changed anything.
    pub(crate) fn prepare_sync(&self, node: &Node) -> Outcome<()> {
        if self.options.sync { node.syncer().map(drop) } else { Ok(()) }
    }

    /// Finds the file of a handle.
    pub(crate) fn find(&self, handle: NfsFh3<'_>) -> Outcome<Arc<Node>> {
        // A cached node has a verified handle.
        let cached = Handles::claimed_ino(handle.data).and_then(|ino| match ino == self.root.ino() {
            true => Some(Arc::clone(&self.root)),
            false => self.cache.get(ino),
        });
        if let Some(node) = cached
            && node.handle() == handle
        {
            return Ok(node);
        }
        let (ino, file) = self.handles.open(handle.data)?;
        let stat = fstat(&file)?;
        if stat.st_ino != ino || stat.st_dev != self.dev || stat.st_nlink == 0 {
            return Err(Nfsstat3::ErrStale);
        }
        let handle = FileHandle::try_from(handle.data).map_err(|_| Nfsstat3::ErrBadhandle)?;
        Ok(self.cache.insert(Node::new(file, handle, &stat)))
    }

    /// Finds the directory of a handle. Fails with `NFS3ERR_STALE` if the directory was removed.
    pub(crate) fn find_dir(&self, handle: NfsFh3<'_>) -> Outcome<Arc<Node>> {
        let node = self.find(handle)?;
        node.check_dir()?;
        node.stat()?;
        Ok(node)
    }

    /// Makes the handle of a file that was opened by its name in a directory.
    pub(crate) fn make_handle(&self, dir: &Node, name: &[u8], file: &OwnedFd, stat: &Stat) -> Outcome<FileHandle> {
        // A subvolume of btrfs, for example, is another file system without being a mount point.
        if stat.st_dev != self.dev {
            return Err(Nfsstat3::ErrAcces);
        }
        self.handles.learn(dir.ino(), name, stat.st_ino);
        self.handles.make(file.as_fd(), stat)
    }

    /// Opens a name in a directory, without following links.
    pub(crate) fn look_up(&self, dir: &Node, name: &[u8], user: &Identity) -> Outcome<(Arc<Node>, Stat)> {
        let name = match name {
            b"." => return Ok((self.find(dir.handle())?, dir.stat()?)),
            // The parent of the root is the root.
            b".." if self.is_root(dir) => return Ok((Arc::clone(&self.root), self.root.stat()?)),
            b".." => name,
            name => check_name(name)?,
        };
        let file = user.run_as(|| open_path(dir.fd(), name)).map_err(|error| match error {
            // Neither a mount point nor the parent of a mounted file system is exported.
            Errno::XDEV => Nfsstat3::ErrAcces,
            error => error.into(),
        })?;
        let stat = fstat(&file)?;
        if name == b".." {
            self.check_inside(&file)?;
            let handle = self.handles.make(file.as_fd(), &stat)?;
            return Ok((self.find(NfsFh3 { data: &handle })?, stat));
        }
        if stat.st_dev == self.dev
            && let Some(node) = self.cache.get(stat.st_ino)
        {
            self.handles.learn(dir.ino(), name, stat.st_ino);
            return Ok((node, stat));
        }
        let handle = self.make_handle(dir, name, &file, &stat)?;
        Ok((self.cache.insert(Node::new(file, handle, &stat)), stat))
    }

    /// Checks that a directory is below the root, because it may have been moved out of the export.
    ///
    /// Compares paths as the kernel reports them, so that the cost is bounded at any depth. The kernel does not report
    /// a path of 4096 bytes or more, which fails with `NFS3ERR_NAMETOOLONG`.
    fn check_inside(&self, dir: &OwnedFd) -> Outcome<()> {
        let (root, dir) = (current_path(self.root.fd())?, current_path(dir.as_fd())?);
        if dir.starts_with(root) { Ok(()) } else { Err(Nfsstat3::ErrAcces) }
    }
}

/// Current path of an open directory.
fn current_path(dir: BorrowedFd<'_>) -> Outcome<PathBuf> {
    let path = readlinkat(CWD, format!("/proc/self/fd/{}", dir.as_raw_fd()), Vec::new())?;
    Ok(OsString::from_vec(path.into_bytes()).into())
}

/// Checks a name that a client sent.
pub(crate) fn check_name(name: &[u8]) -> Outcome<&[u8]> {
    match name {
        b"" => Err(Nfsstat3::ErrAcces),
        _ if name.len() > NAME_MAX => Err(Nfsstat3::ErrNametoolong),
        _ if name.contains(&b'/') || name.contains(&0) => Err(Nfsstat3::ErrAcces),
        _ => Ok(name),
    }
}

/// Checks a name to be created or removed. `dots` is the status for `.` and `..`.
pub(crate) fn check_changeable_name(name: &[u8], dots: Nfsstat3) -> Outcome<&[u8]> {
    if name == b"." || name == b".." { Err(dots) } else { check_name(name) }
}
