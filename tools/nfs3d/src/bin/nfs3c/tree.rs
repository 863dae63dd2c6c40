//! Directory trees.

use std::collections::{BTreeMap, HashSet};
use std::io::Write;

use anyhow::ensure;
use rpcrdma_nfs3d::nfs3::{Cookieverf3, Fattr3, Ftype3};
use sha2::{Digest, Sha256};

use crate::calls::{Handle, Nfs, StatusError};
use crate::escape::{Escaped, checksum_line};
use crate::transfer;

/// A name in a directory.
pub(crate) struct Entry {
    pub(crate) name: Vec<u8>,
    pub(crate) handle: Handle,
    pub(crate) attributes: Fattr3,
    /// Target of a symbolic link.
    pub(crate) target: Option<Vec<u8>>,
}

/// Limit of the entries of a directory, which are held in memory.
const MAX_ENTRIES: usize = 4 << 20;
/// Longest path, in bytes. This limit ends the walk if a directory of the server contains itself.
const MAX_PATH: usize = 64 << 10;

/// Checks a name that the server lists, because a path with an invalid name would lead elsewhere.
fn check_name(name: &[u8], path: &[u8]) -> anyhow::Result<()> {
    let valid = !name.is_empty() && !name.contains(&b'/') && !name.contains(&0);
    ensure!(valid, "READDIRPLUS of \"{}\": the server lists the invalid name \"{}\"", Escaped(path), Escaped(name));
    Ok(())
}

/// Entries of a directory, sorted by name, without `.` and `..`.
pub(crate) fn list(nfs: &mut Nfs, directory: &Handle, path: &[u8]) -> anyhow::Result<Vec<Entry>> {
    let mut entries = Vec::new();
    let (mut cookie, mut verifier) = (0, Cookieverf3::default());
    // Cookies of earlier requests. A server that repeats one would list the same entries for ever.
    let mut used_cookies = HashSet::new();
    loop {
        let shown = Escaped(path);
        ensure!(used_cookies.insert(cookie), "READDIRPLUS of \"{shown}\": the server repeats cookie {cookie}");
        let response = nfs.readdirplus(directory, cookie, verifier, path)?;
        let part = response.results()?.into_result().map_err(StatusError)?;
        verifier = part.cookieverf;
        let mut has_entries = false;
        for entry in part.reply.entries {
            (cookie, has_entries) = (entry.cookie, true);
            let name = entry.name.0.to_vec();
            if name == b"." || name == b".." {
                continue;
            }
            check_name(&name, path)?;
            ensure!(entries.len() < MAX_ENTRIES, "READDIRPLUS of \"{shown}\": more than {MAX_ENTRIES} entries");
            let path = [path, b"/", &name].concat();
            let handle = match entry.name_handle {
                Some(handle) => handle.data.into(),
                None => nfs.lookup(directory, &name, || format!("\"{}\"", Escaped(&path)))?,
            };
            let attributes = match entry.name_attributes {
                Some(attributes) => attributes,
                None => nfs.getattr(&handle, &path)?,
            };
            let is_link = attributes.r#type == Ftype3::Lnk;
            let target = is_link.then(|| nfs.readlink(&handle, &path)).transpose()?;
            entries.push(Entry { name, handle, attributes, target });
        }
        if part.reply.eof {
            break;
        }
        ensure!(has_entries, "READDIRPLUS of \"{shown}\": the server lists no entries before the end of the directory");
    }
    entries.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(entries)
}

/// Letter of a file's type in listings, and its name.
fn letter_and_name(attributes: &Fattr3) -> (char, &'static str) {
    match attributes.r#type {
        Ftype3::Reg => ('-', "a regular file"),
        Ftype3::Dir => ('d', "a directory"),
        Ftype3::Blk => ('b', "a block device"),
        Ftype3::Chr => ('c', "a character device"),
        Ftype3::Lnk => ('l', "a symbolic link"),
        Ftype3::Sock => ('s', "a socket"),
        Ftype3::Fifo => ('p', "a FIFO"),
    }
}

/// Name of a file's type, for errors.
pub(crate) fn kind(attributes: &Fattr3) -> &'static str {
    letter_and_name(attributes).1
}

/// Describes attributes: type, mode, owner, group and size.
pub(crate) fn describe(attributes: &Fattr3) -> String {
    let Fattr3 { mode, uid, gid, size, .. } = attributes;
    format!("{}{mode:04o} {uid} {gid} {size:>10}", letter_and_name(attributes).0)
}

/// Prints the SHA-256 of each file below a directory, and the target of each symbolic link.
pub(crate) fn print_sums(nfs: &mut Nfs, directory: &Handle, out: &mut impl Write) -> anyhow::Result<()> {
    let mut unvisited = vec![(b".".to_vec(), directory.clone())];
    while let Some((path, directory)) = unvisited.pop() {
        for entry in list(nfs, &directory, &path)? {
            let path = [&path[..], b"/", &entry.name].concat();
            ensure!(
                path.len() <= MAX_PATH,
                "a path has more than {MAX_PATH} bytes: a directory of the server contains itself"
            );
            match (entry.attributes.r#type, &entry.target) {
                (Ftype3::Dir, _) => unvisited.push((path, entry.handle)),
                (Ftype3::Reg, _) => {
                    let sum = hash_file(nfs, &entry.handle, &path, entry.attributes.size)?;
                    out.write_all(&checksum_line([sum.as_bytes(), &path], "  "))?;
                }
                (_, Some(target)) => out.write_all(&checksum_line([&path, target], " "))?,
                _ => {}
            }
        }
    }
    Ok(())
}

/// The SHA-256 of a file.
fn hash_file(nfs: &mut Nfs, file: &Handle, path: &[u8], size: u64) -> anyhow::Result<String> {
    let mut hash = Sha256::new();
    // Data that arrived out of order, limited by the number of outstanding calls.
    let mut out_of_order: BTreeMap<u64, Vec<u8>> = BTreeMap::new();
    let mut hashed = 0;
    transfer::read_all(nfs, file, path, size, |offset, data| {
        if offset != hashed {
            out_of_order.insert(offset, data.to_vec());
            return Ok(());
        }
        hash.update(data);
        hashed += data.len() as u64;
        while let Some(data) = out_of_order.remove(&hashed) {
            hash.update(&data);
            hashed += data.len() as u64;
        }
        Ok(())
    })?;
    Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}
