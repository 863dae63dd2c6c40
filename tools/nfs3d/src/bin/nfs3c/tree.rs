//! Directory trees.

use std::collections::BTreeMap;
use std::io::Write;

use anyhow::Context;
use rpcrdma_nfs3d::nfs3::{Cookieverf3, Fattr3, Ftype3};
use sha2::{Digest, Sha256};

use crate::calls::{Handle, Nfs, failed};
use crate::transfer;

/// A name in a directory.
pub(crate) struct Entry {
    pub(crate) name: Vec<u8>,
    pub(crate) handle: Handle,
    pub(crate) attributes: Fattr3,
    /// Target of a symbolic link.
    pub(crate) says: Option<Vec<u8>>,
}

/// Sorted names of a directory, without `.` and `..`.
pub(crate) fn list(nfs: &mut Nfs, directory: &Handle, path: &str) -> anyhow::Result<Vec<Entry>> {
    let mut entries = Vec::new();
    let (mut cookie, mut verifier) = (0, Cookieverf3::default());
    loop {
        let said = || format!("READDIRPLUS of {path:?}");
        let response = nfs.readdirplus(directory, cookie, verifier).with_context(said)?;
        let results = response.results().with_context(said)?;
        let part = results.into_result().map_err(failed).with_context(said)?;
        verifier = part.cookieverf;
        for entry in part.reply.entries {
            cookie = entry.cookie;
            let name = entry.name.to_vec();
            if name == b"." || name == b".." {
                continue;
            }
            let path = || format!("{path}/{}", String::from_utf8_lossy(&name));
            let handle = match entry.name_handle {
                Some(handle) => handle.data.into(),
                None => nfs.lookup(directory, &name).with_context(|| format!("LOOKUP of {}", path()))?,
            };
            let attributes = match entry.name_attributes {
                Some(attributes) => attributes,
                None => nfs.getattr(&handle, &path())?,
            };
            let is_link = attributes.r#type == Ftype3::Lnk;
            let says = is_link.then(|| nfs.readlink(&handle)).transpose();
            let says = says.with_context(|| format!("READLINK of {}", path()))?;
            entries.push(Entry { name, handle, attributes, says });
        }
        if part.reply.eof || part.reply.entries.is_empty() {
            break;
        }
    }
    entries.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(entries)
}

/// Type, mode, owner, group and size.
pub(crate) fn describe(attributes: &Fattr3) -> String {
    let kind = match attributes.r#type {
        Ftype3::Reg => '-',
        Ftype3::Dir => 'd',
        Ftype3::Blk => 'b',
        Ftype3::Chr => 'c',
        Ftype3::Lnk => 'l',
        Ftype3::Sock => 's',
        Ftype3::Fifo => 'p',
    };
    let Fattr3 { mode, uid, gid, size, .. } = attributes;
    format!("{kind}{mode:04o} {uid} {gid} {size:>10}")
}

/// Prints the SHA-256 of each file below a directory, and the target of each symbolic link.
pub(crate) fn sums(nfs: &mut Nfs, directory: &Handle, out: &mut impl Write) -> anyhow::Result<()> {
    let mut below = vec![(b".".to_vec(), directory.clone())];
    while let Some((path, directory)) = below.pop() {
        for entry in list(nfs, &directory, &String::from_utf8_lossy(&path))? {
            let path = [&path[..], b"/", &entry.name].concat();
            let name = String::from_utf8_lossy(&path);
            match (entry.attributes.r#type, &entry.says) {
                (Ftype3::Dir, _) => below.push((path, entry.handle)),
                (Ftype3::Reg, _) => {
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
fn sum(nfs: &mut Nfs, file: &Handle, path: &str, size: u64) -> anyhow::Result<String> {
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
