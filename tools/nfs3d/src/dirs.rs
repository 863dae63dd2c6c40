//! LOOKUP, READDIR, READDIRPLUS.
#![forbid(unsafe_code)]

use std::mem::MaybeUninit;

use nfs3_types::nfs3::{
    LOOKUP3res, LOOKUP3resfail, LOOKUP3resok, Nfs3Result, READDIR3resfail, cookieverf3, entry3, entryplus3, filename3,
    nfsstat3, post_op_attr,
};
use nfs3_types::xdr_codec::Pack;
use rpcrdma::Refusal;
use rustix::fs::{Mode, OFlags, RawDir, SeekFrom, fstat, openat, seek};
use rustix::io::Errno;

use crate::attr::{self, fattr};
use crate::codec::{Args, Outcome, fh, optional, or_fail};
use crate::export::Export;
use crate::handles::FileHandle;
use crate::identity::Identity;
use crate::nfs::DIRECTORY;
use crate::node::Node;
use crate::status::status;

pub(crate) fn lookup(export: &Export, who: &Identity, mut args: Args<'_>) -> Result<LOOKUP3res, Refusal> {
    let (handle, name) = args.entry()?;
    args.end()?;
    let dir = match export.find_dir(&handle) {
        Ok(dir) => dir,
        Err(status) => return Ok(or_fail(Err(status), LOOKUP3resfail::default())),
    };
    let found = export.look_up(&dir, name, who);
    let dir_attributes = attr::now(&dir);
    Ok(match found {
        Ok((node, stat)) => Nfs3Result::Ok(LOOKUP3resok {
            object: fh(node.handle()),
            obj_attributes: optional(Some(fattr(&stat))),
            dir_attributes,
        }),
        Err(status) => Nfs3Result::Err((status, LOOKUP3resfail { dir_attributes })),
    })
}

/// Encoded results.
pub(crate) struct Encoded(Vec<u8>);

impl Pack for Encoded {
    fn packed_size(&self) -> usize {
        self.0.len()
    }

    fn pack(&self, out: &mut impl std::io::Write) -> nfs3_types::xdr_codec::Result<usize> {
        out.write_all(&self.0)?;
        Ok(self.0.len())
    }
}

/// Encoding to memory does not fail.
fn push(out: &mut Vec<u8>, what: &impl Pack) -> Outcome<()> {
    what.pack(out).map(|_| ()).map_err(|_| nfsstat3::NFS3ERR_SERVERFAULT)
}

/// A directory entry.
struct Entry<'a> {
    ino: u64,
    name: &'a [u8],
    /// Cookie of the next entry.
    cookie: u64,
}

/// The client's limits.
struct Room {
    /// Bytes of results.
    total: usize,
    /// Bytes of names, inode numbers and cookies.
    names: usize,
}

/// End of a list, and its end-of-file flag.
const TAIL: usize = 8;

pub(crate) fn readdir(export: &Export, who: &Identity, mut args: Args<'_>) -> Result<Encoded, Refusal> {
    let (handle, cookie): (_, u64) = (args.handle()?, args.get()?);
    let _verifier: cookieverf3 = args.get()?;
    let count = args.u32()?.min(DIRECTORY) as usize;
    args.end()?;
    let room = Room { total: count, names: usize::MAX };
    list(export, who, &handle, cookie, &room, |_, entry, out| {
        let Entry { ino, name, cookie } = *entry;
        push(out, &entry3 { fileid: ino, name: filename3::from(name), cookie })
    })
}

pub(crate) fn readdirplus(export: &Export, who: &Identity, mut args: Args<'_>) -> Result<Encoded, Refusal> {
    let (handle, cookie): (_, u64) = (args.handle()?, args.get()?);
    let _verifier: cookieverf3 = args.get()?;
    let (names, total) = (args.u32()? as usize, args.u32()?.min(DIRECTORY) as usize);
    args.end()?;
    list(export, who, &handle, cookie, &Room { total, names }, |dir, entry, out| {
        let Entry { ino, name, cookie } = *entry;
        let found = look_at(export, dir, name, who);
        let (name_attributes, name_handle) = match found {
            Some((attributes, handle)) => (attributes, optional(Some(fh(&handle)))),
            // Removed meanwhile, or not visible to this client: the name is listed anyway.
            None => (optional(None), optional(None)),
        };
        let name = filename3::from(name);
        push(out, &entryplus3 { fileid: ino, name, cookie, name_attributes, name_handle })
    })
}

