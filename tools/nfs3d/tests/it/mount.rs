//! MOUNT on TCP.

use std::fs;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::Path;

use rpcrdma::wire::rpc::{AcceptStat, AuthStat, AuthSys, CallHeader, OpaqueAuth, RejectStat, ReplyBody, ReplyHeader};
use rpcrdma::xdr::{Encoder, padded};
use rpcrdma_nfs3d::mount3::mount_v3::{PROGRAM, VERSION};
use rpcrdma_nfs3d::mount3::{Exports, Mountlist, Mountres3, Mountstat3};

use crate::client::{Nfsd, decode, is_root};

/// Sends a record unchanged, and returns the next one from the server.
fn exchange(stream: &mut TcpStream, record: &[u8]) -> Option<Vec<u8>> {
    stream.write_all(record).ok()?;
    let mut head = [0; 4];
    stream.read_exact(&mut head).ok()?;
    let head = u32::from_be_bytes(head);
    assert_ne!(head & 1 << 31, 0, "one fragment");
    let mut reply = vec![0; (head & !(1 << 31)) as usize];
    stream.read_exact(&mut reply).ok()?;
    Some(reply)
}

fn record(program: u32, version: u32, procedure: u32, args: &[u8]) -> Vec<u8> {
    record_with_credential(OpaqueAuth::NONE, program, version, procedure, args)
}

/// A call with a credential.
fn record_with_credential(
    credential: OpaqueAuth<'_>,
    program: u32,
    version: u32,
    procedure: u32,
    args: &[u8],
) -> Vec<u8> {
    let verifier = OpaqueAuth::NONE;
    let header = CallHeader { xid: 77, program, version, procedure, credential, verifier };
    let mut message = vec![0; header.encoded_len()];
    header.emit(&mut message).expect("room");
    message.extend(args);
    [&(message.len() as u32 | (1 << 31)).to_be_bytes()[..], &message].concat()
}

fn connect(port: u16) -> TcpStream {
    TcpStream::connect((Ipv4Addr::LOCALHOST, port)).expect("it listens")
}

fn results(reply: &[u8]) -> &[u8] {
    let (header, at) = ReplyHeader::parse(reply).expect("a reply");
    assert_eq!((header.xid, header.body), (77, ReplyBody::SUCCESS));
    &reply[at..]
}

/// Status of mounting a directory as a user; 0 if it is mounted.
fn mount_status(port: u16, path: &Path, uid: Option<u32>) -> u32 {
    let mut body = vec![0; 400];
    let len = AuthSys::new(0, b"tests", uid.unwrap_or(0), uid.unwrap_or(0)).emit(&[], &mut body).expect("room");
    let sys = OpaqueAuth { flavor: AuthSys::FLAVOR, body: &body[..len] };
    let credential = if uid.is_some() { sys } else { OpaqueAuth::NONE };
    let call = record_with_credential(credential, PROGRAM, VERSION, 1, &path_args(path));
    let reply = exchange(&mut connect(port), &call).expect("a reply");
    u32::from_be_bytes(results(&reply)[..4].try_into().expect("a status"))
}

/// Calls MOUNT.
fn call(port: u16, procedure: u32, args: &[u8]) -> Vec<u8> {
    let reply = exchange(&mut connect(port), &record(PROGRAM, VERSION, procedure, args)).expect("a reply");
    results(&reply).to_vec()
}

/// A path of any length, as an argument.
fn path_args(path: &Path) -> Vec<u8> {
    let path = path.as_os_str().as_bytes();
    let mut args = vec![0; 4 + padded(path.len())];
    Encoder::new(&mut args).opaque(path, path.len()).expect("room");
    args
}

/// Mounts a directory, and returns its handle.
pub(crate) fn mount(port: u16, path: &Path) -> Result<Vec<u8>, Mountstat3> {
    match decode(&call(port, 1, &path_args(path))) {
        Mountres3::Ok(results) => {
            assert!(results.auth_flavors.iter().any(|flavor| flavor == 1), "AUTH_SYS");
            Ok(results.fhandle.0.to_vec())
        }
        Mountres3::Default(status) => Err(status),
    }
}

