//! LOOKUP, READDIR, READDIRPLUS.
#![forbid(unsafe_code)]

use std::mem::MaybeUninit;

use rpcrdma::typed::ReplySender;
use rpcrdma::xdr::{Encode, ListBuilder};
use rustix::fs::{RawDir, SeekFrom, fstat, seek};
use rustix::io::Errno;

use crate::attr::{self, fattr};
use crate::handles::FileHandle;
use crate::names::open_path;
use crate::nfs::{Call, DIRECTORY, HandlerResult};
use crate::nfs3::nfs_v3::{Lookup, Readdir, Readdirplus};
use crate::nfs3::*;
use crate::node::Node;
use crate::status::{Outcome, Results};

/// Empty verifier: the file system's own cookies are used, which stay valid while the file system exists.
const NO_VERIFIER: Cookieverf3 = [0; 8];

/// Entries of one reply, up to the client's limits.
struct Page {
    list: ListBuilder,
    /// Limit of the results, in bytes.
    total: usize,
    /// Bytes left for names, inode numbers and cookies.
    names_left: usize,
}

impl Page {
    fn new(total: u32, names_left: usize) -> Self {
        let total = total.min(DIRECTORY) as usize;
        Self { list: ListBuilder::with_capacity(total), total, names_left }
    }

    /// Adds an entry. Returns false if the entry exceeds a limit.
    fn push(&mut self, entry: &impl Encode, name: &[u8]) -> Outcome<bool> {
        let names_left = self.names_left.checked_sub(ENTRY_HEAD + name.len());
        let len = HEAD + self.list.len() + MARKER + entry.encoded_len() + TAIL;
        // The limit of names does not apply to the first entry, so that the client makes progress.
        let fits = len <= self.total && (names_left.is_some() || self.list.is_empty());
        if fits {
            self.names_left = names_left.unwrap_or(0);
            self.list.push(entry).map_err(|_| Nfsstat3::ErrServerfault)?;
        }
        Ok(fits)
    }
}

/// Bytes in front of a list: status, attributes, verifier.
const HEAD: usize = 4 + 88 + 8;
/// Bytes of a marker in front of each entry of a list.
const MARKER: usize = 4;
/// Bytes of an entry without its name: inode number, length of the name, cookie.
const ENTRY_HEAD: usize = 8 + 4 + 8;
/// End of a list, and its end-of-file flag.
const TAIL: usize = 8;

