//! Files to the server, and back.

use std::fs::File;
use std::os::unix::fs::FileExt;

use anyhow::{Context, bail, ensure};
use nfs3_types::nfs3::{
    NFS_PROGRAM, READ3args, READ3resfail, WRITE3res, nfs_fh3, nfsstat3, post_op_attr, stable_how, writeverf3,
};
use nfs3_types::xdr_codec::Unpack;
use rpcrdma::Reply;
use rpcrdma::client::{ClientCall, LocalClient};

use crate::calls::{Nfs, decode, encode, good, said};

/// Longest results of READ without data, in bytes.
const READ_RESULTS: usize = 104;

/// A part of a file.
#[derive(Clone, Copy, Debug)]
struct Part {
    offset: u64,
    len: u32,
}

fn parts(size: u64, block: u32) -> impl Iterator<Item = Part> {
    let block = u64::from(block);
    (0..size.div_ceil(block)).map(move |n| Part { offset: n * block, len: (size - n * block).min(block) as u32 })
}

impl Part {
    /// The rest behind `done` bytes.
    fn behind(self, done: u32) -> Option<Self> {
        (done < self.len).then(|| Self { offset: self.offset + u64::from(done), len: self.len - done })
    }
}

/// Reads a file of `size` bytes. `take` gets its parts with offsets, in any order.
pub(crate) fn get(
    nfs: &mut Nfs,
    file: &nfs_fh3,
    path: &str,
    size: u64,
    mut take: impl FnMut(u64, &[u8]) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let inline = nfs.inline;
    let prepare = |client: &mut LocalClient, part: &Part| read(client, file, *part, inline);
    let ended = |part: Part, reply: Reply| {
        let (data, eof) = read_results(&reply)?;
        ensure!(data.len() <= part.len as usize, "READ of {} bytes gives {}", part.len, data.len());
        take(part.offset, data)?;
        let rest = part.behind(data.len() as u32);
        ensure!(rest.is_none() || !(eof || data.is_empty()), "the file became shorter while it was read");
        Ok(rest)
    };
    nfs.many(parts(size, nfs.read_size), prepare, ended).with_context(|| format!("READ of {path}"))
}

/// Reads the first block of a file, or all of a shorter one.
pub(crate) fn first_block(nfs: &mut Nfs, file: &nfs_fh3) -> anyhow::Result<()> {
    let part = Part { offset: 0, len: nfs.read_size };
    let call = read(&mut nfs.client, file, part, nfs.inline)?;
    let reply = nfs.client.call(call)?;
    let (data, eof) = read_results(&reply)?;
    ensure!(data.len() == part.len as usize || eof, "READ of {} bytes gives {}", part.len, data.len());
    Ok(())
}

fn read(client: &mut LocalClient, file: &nfs_fh3, part: Part, inline: u32) -> anyhow::Result<ClientCall> {
    let args = encode(&READ3args { file: file.clone(), offset: part.offset, count: part.len })?;
    let procedure = NFS_PROGRAM::NFSPROC3_READ as u32;
    let mut call = client.prepare(procedure, args.len())?;
    call.args_mut().copy_from_slice(&args);
    Ok(match part.len <= inline {
        true => call.expect_reply(READ_RESULTS + part.len as usize),
        false => call.write_chunk(part.len),
    })
}

/// The data of a READ, inline or from a chunk, and the end-of-file flag.
fn read_results(reply: &Reply) -> anyhow::Result<(&[u8], bool)> {
    let mut results = reply.results();
    let bad = |error| anyhow::anyhow!("bad results: {error}");
    let (status, _) = nfsstat3::unpack(&mut results).map_err(bad)?;
    if status != nfsstat3::NFS3_OK {
        let _: READ3resfail = decode(results)?;
        bail!("{}", said(status));
    }
    post_op_attr::unpack(&mut results).map_err(bad)?;
    let (count, _) = u32::unpack(&mut results).map_err(bad)?;
    let (eof, _) = bool::unpack(&mut results).map_err(bad)?;
    let (len, _) = u32::unpack(&mut results).map_err(bad)?;
    ensure!(count == len, "READ counts {count} bytes, and has {len}");
    let data = match reply.chunk(0) {
        Some(chunk) if !chunk.is_empty() || len == 0 => chunk,
        _ => results.get(..len as usize).unwrap_or(&[]),
    };
    ensure!(data.len() == len as usize, "READ says {len} bytes, and brings {}", data.len());
    Ok((data, eof))
}

/// Copies a file to a path below the export, and commits it.
pub(crate) fn put(nfs: &mut Nfs, original: &File, path: &str) -> anyhow::Result<()> {
    let path = path.trim_end_matches('/');
    let (directory, name) = path.rsplit_once('/').unwrap_or(("", path));
    let directory = nfs.find(directory)?;
    let file = nfs.create(&directory, name.as_bytes(), 0o644).with_context(|| format!("CREATE of {path}"))?;
    let size = original.metadata()?.len();
    let mut lives: Vec<writeverf3> = Vec::new();
    let inline = nfs.inline;
    let prepare = |client: &mut LocalClient, part: &Part| write(client, &file, *part, original, inline);
    let ended = |part: Part, reply: Reply| {
        let written = good(decode::<WRITE3res>(reply.results())?)?;
        ensure!((1..=part.len).contains(&written.count), "{} of {} bytes written", written.count, part.len);
        if !lives.contains(&written.verf) {
            lives.push(written.verf);
        }
        Ok(part.behind(written.count))
    };
    nfs.many(parts(size, nfs.write_size), prepare, ended).with_context(|| format!("WRITE of {path}"))?;
    let now = nfs.commit(&file).with_context(|| format!("COMMIT of {path}"))?;
    ensure!(lives.iter().all(|life| *life == now), "{path}: the server was restarted meanwhile: put the file again");
    Ok(())
}

fn write(client: &mut LocalClient, file: &nfs_fh3, part: Part, from: &File, inline: u32) -> anyhow::Result<ClientCall> {
    let mut args = encode(file)?;
    args.extend(part.offset.to_be_bytes());
    for word in [part.len, stable_how::UNSTABLE as u32, part.len] {
        args.extend(word.to_be_bytes());
    }
    let (procedure, len) = (NFS_PROGRAM::NFSPROC3_WRITE as u32, part.len as usize);
    if part.len <= inline {
        let data = args.len();
        args.resize(data + len.next_multiple_of(4), 0);
        from.read_exact_at(&mut args[data..data + len], part.offset)?;
        let mut call = client.prepare(procedure, args.len())?;
        call.args_mut().copy_from_slice(&args);
        return Ok(call);
    }
    let mut data = client.alloc(client.first(), len)?;
    data.set_window(0, len);
    from.read_exact_at(&mut data, part.offset)?;
    let mut call = client.prepare(procedure, args.len())?;
    call.args_mut().copy_from_slice(&args);
    Ok(call.read_chunk(args.len(), data))
}