#[test]
fn only_directories_of_the_export_can_be_mounted() {
    let nfsd = Nfsd::start(&[]);
    let (port, path) = (nfsd.mount_port, nfsd.path());
    fs::create_dir_all(path.join("a/b")).unwrap();
    fs::write(path.join("file"), b"").unwrap();
    std::os::unix::fs::symlink("/", path.join("link")).unwrap();
    decode::<()>(&call(port, 0, &[]));
    let (root, below) = (mount(port, &path).unwrap(), mount(port, &path.join("a/b")).unwrap());
    assert_ne!(root, below);
    assert_eq!(mount(port, &path.join("")).unwrap(), root, "with a slash at the end");
    let fails = |path: &Path| mount(port, path).unwrap_err() as u32;
    assert_eq!(fails(Path::new("/")), Mountstat3::ErrNoent as u32);
    assert_eq!(fails(&path.join("absent")), Mountstat3::ErrNoent as u32);
    assert_eq!(fails(&path.join("file")), Mountstat3::ErrNotdir as u32);
    assert_eq!(fails(&path.join("link")), Mountstat3::ErrNotdir as u32);
    assert_eq!(fails(&path.join("a/../..")), Mountstat3::ErrInval as u32);
    assert_eq!(fails(Path::new(&"x".repeat(1024))), Mountstat3::ErrNoent as u32);
    assert_eq!(fails(Path::new(&"x".repeat(1025))), Mountstat3::ErrNametoolong as u32);

    let list = || decode::<Mountlist<'_>>(&call(port, 2, &[])).iter();
    let mounted: Vec<&[u8]> = list().map(|mount| mount.ml_directory.0).collect();
    assert!(mounted.contains(&path.as_os_str().as_bytes()), "{mounted:?}");
    decode::<()>(&call(port, 3, &path_args(&path)));
    assert_eq!(list().count() + 1, mounted.len());
    decode::<()>(&call(port, 4, &[]));
    assert_eq!(list().count(), 0);
    let all: Vec<_> = decode::<Exports<'_>>(&call(port, 5, &[])).iter().collect();
    assert_eq!(all.len(), 1);
    assert_eq!(all[0].ex_dir.0, path.as_os_str().as_bytes());
}

#[test]
fn only_directories_that_the_caller_could_reach_locally_can_be_mounted() {
    if !is_root() {
        return println!("not run: only root can act as other users");
    }
    const OWNER: u32 = 1234;
    for squash in ["none", "root", "all"] {
        let nfsd = Nfsd::start(&["--squash", squash]);
        let users = if squash == "all" { "all calls run as nobody" } else { "calls run as their users" };
        assert!(nfsd.ready.contains(users), "{}", nfsd.ready);
        let (port, top) = (nfsd.mount_port, nfsd.path());
        // A private directory, and an open one below it.
        let (private, open) = (top.join("private"), top.join("private/open"));
        fs::create_dir_all(&open).unwrap();
        chown(&private, Some(OWNER), Some(OWNER)).unwrap();
        fs::set_permissions(&private, fs::Permissions::from_mode(0o700)).unwrap();
        fs::set_permissions(&top, fs::Permissions::from_mode(0o755)).unwrap();
        for (uid, may_search) in
            [(Some(0), squash == "none"), (Some(OWNER), squash != "all"), (Some(5678), false), (None, false)]
        {
            let what = format!("{uid:?} with --squash {squash}");
            let status = |path: &Path| mount_status(port, path, uid);
            assert_eq!((status(&top), status(&private)), (0, 0), "{what}");
            let denied = Mountstat3::ErrAcces as u32;
            assert_eq!(status(&open), if may_search { 0 } else { denied }, "{what}");
            let absent = if may_search { Mountstat3::ErrNoent as u32 } else { denied };
            assert_eq!(status(&private.join("absent")), absent, "{what}: the status reveals which names exist");
        }
        // The root of the export can be mounted even if nobody may search it.
        fs::set_permissions(&top, fs::Permissions::from_mode(0o700)).unwrap();
        assert_eq!(mount_status(port, &top, None), 0);
        let gss = OpaqueAuth { flavor: 6, body: &[] };
        let reply =
            exchange(&mut connect(port), &record_with_credential(gss, PROGRAM, VERSION, 1, &path_args(&top))).unwrap();
        let (header, _) = ReplyHeader::parse(&reply).expect("a reply");
        assert_eq!(header.body, ReplyBody::Denied(RejectStat::AuthError(AuthStat::RejectedCred.code())));
    }
}

