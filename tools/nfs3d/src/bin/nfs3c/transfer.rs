//! Copies of files to and from the server.

use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::Path;

use anyhow::{Context, bail, ensure};
use rpcrdma::Reply;
use rpcrdma::client::{ClientCall, LocalClient};
use rpcrdma::typed::{CallOptions, Response, Signature};
use rpcrdma::xdr::Bulk;
use rpcrdma_nfs3d::nfs3::nfs_v3::{Read, Write};
use rpcrdma_nfs3d::nfs3::{Ftype3, Read3Args, StableHow, Write3Args, Writeverf3};

use crate::calls::{Handle, Nfs, StatusError, fh};
use crate::escape::Escaped;
use crate::tree;

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
    /// Returns the part after its first `done` bytes, unless it is empty.
    fn remainder_after(self, done: u32) -> Option<Self> {
        (done < self.len).then(|| Self { offset: self.offset + u64::from(done), len: self.len - done })
    }
}

/// Reads a file of `size` bytes. `sink` gets the data with offsets, in any order.
pub(crate) fn read_all(
    nfs: &mut Nfs,
    file: &Handle,
    path: &[u8],
    size: u64,
    mut sink: impl FnMut(u64, &[u8]) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let inline = nfs.inline;
    let prepare = |client: &mut LocalClient, part: &Part| read(client, file, *part, inline);
    let complete = |part: Part, reply: Reply| {
        let response = Response::from_reply(reply);
        let (data, eof) = read_results(&response)?;
        ensure!(data.len() <= part.len as usize, "READ of {} bytes returned {}", part.len, data.len());
        sink(part.offset, data)?;
        let rest = part.remainder_after(data.len() as u32);
        ensure!(rest.is_none() || !(eof || data.is_empty()), "the file was truncated while it was read");
        Ok(rest)
    };
    nfs.run_concurrent(&format!("READ of \"{}\"", Escaped(path)), parts(size, nfs.read_size), prepare, complete)
}