impl Call<'_> {
    pub(crate) fn lookup(&self, args: Lookup3Args<'_>, answer: ReplySender<'_, Lookup>) -> HandlerResult {
        let dir = match self.export.find_dir(args.what.dir) {
            Ok(dir) => dir,
            Err(status) => return answer.send(&Lookup3Res::Default(status, Lookup3Resfail::default())),
        };
        let found = self.export.look_up(&dir, args.what.name.0, &self.user);
        let dir_attributes = attr::post_op_attr(&dir);
        let done = found.as_ref().map(|(node, stat)| Lookup3Resok {
            object: node.handle(),
            obj_attributes: Some(fattr(stat)),
            dir_attributes,
        });
        answer.send(&done.map_err(|status| (*status, Lookup3Resfail { dir_attributes })).into())
    }

    pub(crate) fn readdir(&self, args: Readdir3Args<'_>, answer: ReplySender<'_, Readdir>) -> HandlerResult {
        let mut page = Page::new(args.count, usize::MAX);
        let listed = self.list(args.dir, args.cookie, &mut page, |_, entry, page| page.push(entry, entry.name.0));
        let done = listed.map(|(dir_attributes, eof)| {
            let reply = Dirlist3 { entries: page.list.list(), eof };
            Readdir3Resok { dir_attributes, cookieverf: NO_VERIFIER, reply }
        });
        answer.send(&done.map_err(|(status, dir_attributes)| (status, Readdir3Resfail { dir_attributes })).into())
    }

    pub(crate) fn readdirplus(
        &self,
        args: Readdirplus3Args<'_>,
        answer: ReplySender<'_, Readdirplus>,
    ) -> HandlerResult {
        let mut page = Page::new(args.maxcount, args.dircount as usize);
        let listed = self.list(args.dir, args.cookie, &mut page, |dir, entry, page| {
            let Entry3 { fileid, name, cookie } = *entry;
            // A file that was removed meanwhile, or that this client may not see, is listed by its name only.
            let (name_attributes, handle) = self.entry_attributes(dir, name.0).unzip();
            let name_handle = handle.as_deref().map(|data| NfsFh3 { data });
            let name_attributes = name_attributes.flatten();
            page.push(&Entryplus3 { fileid, name, cookie, name_attributes, name_handle }, name.0)
        });
        let done = listed.map(|(dir_attributes, eof)| {
            let reply = Dirlistplus3 { entries: page.list.list(), eof };
            Readdirplus3Resok { dir_attributes, cookieverf: NO_VERIFIER, reply }
        });
        answer.send(&done.map_err(|(status, dir_attributes)| (status, Readdirplus3Resfail { dir_attributes })).into())
    }

    /// Attributes and handle of a name. The file is not kept open.
    fn entry_attributes(&self, dir: &Node, name: &[u8]) -> Option<(PostOpAttr, FileHandle)> {
        if name == b"." {
            return Some((attr::post_op_attr(dir), FileHandle::try_from(dir.handle().data).ok()?));
        }
        if name == b".." {
            return None;
        }
        let file = self.user.run_as(|| open_path(dir.fd(), name)).ok()?;
        let stat = fstat(&file).ok()?;
        let handle = self.export.make_handle(dir, name, &file, &stat).ok()?;
        Some((Some(fattr(&stat)), handle))
    }

    /// Passes the entries after a cookie to `add`, until one does not fit.
    ///
    /// Returns the attributes of the directory, and whether its end was reached.
    fn list(
        &self,
        handle: NfsFh3<'_>,
        cookie: u64,
        page: &mut Page,
        mut add: impl FnMut(&Node, &Entry3<'_>, &mut Page) -> Outcome<bool>,
    ) -> Results<(PostOpAttr, bool), PostOpAttr> {
        let dir = self.export.find_dir(handle)?;
        let attributes = attr::post_op_attr(&dir);
        match self.entries(&dir, cookie, |entry| add(&dir, entry, page)) {
            Ok(false) if page.list.is_empty() => Err((Nfsstat3::ErrToosmall, attr::post_op_attr(&dir))),
            Ok(eof) => Ok((attributes, eof)),
            Err(status) => Err((status, attr::post_op_attr(&dir))),
        }
    }

    /// Passes the entries after a cookie to `visit`, until it returns false. Returns true at the end of the directory.
    fn entries(&self, dir: &Node, cookie: u64, mut visit: impl FnMut(&Entry3<'_>) -> Outcome<bool>) -> Outcome<bool> {
        let file = dir.open_dir(&self.user)?;
        if cookie != 0 {
            // Not every number is a valid cookie.
            let position = i64::try_from(cookie).map_err(|_| Nfsstat3::ErrBadCookie)?;
            seek(&file, SeekFrom::Start(position as u64)).map_err(|_| Nfsstat3::ErrBadCookie)?;
        }
        let mut buffer = [MaybeUninit::<u8>::uninit(); 16 << 10];
        let mut entries = RawDir::new(&file, &mut buffer);
        while let Some(entry) = entries.next() {
            let entry = match entry {
                Err(Errno::INVAL) if cookie != 0 => return Err(Nfsstat3::ErrBadCookie),
                entry => entry?,
            };
            let name = entry.file_name().to_bytes();
            // The inode number of the root's parent is hidden.
            let fileid = if name == b".." && self.export.is_root(dir) { dir.ino() } else { entry.ino() };
            if !visit(&Entry3 { fileid, name: Filename3(name), cookie: entry.next_entry_cookie() })? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}
