//! Malformed arguments and credentials, which the server refuses without stopping.

use rpcrdma::client::{ClientConfig, Credential};
use rpcrdma::{CallError, FailedCall, LocalClient, Refusal};
use rpcrdma_nfs3d::nfs3::*;

use crate::client::{Fh, Nfs, Nfsd, Results, at, encode, pattern, with_mode};

/// Calls a procedure with encoded arguments. Returns the length of the results.
fn outcome(nfs: &mut Nfs, procedure: u32, arguments: &[u8]) -> Result<usize, CallError> {
    let mut call = nfs.client.prepare(procedure, arguments.len()).expect("memory");
    call.args_mut().copy_from_slice(arguments);
    call = call.expect_reply(70 << 10);
    nfs.client.call(call).map(|reply| reply.results().len()).map_err(CallError::from)
}

/// Valid arguments of each procedure except NULL.
fn valid_arguments(root: &Fh) -> Vec<(u32, Vec<u8>)> {
    let dir = || encode(root);
    let join = |parts: &[Vec<u8>]| parts.concat();
    let name = |name| encode(&at(root, name));
    let word = |word: u32| encode(&word);
    let long = |word: u64| encode(&word);
    let attributes = || encode(&with_mode(0o600));
    vec![
        (1, dir()),
        (2, join(&[dir(), attributes(), encode(&Sattrguard3::None)])),
        (3, name("absent")),
        (4, join(&[dir(), word(63)])),
        (5, dir()),
        (6, join(&[dir(), long(0), word(10)])),
        (7, join(&[dir(), long(0), word(3), word(2), word(3), b"abc\0".to_vec()])),
        (8, join(&[name("made"), encode(&Createhow3::Guarded(with_mode(0o600)))])),
        (9, join(&[name("dir"), attributes()])),
        (10, join(&[name("link"), attributes(), word(4), b"path".to_vec()])),
        (11, join(&[name("fifo"), encode(&Mknoddata3::Fifo(with_mode(0o600)))])),
        (12, name("absent")),
        (13, name("absent")),
        (14, join(&[name("absent"), name("other")])),
        (15, join(&[dir(), name("absent")])),
        (16, join(&[dir(), long(0), long(0), word(4096)])),
        (17, join(&[dir(), long(0), long(0), word(4096), word(4096)])),
        (18, dir()),
        (19, dir()),
        (20, dir()),
        (21, join(&[dir(), long(0), word(0)])),
    ]
}

#[test]
fn truncated_or_too_long_arguments_are_refused_as_garbage() {
    let nfsd = Nfsd::start(&["--read-only"]);
    let mut nfs = nfsd.client();
    let root = nfs.root;
    let is_garbage =
        |outcome: &Result<usize, CallError>| matches!(outcome, Err(CallError::Refused(Refusal::GarbageArguments)));
    for (procedure, arguments) in valid_arguments(&root) {
        let whole = outcome(&mut nfs, procedure, &arguments);
        assert!(whole.is_ok(), "procedure {procedure}: {whole:?}");
        for len in 0..arguments.len() {
            let cut = outcome(&mut nfs, procedure, &arguments[..len]);
            assert!(is_garbage(&cut), "procedure {procedure}, {len} bytes of {}: {cut:?}", arguments.len());
        }
        let more = outcome(&mut nfs, procedure, &[&arguments[..], &[0; 4]].concat());
        assert!(is_garbage(&more), "procedure {procedure}, with an extra word: {more:?}");
    }
    assert!(matches!(outcome(&mut nfs, 22, &[]), Err(CallError::Refused(Refusal::ProcedureUnavailable))));
    assert!(outcome(&mut nfs, 0, &[]).is_ok());
}