/// Copies a regular file from the server.
///
/// An existing longer target is truncated after the data was read, so that a failed read does not destroy it.
pub(crate) fn get(nfs: &mut Nfs, path: &[u8], copy: &Path) -> anyhow::Result<()> {
    let file = nfs.find(path)?;
    let attributes = nfs.getattr(&file, path)?;
    let kind = tree::kind(&attributes);
    ensure!(attributes.r#type == Ftype3::Reg, "{}: {kind} cannot be copied, only a regular file", Escaped(path));
    let name = || Escaped(copy.as_os_str().as_bytes()).to_string();
    let copy = File::options().write(true).create(true).truncate(false).open(copy).with_context(name)?;
    let sink = |offset, data: &[u8]| copy.write_all_at(data, offset).with_context(name);
    read_all(nfs, &file, path, attributes.size, sink)?;
    if copy.metadata().with_context(name)?.is_file() {
        copy.set_len(attributes.size).with_context(name)?;
    }
    Ok(())
}

/// Reads the first block of a file, or all of a shorter one.
pub(crate) fn read_first_block(nfs: &mut Nfs, file: &Handle, path: &[u8]) -> anyhow::Result<()> {
    let part = Part { offset: 0, len: nfs.read_size };
    let block = |nfs: &mut Nfs| -> anyhow::Result<()> {
        let call = read(&mut nfs.client, file, part, nfs.inline)?;
        let response = Response::from_reply(nfs.client.call(call)?);
        let (data, eof) = read_results(&response)?;
        ensure!(data.len() == part.len as usize || eof, "READ of {} bytes returned {}", part.len, data.len());
        Ok(())
    };
    nfs.retry(|nfs| block(nfs).with_context(|| format!("READ of \"{}\"", Escaped(path))))
}

fn read(client: &mut LocalClient, file: &Handle, part: Part, inline: u32) -> anyhow::Result<ClientCall> {
    let args = Read3Args { file: fh(file), offset: part.offset, count: part.len };
    let (first, options) = (client.first(), CallOptions::<Read>::new());
    Ok(match part.len <= inline {
        true => options.into_call(&mut (client, first), &args)?.expect_reply(Read::HEAD + part.len as usize),
        false => options.write_chunk(part.len).into_call(&mut (client, first), &args)?,
    })
}

/// The data of a READ, inline or from a chunk, and the end-of-file flag.
fn read_results(response: &Response<Read>) -> anyhow::Result<(&[u8], bool)> {
    let results = response.results()?.into_result().map_err(StatusError)?;
    let (count, len) = (results.count, results.data.len());
    ensure!(count as usize == len, "READ reports {count} bytes, but returned {len}");
    Ok((results.data.bytes(), results.eof))
}

/// Opens a local file for a copy. Also returns the size of the file.
///
/// A pipe, a device or a file in `/proc` has no known size, so its data is copied to a temporary file first.
fn open_original(path: &Path) -> anyhow::Result<(File, u64)> {
    let mut original = File::open(path)?;
    let metadata = original.metadata()?;
    if metadata.is_file() && metadata.len() > 0 {
        return Ok((original, metadata.len()));
    }
    let mut all = tempfile::tempfile()?;
    let size = io::copy(&mut original, &mut all)?;
    Ok((all, size))
}

/// Copies a local file to a path below the export, and commits it.
///
/// An existing longer target is truncated after the data was written, so that a failed read does not destroy it.
pub(crate) fn put(nfs: &mut Nfs, original: &Path, mut path: &[u8]) -> anyhow::Result<()> {
    let (original, size) =
        open_original(original).with_context(|| Escaped(original.as_os_str().as_bytes()).to_string())?;
    while let Some(shorter) = path.strip_suffix(b"/") {
        path = shorter;
    }
    let name = path.rsplit(|&byte| byte == b'/').next().unwrap_or(path);
    let directory = nfs.find(&path[..path.len() - name.len()])?;
    let file = nfs.create(&directory, name, 0o644, path)?;
    let mut verifiers: Vec<Writeverf3> = Vec::new();
    let inline = nfs.inline;
    let prepare = |client: &mut LocalClient, part: &Part| write(client, &file, *part, &original, inline);
    let complete = |part: Part, reply: Reply| {
        let response = Response::<Write>::from_reply(reply);
        let written = response.results()?.into_result().map_err(StatusError)?;
        ensure!(
            (1..=part.len).contains(&written.count),
            "the server reports {} of {} bytes written",
            written.count,
            part.len
        );
        if !verifiers.contains(&written.verf) {
            verifiers.push(written.verf);
        }
        Ok(part.remainder_after(written.count))
    };
    let shown = Escaped(path);
    nfs.run_concurrent(&format!("WRITE of \"{shown}\""), parts(size, nfs.write_size), prepare, complete)?;
    nfs.truncate(&file, size, path)?;
    let committed_verifier = nfs.commit(&file, path)?;
    ensure!(
        verifiers.iter().all(|verifier| *verifier == committed_verifier),
        "{shown}: the server was restarted, or lost data, during the copy: put the file again"
    );
    Ok(())
}

fn write(client: &mut LocalClient, file: &Handle, part: Part, from: &File, inline: u32) -> anyhow::Result<ClientCall> {
    let (first, len) = (client.first(), part.len as usize);
    let args =
        |data| Write3Args { file: fh(file), offset: part.offset, count: part.len, stable: StableHow::Unstable, data };
    if part.len <= inline {
        let mut data = vec![0; len];
        read_part(from, &mut data, part)?;
        return Ok(CallOptions::<Write>::new().into_call(&mut (client, first), &args(data[..].into()))?);
    }
    let mut data = client.alloc(first, len)?;
    data.set_window(0, len);
    read_part(from, &mut data, part)?;
    Ok(CallOptions::<Write>::new().lend(data).into_call(&mut (client, first), &args(Bulk::placed(len)))?)
}

fn read_part(from: &File, data: &mut [u8], part: Part) -> anyhow::Result<()> {
    match from.read_exact_at(data, part.offset) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
            bail!("the local file was truncated while it was read")
        }
        read => Ok(read?),
    }
}
