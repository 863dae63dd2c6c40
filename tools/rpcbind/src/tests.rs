//! Tests with a fake rpcbind on a socket of its own.

use std::io::Write;
use std::os::unix::net::UnixListener;
use std::sync::{Arc, Mutex};

use super::Transport::{Rdma, Tcp};
use super::protocol::RpList;
use super::*;
use rpcrdma_proto::wire::rpc::{AcceptStat, CallHeader, ReplyBody, ReplyHeader};

/// An rpcbind that keeps its entries in a list.
struct FakeRpcbind {
    _directory: tempfile::TempDir,
    socket: std::path::PathBuf,
    list: Arc<Mutex<Vec<Mapping>>>,
}

impl FakeRpcbind {
    fn start() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("rpcbind.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let list = Arc::<Mutex<Vec<Mapping>>>::default();
        let shared = Arc::clone(&list);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let shared = Arc::clone(&shared);
                std::thread::spawn(move || serve(stream, &shared));
            }
        });
        Self { _directory: directory, socket, list }
    }

    fn list(&self) -> Vec<Mapping> {
        self.list.lock().unwrap().clone()
    }
}

fn serve(mut stream: UnixStream, list: &Mutex<Vec<Mapping>>) {
    let mut mark = [0; 4];
    while stream.read_exact(&mut mark).is_ok() {
        let mut call = vec![0; (u32::from_be_bytes(mark) & !(1 << 31)) as usize];
        stream.read_exact(&mut call).unwrap();
        let (header, args) = CallHeader::parse(&call).unwrap();
        assert_eq!((header.program, header.version), (PROGRAM, VERSION));
        let mut list = list.lock().unwrap();
        let results = answer(&mut list, header.procedure, &call[args..]);
        let header = ReplyHeader { xid: header.xid, body: ReplyBody::accepted(AcceptStat::Success) };
        let mut reply = vec![0; 24];
        header.emit(&mut reply).unwrap();
        reply.extend(results);
        stream.write_all(&(reply.len() as u32 | 1 << 31).to_be_bytes()).unwrap();
        stream.write_all(&reply).unwrap();
    }
}

fn answer(list: &mut Vec<Mapping>, procedure: u32, args: &[u8]) -> Vec<u8> {
    if procedure == DUMP {
        let lines: Vec<_> = list.iter().map(|line| RpList { rpcb_map: line.to_rpcb() }).collect();
        return rpcrdma_xdr::encode(&RpcblistPtr::from(&lines[..])).unwrap();
    }
    let mut mapping = Mapping::from_rpcb(rpcrdma_xdr::decode(args).unwrap());
    mapping.owner = "superuser".into();
    let key = |line: &Mapping| (line.program, line.version, line.netid.clone());
    let known = list.iter().position(|line| key(line) == key(&mapping));
    let is_accepted = match (procedure, known) {
        (SET, Some(known)) => list[known].address == mapping.address,
        (SET, None) => {
            list.push(mapping);
            true
        }
        (UNSET, Some(known)) => {
            list.remove(known);
            true
        }
        _ => false,
    };
    u32::from(is_accepted).to_be_bytes().to_vec()
}

