//! What goes into chunks and what stays in the message (RFC 8267 §4.2; version 2 §4.4.4), in both versions.

use nfs3_types::nfs3::*;
use nfs3_types::xdr_codec::Unpack;
use rpcrdma::{CallError, CreditMode, Refusal};

use crate::client::{Nfs, Nfsd, at, decode, encode, pattern, put};

const SCHEMES: [CreditMode; 2] = [CreditMode::V2Windowed, CreditMode::V1];
const READLINK: u32 = NFS_PROGRAM::NFSPROC3_READLINK as u32;
const READ: u32 = NFS_PROGRAM::NFSPROC3_READ as u32;
const WRITE: u32 = NFS_PROGRAM::NFSPROC3_WRITE as u32;
const SYMLINK: u32 = NFS_PROGRAM::NFSPROC3_SYMLINK as u32;

/// A call with room for one item: the results that stayed in the message, and what is in the chunk.
fn into_chunk(nfs: &mut Nfs, procedure: u32, args: &[u8], room: usize) -> (Vec<u8>, Vec<u8>) {
    let room = nfs.client.alloc(nfs.client.first(), room).expect("memory");
    let mut call = nfs.client.prepare(procedure, args.len()).expect("memory");
    call.args_mut().copy_from_slice(args);
    call = call.write_chunk_into(room);
    let reply = nfs.client.call(call).expect("a reply");
    (reply.results().to_vec(), reply.chunk(0).expect("the chunk").to_vec())
}

/// A call whose last argument is in a chunk, from `at` of the arguments on.
fn from_chunk(nfs: &mut Nfs, procedure: u32, args: &[u8], at: usize, item: &[u8]) -> Result<Vec<u8>, CallError> {
    let mut data = nfs.client.alloc(nfs.client.first(), item.len()).expect("memory");
    data.copy_from_slice(item);
    let mut call = nfs.client.prepare(procedure, args.len()).expect("memory");
    call.args_mut().copy_from_slice(args);
    call = call.read_chunk(at, data);
    nfs.client.call(call).map(|reply| reply.results().to_vec()).map_err(CallError::from)
}

/// The word that says how long the item is, which is the last of the results that stay.
fn count_behind_attributes(results: &[u8], words_between: usize) -> u32 {
    let mut rest = results;
    let (status, _) = nfsstat3::unpack(&mut rest).expect("a status");
    assert_eq!(status, nfsstat3::NFS3_OK);
    post_op_attr::unpack(&mut rest).expect("attributes");
    for _ in 0..words_between {
        u32::unpack(&mut rest).expect("a word");
    }
    decode(rest)
}

#[test]
fn results_leave_their_length_in_the_message_and_nothing_else() {
    let nfsd = Nfsd::start(&[]);
    let data = pattern(4099);
    put(&nfsd.path().join("file"), &data);
    for len in [1, 2, 3, 4, 5, 255] {
        let link = nfsd.path().join(format!("link{len}"));
        std::os::unix::fs::symlink("x".repeat(len), link).expect("a link");
    }
    for scheme in SCHEMES {
        let mut nfs = nfsd.client_as(0, scheme);
        let root = nfs.root.clone();
        let file = nfs.find(&root, "file");
        // Far less than the binding allows, and than there is room for.
        for len in [1u32, 2, 3, 4, 5, 1000, 4097, 4099] {
            let args = encode(&READ3args { file: file.clone(), offset: 0, count: len });
            let (results, chunk) = into_chunk(&mut nfs, READ, &args, 8000);
            assert_eq!(count_behind_attributes(&results, 2), len, "{scheme:?}");
            assert_eq!(chunk, data[..len as usize], "{scheme:?}");
        }
        for len in [1, 2, 3, 4, 5, 255] {
            let link = nfs.find(&root, &format!("link{len}"));
            let (results, chunk) = into_chunk(&mut nfs, READLINK, &encode(&READLINK3args { symlink: link }), 1024);
            assert_eq!(count_behind_attributes(&results, 0) as usize, len, "{scheme:?}");
            assert_eq!(chunk, "x".repeat(len).as_bytes(), "{scheme:?}");
        }
        // Of the other arms of the unions nothing is reduced.
        let args = encode(&READ3args { file: root.clone(), offset: 0, count: 100 });
        let (results, chunk) = into_chunk(&mut nfs, READ, &args, 100);
        assert_eq!(nfsstat3::unpack(&mut &results[..]).expect("a status").0, nfsstat3::NFS3ERR_ISDIR);
        let _: READ3resfail = decode(&results[4..]);
        assert_eq!(chunk, b"", "{scheme:?}");
        let args = encode(&READLINK3args { symlink: file.clone() });
        let (results, chunk) = into_chunk(&mut nfs, READLINK, &args, 1024);
        assert_eq!(nfsstat3::unpack(&mut &results[..]).expect("a status").0, nfsstat3::NFS3ERR_INVAL);
        let _: READLINK3resfail = decode(&results[4..]);
        assert_eq!(chunk, b"", "{scheme:?}");
    }
}

#[test]
fn arguments_leave_their_length_in_the_message_and_nothing_else() {
    for scheme in SCHEMES {
        let nfsd = Nfsd::start(&[]);
        let mut nfs = nfsd.client_as(0, scheme);
        let root = nfs.root.clone();
        let file = nfs.make(&root, "file");
        let garbage = Err(CallError::Refused(Refusal::GarbageArguments));
        for len in [1u32, 2, 3, 4, 5, 1000] {
            let data = pattern(len as usize);
            let before = [encode(&file), encode(&0u64), encode(&len), encode(&stable_how::FILE_SYNC)].concat();
            let args = [before.clone(), encode(&len)].concat();
            // Alone, and rounded up (RFC 8166 §3.4.5.2).
            for item in [&data[..], &[&data[..], &vec![0; data.len().wrapping_neg() % 4]].concat()] {
                let results = from_chunk(&mut nfs, WRITE, &args, args.len(), item).expect("a reply");
                assert_eq!(decode::<WRITE3res>(&results).unwrap().count, len, "{scheme:?}");
                assert_eq!(std::fs::read(nfsd.path().join("file")).expect("a file"), data, "{scheme:?}");
                let empty = sattr3 { size: Nfs3Option::Some(0), ..sattr3::default() };
                nfs.setattr(&file, empty, sattrguard3::None).unwrap();
            }
            // The length belongs into the message, not into the chunk.
            let whole = [encode(&len), data.clone()].concat();
            assert_eq!(from_chunk(&mut nfs, WRITE, &before, before.len(), &whole), garbage, "{scheme:?}");
            assert_eq!(from_chunk(&mut nfs, WRITE, &args, before.len(), &data), garbage, "{scheme:?}");
            assert_eq!(std::fs::read(nfsd.path().join("file")).expect("a file"), b"", "{scheme:?}");
        }
        for len in [1u32, 2, 3, 4, 255] {
            let (name, path) = (format!("link{len}"), "y".repeat(len as usize));
            let args = [encode(&at(&root, &name)), encode(&sattr3::default()), encode(&len)].concat();
            let results = from_chunk(&mut nfs, SYMLINK, &args, args.len(), path.as_bytes()).expect("a reply");
            decode::<SYMLINK3res>(&results).unwrap();
            let made = std::fs::read_link(nfsd.path().join(&name)).expect("a link");
            assert_eq!(made.to_str(), Some(&path[..]), "{scheme:?}");
        }
    }
}