#[test]
fn unknown_calls_and_malformed_records_of_mount_are_refused() {
    let nfsd = Nfsd::start(&[]);
    let reply_body = |record: &[u8]| {
        let reply = exchange(&mut connect(nfsd.mount_port), record).expect("a reply");
        let (header, _) = ReplyHeader::parse(&reply).expect("a reply");
        format!("{:?}", header.body)
    };
    let accepted = |stat| format!("{:?}", ReplyBody::accepted(stat));
    assert_eq!(reply_body(&record(100_003, 3, 0, &[])), accepted(AcceptStat::ProgUnavail));
    assert_eq!(reply_body(&record(PROGRAM, 1, 0, &[])), accepted(AcceptStat::ProgMismatch { low: 3, high: 3 }));
    assert_eq!(reply_body(&record(PROGRAM, VERSION, 6, &[])), accepted(AcceptStat::ProcUnavail));
    for args in [&[][..], &[0, 0, 0, 9, b'/'], &[255; 8], &[0, 0, 0, 1, b'/', 0, 0, 0, 1]] {
        assert_eq!(reply_body(&record(PROGRAM, VERSION, 1, args)), accepted(AcceptStat::GarbageArgs), "{args:?}");
    }
    // A call may come in fragments of any length.
    let whole = record(PROGRAM, VERSION, 0, &[]);
    let mut parts = vec![0, 0, 0, 3];
    parts.extend(&whole[4..7]);
    parts.extend([0, 0, 0, 0]);
    parts.extend(((whole.len() as u32 - 7) | (1 << 31)).to_be_bytes());
    parts.extend(&whole[7..]);
    assert_eq!(reply_body(&parts), accepted(AcceptStat::Success));
    // A record that is too long ends its own connection only.
    assert_eq!(exchange(&mut connect(nfsd.mount_port), &[0x7F, 255, 255, 255]), None);
    let mut stream = connect(nfsd.mount_port);
    assert!(exchange(&mut stream, &whole).is_some());
    assert!(exchange(&mut stream, &whole).is_some(), "a second call on one connection");
}

/// Idle connections, and those with an incomplete call, are evicted for new connections.
#[test]
fn idle_mount_connections_do_not_lock_out_other_clients() {
    let nfsd = Nfsd::start(&[]);
    let whole = record(PROGRAM, VERSION, 0, &[]);
    let mut idle: Vec<_> = (0..200).map(|_| connect(nfsd.mount_port)).collect();
    idle.iter_mut().skip(100).for_each(|stream| drop(stream.write(&whole[..9])));
    decode::<()>(&call(nfsd.mount_port, 0, &[]));
    assert_eq!(idle[0].read(&mut [0]).expect("the end"), 0, "the least recently used connection is closed");
}

/// RFC 8267 §5.1 requires more protocols than MOUNT, and `--help` says that they are missing.
#[test]
fn help_names_unsupported_protocols() {
    let help = std::process::Command::new(env!("CARGO_BIN_EXE_nfs3d")).arg("--help").output().expect("it runs");
    let help = String::from_utf8(help.stdout).expect("text");
    for word in ["NLM", "NSM", "nolock", "NFSACL"] {
        assert!(help.contains(word), "{word} is not in: {help}");
    }
}