fn socket_address(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

#[test]
fn universal_addresses_are_formatted_and_parsed() {
    for (address, text) in [
        ("10.0.0.1:20049", "10.0.0.1.78.81"),
        ("0.0.0.0:111", "0.0.0.0.0.111"),
        ("[fd00::1]:20049", "fd00::1.78.81"),
        ("[::]:65535", "::.255.255"),
    ] {
        assert_eq!(universal(socket_address(address)), text);
        assert_eq!(parse_universal(text), Some(socket_address(address)));
    }
    // Other notations of an IPv6 address are also parsed (RFC 5665 §5.2.3.4).
    for (text, address) in [
        ("2001:db8:0:0:8:800:200C:417A.203.81", "[2001:db8::8:800:200c:417a]:52049"),
        ("::FFFF:192.0.2.7.203.81", "[::ffff:192.0.2.7]:52049"),
    ] {
        assert_eq!(parse_universal(text), Some(socket_address(address)));
    }
    for text in ["", "1", "1.2", "10.0.0.1", "10.0.0.1.256.1", "10.0.0.1.1.-1", "/run/rpcbind.sock", "x.1.1"] {
        assert_eq!(parse_universal(text), None, "{text:?}");
    }
}

#[test]
fn an_entry_is_encoded_as_two_numbers_and_three_strings() {
    let mut entry = Mapping::new(100_003, 3, Rdma, socket_address("10.0.0.1:20049"));
    entry.owner = "root".into();
    let bytes = b"\0\x01\x86\xA3\0\0\0\x03\0\0\0\x04rdma\0\0\0\x0E10.0.0.1.78.81\0\0\0\0\0\x04root";
    assert_eq!(rpcrdma_xdr::encode(&entry.to_rpcb()).unwrap(), bytes);
    assert_eq!(Mapping::from_rpcb(rpcrdma_xdr::decode(bytes).unwrap()), entry);
}

#[test]
fn registrations_are_taken_over_refused_and_withdrawn() {
    let fake = FakeRpcbind::start();
    let mappings = vec![
        Mapping::new(100_003, 3, Rdma, socket_address("10.0.0.1:20049")),
        Mapping::new(100_003, 3, Rdma, socket_address("[fd00::1]:20049")),
        Mapping::new(100_005, 3, Tcp, socket_address("0.0.0.0:20048")),
    ];
    let registration = Registration::register_at(&fake.socket, mappings.clone()).unwrap();
    let netids: Vec<_> = fake.list().iter().map(|line| line.netid.clone()).collect();
    assert_eq!(netids, ["rdma", "rdma6", "tcp"]);
    // A server that restarts after a crash registers the same address again. Another address is refused.
    std::mem::forget(registration);
    let registration = Registration::register_at(&fake.socket, mappings).unwrap();
    let other = vec![
        Mapping::new(100_227, 3, Rdma, socket_address("1.1.1.1:1")),
        Mapping::new(100_003, 3, Rdma, socket_address("1.1.1.1:1")),
    ];
    let error = Registration::register_at(&fake.socket, other).unwrap_err().to_string();
    assert!(error.contains("user superuser registered it at 10.0.0.1.78.81"), "{error}");
    assert_eq!(fake.list().len(), 3, "the mapping before the refused one is withdrawn");
    registration.withdraw().unwrap();
    assert_eq!(fake.list(), []);
}

#[test]
fn a_look_up_finds_the_rdma_address_of_the_hosts_family() {
    let fake = FakeRpcbind::start();
    let host = socket_address("10.0.0.1:0").ip();
    let registered = Registration::register_at(
        &fake.socket,
        vec![
            Mapping::new(7, 3, Tcp, socket_address("0.0.0.0:2049")),
            Mapping::new(7, 4, Rdma, socket_address("0.0.0.0:1")),
            Mapping::new(7, 3, Rdma, socket_address("[::]:2")),
            Mapping::new(7, 3, Rdma, socket_address("0.0.0.0:20049")),
        ],
    );
    let all = dump(&mut connect_to_socket(&fake.socket).unwrap()).unwrap();
    assert_eq!(find(&all, host, "rdma", 7, 3).unwrap(), socket_address("10.0.0.1:20049"));
    assert_eq!(
        find(&all, socket_address("[fd00::1]:0").ip(), Rdma.netid(socket_address("[fd00::1]:0").ip()), 7, 3).unwrap(),
        socket_address("[fd00::1]:2")
    );
    let error = find(&all, host, "rdma", 8, 3).unwrap_err().to_string();
    let start = "rpcbind at 10.0.0.1 has no program 8 version 3 over rdma (`rpcinfo 10.0.0.1`;";
    assert!(error.starts_with(start), "{error}");
    drop(registered);
}

#[test]
fn malformed_lists_and_missing_sockets_are_errors() {
    for bytes in [&[0, 0, 0, 1, 0, 0][..], &[0, 0, 0, 2], &[]] {
        assert!(rpcrdma_xdr::decode::<RpcblistPtr<'_>>(bytes).is_err(), "{bytes:?}");
    }
    let error = Registration::register_at(Path::new("/nonexistent/socket"), vec![]).unwrap_err().to_string();
    assert!(error.contains("/nonexistent/socket") && error.contains("systemctl start rpcbind"), "{error}");
}

#[test]
fn slowly_arriving_bytes_do_not_extend_the_time_limit() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let at = listener.local_addr().expect("an address");
    let server = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("a client");
        stream.set_nodelay(true).expect("a socket");
        // A fragment of 64 KiB arrives byte by byte until the client gives up.
        let mut next: &[u8] = &[0, 1, 0, 0];
        while stream.write_all(next).is_ok() {
            next = &[0];
            std::thread::sleep(Duration::from_millis(10));
        }
    });
    let error = dump_at(at, Duration::from_millis(200)).expect_err("the reply is incomplete");
    assert!(
        matches!(&error, RpcbindError::Call(StreamError::Io(io)) if io.kind() == io::ErrorKind::TimedOut),
        "{error:?}"
    );
    server.join().expect("no panic");
}