/// Attributes and handle of a name; does not keep the file open.
fn look_at(export: &Export, dir: &Node, name: &[u8], who: &Identity) -> Option<(post_op_attr, FileHandle)> {
    if name == b"." {
        return Some((attr::now(dir), dir.handle().clone()));
    }
    if name == b".." {
        return None;
    }
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = who.act(|| openat(dir.fd(), name, flags, Mode::empty())).ok()?;
    let stat = fstat(&file).ok()?;
    let handle = export.handle_of(dir, name, &file, &stat).ok()?;
    Some((optional(Some(fattr(&stat))), handle))
}

/// Results with entries from a cookie on, if any.
fn list(
    export: &Export,
    who: &Identity,
    handle: &FileHandle,
    cookie: u64,
    room: &Room,
    encode: impl FnMut(&Node, &Entry<'_>, &mut Vec<u8>) -> Outcome<()>,
) -> Result<Encoded, Refusal> {
    let dir = export.find_dir(handle);
    let listed = dir.as_ref().map_err(|status| *status).and_then(|dir| listed(export, who, dir, cookie, room, encode));
    listed.or_else(|status| {
        let dir_attributes = dir.map_or_else(|_| optional(None), |dir| attr::now(&dir));
        let mut out = Vec::new();
        // READDIRPLUS fails in the same form.
        push(&mut out, &or_fail::<Encoded, _>(Err(status), READDIR3resfail { dir_attributes }))
            .map_err(|_| Refusal::SystemError)?;
        Ok(Encoded(out))
    })
}

/// Encodes entries up to the limits.
fn listed(
    export: &Export,
    who: &Identity,
    dir: &Node,
    cookie: u64,
    room: &Room,
    mut encode: impl FnMut(&Node, &Entry<'_>, &mut Vec<u8>) -> Outcome<()>,
) -> Outcome<Encoded> {
    let mut out = Vec::with_capacity(room.total);
    push(&mut out, &nfsstat3::NFS3_OK)?;
    push(&mut out, &attr::now(dir))?;
    // Cookies are the file system's, and valid as long as it. No verifier is needed.
    push(&mut out, &cookieverf3::default())?;
    let (empty, mut names) = (out.len(), 0);
    let eof = entries(export, dir, who, cookie, |entry| {
        let before = out.len();
        push(&mut out, &true)?;
        encode(dir, entry, &mut out)?;
        names += 20 + entry.name.len();
        // At least one entry, whatever the limit of names.
        let fits = out.len() + TAIL <= room.total && (names <= room.names || before == empty);
        if !fits {
            out.truncate(before);
        }
        Ok(fits)
    })?;
    if out.len() == empty && !eof {
        return Err(nfsstat3::NFS3ERR_TOOSMALL);
    }
    push(&mut out, &false)?;
    push(&mut out, &eof)?;
    Ok(Encoded(out))
}

/// Passes entries from a cookie on to `take`, until that stops. True at the end of the directory.
fn entries(
    export: &Export,
    dir: &Node,
    who: &Identity,
    cookie: u64,
    mut take: impl FnMut(&Entry<'_>) -> Outcome<bool>,
) -> Outcome<bool> {
    let file = dir.open_dir(who)?;
    if cookie != 0 {
        // Not every number is a valid cookie.
        let place = i64::try_from(cookie).map_err(|_| nfsstat3::NFS3ERR_BAD_COOKIE)?;
        seek(&file, SeekFrom::Start(place as u64)).map_err(|_| nfsstat3::NFS3ERR_BAD_COOKIE)?;
    }
    let mut buffer = [MaybeUninit::<u8>::uninit(); 16 << 10];
    let mut entries = RawDir::new(&file, &mut buffer);
    while let Some(entry) = entries.next() {
        let entry = match entry {
            Err(Errno::INVAL) if cookie != 0 => return Err(nfsstat3::NFS3ERR_BAD_COOKIE),
            entry => entry.map_err(status)?,
        };
        let name = entry.file_name().to_bytes();
        // The parent of the root is hidden.
        let ino = if name == b".." && export.is_root(dir) { dir.ino() } else { entry.ino() };
        if !take(&Entry { ino, name, cookie: entry.next_entry_cookie() })? {
            return Ok(false);
        }
    }
    Ok(true)
}
