//! Reduced messages: which bytes are in chunks, and which stay in the message.
//!
//! The rules are in RFC 8267 §4.2 for version 1, and in §4.4.4 of the version 2 draft for version 2.

use rpcrdma::typed::Signature;
use rpcrdma::xdr::{Decode, Decoder};
use rpcrdma::{CallError, CreditMode, Refusal};
use rpcrdma_nfs3d::UNCHANGED;
use rpcrdma_nfs3d::nfs3::nfs_v3::{Read, Readlink, Symlink, Write};
use rpcrdma_nfs3d::nfs3::*;

use crate::client::{Nfs, Nfsd, Results, at, decode, encode, pattern, put, with_size};

const CREDIT_MODES: [CreditMode; 2] = [CreditMode::V2Windowed, CreditMode::V1];

/// Calls with a Write chunk. Returns the results in the message, and the bytes in the chunk.
fn call_with_write_chunk(nfs: &mut Nfs, procedure: u32, args: &[u8], room: usize) -> (Vec<u8>, Vec<u8>) {
    let room = nfs.client.alloc(nfs.client.first(), room).expect("memory");
    let mut call = nfs.client.prepare(procedure, args.len()).expect("memory");
    call.args_mut().copy_from_slice(args);
    call = call.write_chunk_into(room);
    let reply = nfs.client.call(call).expect("a reply");
    (reply.results().to_vec(), reply.chunk(0).expect("the chunk").to_vec())
}

/// Calls with an argument in a Read chunk, whose position in the arguments is `at`.
fn call_with_read_chunk(
    nfs: &mut Nfs,
    procedure: u32,
    args: &[u8],
    at: usize,
    item: &[u8],
) -> Result<Vec<u8>, CallError> {
    let mut data = nfs.client.alloc(nfs.client.first(), item.len()).expect("memory");
    data.copy_from_slice(item);
    let mut call = nfs.client.prepare(procedure, args.len()).expect("memory");
    call.args_mut().copy_from_slice(args);
    call = call.read_chunk(at, data);
    nfs.client.call(call).map(|reply| reply.results().to_vec()).map_err(CallError::from)
}

/// Length of the reduced item, which is the last word of the results in the message.
fn length_behind_attributes(results: &[u8], words_between: usize) -> u32 {
    let mut rest = Decoder::new(results);
    assert_eq!(Nfsstat3::decode(&mut rest), Ok(Nfsstat3::Ok));
    PostOpAttr::decode(&mut rest).expect("attributes");
    rest.bytes(4 * words_between, "words").expect("words");
    decode(rest.rest())
}

#[test]
fn reduced_results_leave_only_their_length_in_the_message() {
    let nfsd = Nfsd::start(&[]);
    let data = pattern(4099);
    put(&nfsd.path().join("file"), &data);
    for len in [1, 2, 3, 4, 5, 255] {
        let link = nfsd.path().join(format!("link{len}"));
        std::os::unix::fs::symlink("x".repeat(len), link).expect("a link");
    }
    for credit_mode in CREDIT_MODES {
        let mut nfs = nfsd.client_as(0, credit_mode);
        let root = nfs.root;
        let file = nfs.find(&root, "file");
        // The data is far shorter than the binding and the chunk allow.
        for len in [1u32, 2, 3, 4, 5, 1000, 4097, 4099] {
            let args = encode(&Read3Args { file, offset: 0, count: len });
            let (results, chunk) = call_with_write_chunk(&mut nfs, Read::NUMBER, &args, 8000);
            assert_eq!(length_behind_attributes(&results, 2), len, "{credit_mode:?}");
            assert_eq!(chunk, data[..len as usize], "{credit_mode:?}");
        }
        for len in [1, 2, 3, 4, 5, 255] {
            let link = nfs.find(&root, &format!("link{len}"));
            let (results, chunk) =
                call_with_write_chunk(&mut nfs, Readlink::NUMBER, &encode(&Readlink3Args { symlink: link }), 1024);
            assert_eq!(length_behind_attributes(&results, 0) as usize, len, "{credit_mode:?}");
            assert_eq!(chunk, "x".repeat(len).as_bytes(), "{credit_mode:?}");
        }
        // In the other arms of the unions, no item is reduced.
        let args = encode(&Read3Args { file: root, offset: 0, count: 100 });
        let (results, chunk) = call_with_write_chunk(&mut nfs, Read::NUMBER, &args, 100);
        assert_eq!(decode::<Nfsstat3>(&results[..4]), Nfsstat3::ErrIsdir);
        let _: Read3Resfail = decode(&results[4..]);
        assert_eq!(chunk, b"", "{credit_mode:?}");
        let args = encode(&Readlink3Args { symlink: file });
        let (results, chunk) = call_with_write_chunk(&mut nfs, Readlink::NUMBER, &args, 1024);
        assert_eq!(decode::<Nfsstat3>(&results[..4]), Nfsstat3::ErrInval);
        let _: Readlink3Resfail = decode(&results[4..]);
        assert_eq!(chunk, b"", "{credit_mode:?}");
    }
}

#[test]
fn reduced_arguments_leave_only_their_length_in_the_message() {
    for credit_mode in CREDIT_MODES {
        let nfsd = Nfsd::start(&[]);
        let mut nfs = nfsd.client_as(0, credit_mode);
        let root = nfs.root;
        let file = nfs.make(&root, "file");
        let garbage = Err(CallError::Refused(Refusal::GarbageArguments));
        for len in [1u32, 2, 3, 4, 5, 1000] {
            let data = pattern(len as usize);
            let before = [encode(&file), encode(&0u64), encode(&len), encode(&StableHow::FileSync)].concat();
            let args = [before.clone(), encode(&len)].concat();
            // The chunk holds the item without and with XDR padding (RFC 8166 §3.4.5.2).
            for item in [&data[..], &[&data[..], &vec![0; data.len().wrapping_neg() % 4]].concat()] {
                let results = call_with_read_chunk(&mut nfs, Write::NUMBER, &args, args.len(), item).expect("a reply");
                assert_eq!(decode::<Write3Res>(&results).split().unwrap().count, len, "{credit_mode:?}");
                assert_eq!(std::fs::read(nfsd.path().join("file")).expect("a file"), data, "{credit_mode:?}");
                nfs.setattr(&file, with_size(0), None).unwrap();
            }
            // The length must be in the message, not in the chunk.
            let whole = [encode(&len), data.clone()].concat();
            assert_eq!(
                call_with_read_chunk(&mut nfs, Write::NUMBER, &before, before.len(), &whole),
                garbage,
                "{credit_mode:?}"
            );
            assert_eq!(
                call_with_read_chunk(&mut nfs, Write::NUMBER, &args, before.len(), &data),
                garbage,
                "{credit_mode:?}"
            );
            assert_eq!(std::fs::read(nfsd.path().join("file")).expect("a file"), b"", "{credit_mode:?}");
        }
        for len in [1u32, 2, 3, 4, 255] {
            let (name, path) = (format!("link{len}"), "y".repeat(len as usize));
            let args = [encode(&at(&root, &name)), encode(&UNCHANGED), encode(&len)].concat();
            let results =
                call_with_read_chunk(&mut nfs, Symlink::NUMBER, &args, args.len(), path.as_bytes()).expect("a reply");
            decode::<Symlink3Res<'_>>(&results).split().unwrap();
            let made = std::fs::read_link(nfsd.path().join(&name)).expect("a link");
            assert_eq!(made.to_str(), Some(&path[..]), "{credit_mode:?}");
        }
    }
}
