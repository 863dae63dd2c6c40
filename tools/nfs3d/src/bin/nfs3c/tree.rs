//! Directory trees.

use std::collections::BTreeMap;
use std::io::Write;

use anyhow::Context;
use nfs3_types::nfs3::{cookieverf3, fattr3, ftype3, nfs_fh3};
use sha2::{Digest, Sha256};

use crate::calls::{Nfs, given};
use crate::transfer;

/// A name in a directory.
pub(crate) struct Entry {
    pub(crate) name: Vec<u8>,
    pub(crate) handle: nfs_fh3,
    pub(crate) attributes: fattr3,
    /// Target of a symbolic link.
    pub(crate) says: Option<Vec<u8>>,
}

/// Sorted names of a directory, without `.` and `..`.
pub(crate) fn list(nfs: &mut Nfs, directory: &nfs_fh3, path: &str) -> anyhow::Result<Vec<Entry>> {
    let mut entries = Vec::new();
    let (mut cookie, mut verifier) = (0, cookieverf3::default());
    loop {
        let part = nfs.readdirplus(directory, cookie, verifier);
        let (part, next) = part.with_context(|| format!("READDIRPLUS of {path:?}"))?;
        verifier = next;
        let (names, eof) = (part.entries.0, part.eof);
        let Some(last) = names.last() else { break };
        cookie = last.cookie;
        for entry in names {
            let name = entry.name.0.into_owned();
            if name == b"." || name == b".." {
                continue;
            }
            let path = || format!("{path}/{}", String::from_utf8_lossy(&name));
            let handle = match given(entry.name_handle) {
                Some(handle) => handle,
                None => nfs.lookup(directory, &name).with_context(|| format!("LOOKUP of {}", path()))?,
            };
            let attributes = match given(entry.name_attributes) {
                Some(attributes) => attributes,
                None => nfs.getattr(&handle, &path())?,
            };
            let is_link = attributes.type_ == ftype3::NF3LNK;
            let says = is_link.then(|| nfs.readlink(&handle)).transpose();
            let says = says.with_context(|| format!("READLINK of {}", path()))?;
            entries.push(Entry { name, handle, attributes, says });
        }
        if eof {
            break;
        }
    }
    entries.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(entries)
}

/// Type, mode, owner, group and size.
pub(crate) fn describe(attributes: &fattr3) -> String {
    let kind = match attributes.type_ {
        ftype3::NF3REG => '-',
        ftype3::NF3DIR => 'd',
        ftype3::NF3BLK => 'b',
        ftype3::NF3CHR => 'c',
        ftype3::NF3LNK => 'l',
        ftype3::NF3SOCK => 's',
        ftype3::NF3FIFO => 'p',
    };
    let fattr3 { mode, uid, gid, size, .. } = attributes;
    format!("{kind}{mode:04o} {uid} {gid} {size:>10}")
}

/// Prints the SHA-256 of each file below a directory, and the target of each symbolic link.
pub(crate) fn sums(nfs: &mut Nfs, directory: &nfs_fh3, out: &mut impl Write) -> anyhow::Result<()> {
    let mut below = vec![(b".".to_vec(), directory.clone())];
    while let Some((path, directory)) = below.pop() {
        for entry in list(nfs, &directory, &String::from_utf8_lossy(&path))? {
            let path = [&path[..], b"/", &entry.name].concat();
            let name = String::from_utf8_lossy(&path);
            match (entry.attributes.type_, &entry.says) {
                (ftype3::NF3DIR, _) => below.push((path, entry.handle)),
                (ftype3::NF3REG, _) => {
                    let sum = sum(nfs, &entry.handle, &name, entry.attributes.size)?;
                    writeln!(out, "{sum}  {name}")?;
                }
                (_, Some(says)) => writeln!(out, "{name} {}", String::from_utf8_lossy(says))?,
                _ => {}
            }
        }
    }
    Ok(())
}

/// The SHA-256 of a file.
fn sum(nfs: &mut Nfs, file: &nfs_fh3, path: &str, size: u64) -> anyhow::Result<String> {
    let mut hash = Sha256::new();
    // Early data, limited by the number of outstanding calls.
    let mut early: BTreeMap<u64, Vec<u8>> = BTreeMap::new();
    let mut at = 0;
    transfer::get(nfs, file, path, size, |offset, data| {
        if offset != at {
            early.insert(offset, data.to_vec());
            return Ok(());
        }
        hash.update(data);
        at += data.len() as u64;
        while let Some(data) = early.remove(&at) {
            hash.update(&data);
            at += data.len() as u64;
        }
        Ok(())
    })?;
    Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}