#[test]
fn random_arguments_do_not_stop_the_server() {
    let nfsd = Nfsd::start(&["--read-only"]);
    let mut nfs = nfsd.client();
    let root = nfs.root;
    let mut random = fastrand::Rng::with_seed(1);
    let all = valid_arguments(&root);
    for _ in 0..3000 {
        let (procedure, mut arguments) = all[random.usize(..all.len())].clone();
        for _ in 0..random.usize(1..4) {
            let at = random.usize(..arguments.len());
            match random.u8(..4) {
                0 => arguments[at] = random.u8(..),
                1 => arguments[at] ^= 1 << random.u8(..8),
                2 => arguments[at & !3..][..4].copy_from_slice(&[0xFF; 4]),
                _ => arguments[at & !3..][..4].copy_from_slice(&[0x7F, 0xFF, 0xFF, 0xFC]),
            }
        }
        match outcome(&mut nfs, procedure, &arguments) {
            Ok(_) | Err(CallError::Refused(Refusal::GarbageArguments)) => {}
            other => panic!("procedure {procedure}, {arguments:?}: {other:?}"),
        }
    }
    nfs.getattr(&root).unwrap();
    assert!(nfsd.stop().contains("drained"));
}

/// A WRITE with its data in a chunk.
#[derive(Debug)]
struct ChunkWrite {
    count: u32,
    /// Word in front of the data.
    length: u32,
    /// Difference of the chunk's position from the correct one.
    position_error: isize,
    chunk_bytes: usize,
    /// Whether the arguments are garbage. Otherwise the operation fails.
    is_garbage: bool,
}

#[test]
fn data_that_does_not_fit_its_count_is_refused() {
    let nfsd = Nfsd::start(&[]);
    let mut nfs = nfsd.client();
    let root = nfs.root;
    let file = nfs.make(&root, "file");
    for case in [
        ChunkWrite { count: 100, length: 100, position_error: 0, chunk_bytes: 104, is_garbage: true },
        ChunkWrite { count: 100, length: 100, position_error: 0, chunk_bytes: 96, is_garbage: true },
        ChunkWrite { count: 100, length: 100, position_error: -4, chunk_bytes: 100, is_garbage: true },
        ChunkWrite { count: 99, length: 100, position_error: 0, chunk_bytes: 100, is_garbage: false },
    ] {
        let ChunkWrite { count, length, position_error, chunk_bytes, is_garbage } = case;
        let args = [encode(&file), encode(&0u64), encode(&count), encode(&0u32), encode(&length)].concat();
        let mut buf = nfs.client.alloc(nfs.client.first(), chunk_bytes).unwrap();
        buf.set_window(0, chunk_bytes);
        buf.copy_from_slice(&pattern(chunk_bytes));
        let mut call = nfs.client.prepare(7, args.len()).unwrap();
        call.args_mut().copy_from_slice(&args);
        call = call.read_chunk(args.len().checked_add_signed(position_error).unwrap(), buf);
        match nfs.client.call(call) {
            Err(FailedCall { error: CallError::Refused(Refusal::GarbageArguments), .. }) => {
                assert!(is_garbage, "{case:?}")
            }
            Ok(reply) => {
                assert!(!is_garbage, "{case:?}");
                let result: Write3Res = crate::client::decode(reply.results());
                assert_eq!(crate::client::status(result.split()), Nfsstat3::ErrInval);
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(nfs.getattr(&file).unwrap().size, 0, "nothing was written");
}

#[test]
fn unsupported_and_malformed_credentials_are_refused() {
    let nfsd = Nfsd::start(&[]);
    let call = |credential| {
        let mut config = ClientConfig::new(100_003, 3);
        config.credential = credential;
        let mut client = LocalClient::connect(&nfsd.address.parse().unwrap(), config).unwrap();
        let args = encode(&nfsd.client().root);
        let mut call = client.prepare(1, args.len()).unwrap();
        call.args_mut().copy_from_slice(&args);
        client.call(call).map(|reply| reply.results().len())
    };
    assert_eq!(call(Credential::none()).unwrap(), 88);
    // A credential of RPCSEC_GSS, as long as a credential can be.
    let other = call(Credential::opaque(6, vec![0; 400]));
    assert!(
        matches!(other, Err(FailedCall { error: CallError::Refused(Refusal::Authentication(2)), .. })),
        "{other:?}"
    );
    let bad = call(Credential::opaque(1, vec![0xFF; 40]));
    assert!(matches!(bad, Err(FailedCall { error: CallError::Refused(Refusal::Authentication(1)), .. })), "{bad:?}");
}
