//! Limits of the process: `RLIMIT_FSIZE`, `RLIMIT_NOFILE`.

use std::io::Write as _;
use std::net::TcpStream;

use rpcrdma::fabric::testing::loopback_address;
use rpcrdma_nfs3d::nfs3::*;

use crate::client::{Nfsd, put, status, with_size};
use crate::nfs3c::run_limited;

/// Limit of file sizes, which suffices for the memory of the library.
const FILE_SIZE: u64 = 256 << 20;

#[test]
fn writes_beyond_rlimit_fsize_fail_and_the_server_continues() {
    let nfsd = Nfsd::start_limited(&format!("ulimit -f {}", FILE_SIZE / 1024), &[]);
    let mut nfs = nfsd.client();
    let root = nfs.root;
    let file = nfs.make(&root, "file");
    let written = nfs.write(&file, FILE_SIZE - 4, b"12345678", StableHow::FileSync).unwrap();
    assert_eq!(written.count, 4, "up to the limit");
    assert_eq!(status(nfs.write(&file, FILE_SIZE, b"5678", StableHow::FileSync)), Nfsstat3::ErrFbig);
    assert_eq!(status(nfs.setattr(&file, with_size(FILE_SIZE + 1), None)), Nfsstat3::ErrFbig);
    assert_eq!(nfs.getattr(&file).unwrap().size, FILE_SIZE);
    let log = nfsd.stop_with_log();
    let limit = format!("RLIMIT_FSIZE is {FILE_SIZE} bytes; `ulimit -f unlimited` lifts it");
    assert!(log.contains("NFS3ERR_FBIG") && log.contains(&limit), "{log}");
}

/// The limit also applies to the files behind the memory of the library.
#[test]
fn programs_name_rlimit_fsize_when_they_do_not_start() {
    let errors = Nfsd::start_error_limited("ulimit -f 1024", &[]);
    assert!(errors.starts_with("memory: ") && errors.contains("\nerror: "), "{errors}");
    assert!(errors.contains("RLIMIT_FSIZE is 1048576"), "{errors}");
    let nfsd = Nfsd::start(&[]);
    let (code, errors) = run_limited("ulimit -f 1024", &nfsd, &["ls"]);
    assert!(code == Some(1) && errors.contains("RLIMIT_FSIZE is 1048576"), "{errors}");
    // A copy that exceeds the limit fails with the same error.
    put(&nfsd.path().join("file"), b"");
    std::fs::File::options().write(true).open(nfsd.path().join("file")).unwrap().set_len(FILE_SIZE + 4096).unwrap();
    let copy = tempfile::NamedTempFile::new().unwrap();
    let path = copy.path().to_str().expect("text");
    let limit = format!("ulimit -f {}", FILE_SIZE / 1024);
    let (code, errors) = run_limited(&limit, &nfsd, &["--block", "1048576", "get", "file", path]);
    assert!(code == Some(1) && errors.contains(&format!("RLIMIT_FSIZE is {FILE_SIZE} bytes")), "{errors}");
}

/// A LOOKUP keeps the file open, but open files have a limit that leaves descriptors for connections.
#[test]
fn open_files_leave_descriptors_for_connections() {
    const FILES: usize = 1500;
    let nfsd = Nfsd::start_limited("ulimit -n 512", &[]);
    assert!(nfsd.ready.contains("512 descriptors for at most "), "{}", nfsd.ready);
    for n in 0..FILES {
        put(&nfsd.path().join(n.to_string()), b"data");
    }
    let mut nfs = nfsd.client();
    let root = nfs.root;
    for n in 0..FILES {
        let file = nfs.find(&root, &n.to_string());
        // The READ opens a second descriptor, for the data.
        assert_eq!(nfs.read_inline(&file, 0, 4), (true, b"data".to_vec()), "file {n}");
    }
    let more: Vec<_> = (0..50).map(|_| nfsd.client()).collect();
    for mut nfs in more {
        assert!(nfs.lookup(&root, "0").is_ok());
    }
    let errors = Nfsd::start_error_limited("ulimit -n 128", &[]);
    assert!(errors.contains("RLIMIT_NOFILE is 128, at least ") && errors.contains("`ulimit -n"), "{errors}");
}

/// The limits of connections with an unfinished handshake, and of established ones without a call, leave descriptors
/// for files.
#[test]
fn silent_connections_leave_descriptors_for_files() {
    const REQUEST: &[u8] = b"MPA ID Req Frame\x00\x01\x00\x00";
    let at = loopback_address().0;
    let nfsd = Nfsd::start_limited("ulimit -n 400", &["--listen", &format!("iwarp:{at}"), "--clients", "64"]);
    let mut nfs = nfsd.client();
    let root = nfs.root;
    let connect = |n: usize| {
        let mut socket = TcpStream::connect(&at).expect("connected");
        socket.write_all(&REQUEST[..if n.is_multiple_of(2) { 5 } else { REQUEST.len() }]).expect("room");
        socket
    };
    let silent: Vec<_> = (0..600).map(connect).collect();
    for n in 0..100 {
        let file = nfs.make(&root, &n.to_string());
        let written = nfs.write(&file, 0, b"data", StableHow::FileSync).expect("a descriptor is free");
        assert_eq!(written.count, 4);
    }
    drop(silent);
}
