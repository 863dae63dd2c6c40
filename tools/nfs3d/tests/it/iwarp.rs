//! The effect of the iWARP options on the bytes that go over TCP, as a relay between both programs sees them.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::thread::JoinHandle;

use rpcrdma::Address;
use rpcrdma::fabric::iwarp::wire::{Kind, SegmentError, SegmentReader, Setup, Step, fpdu_len};

use crate::client::{Nfsd, pattern, put};
use crate::nfs3c::run_by_way_of;

/// The longest FPDU that the fabric makes, in bytes.
const LONGEST: usize = 65464;
/// Bytes of the file that goes: many FPDUs of any length.
const FILE: usize = 65536 * 8;

/// What one side says.
#[derive(Debug)]
struct Said {
    setup: Setup,
    stream: Vec<u8>,
}

impl Said {
    fn of(kind: Kind, bytes: &[u8]) -> Self {
        let (setup, len) = Setup::decode(kind, bytes).expect("a frame of set-up").expect("all of it");
        Self { setup, stream: bytes[len..].to_vec() }
    }

    /// The lengths of its FPDUs; with `crc`, each has one, which is right.
    fn fpdus(&self, crc: bool) -> Result<Vec<usize>, SegmentError> {
        let (mut reader, mut input, mut lengths) = (SegmentReader::new(crc), &self.stream[..], Vec::new());
        while let Some(step) = reader.step(&mut input)? {
            if let Step::Segment { segment, len } = step {
                // Behind the two bytes of its length.
                lengths.push(fpdu_len(segment.encode(len).len() - 2 + len));
            }
        }
        Ok(lengths)
    }

    fn has_crcs(&self) -> bool {
        assert!(!self.fpdus(false).expect("a stream").is_empty());
        match self.fpdus(true) {
            Ok(_) => true,
            Err(SegmentError::Crc { .. }) => false,
            Err(other) => panic!("{other}"),
        }
    }

    fn longest(&self) -> usize {
        self.fpdus(false).expect("a stream").into_iter().max().expect("an FPDU")
    }
}

/// Copies to the end of a way, and keeps what went.
fn copy(mut from: TcpStream, mut to: TcpStream) -> JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let (mut went, mut space) = (Vec::new(), vec![0; 1 << 16]);
        // An end may be a reset.
        while let Ok(n @ 1..) = from.read(&mut space) {
            went.extend_from_slice(&space[..n]);
            if to.write_all(&space[..n]).is_err() {
                break;
            }
        }
        // It may be gone.
        let _ = to.shutdown(Shutdown::Write);
        went
    })
}

/// Runs the client by way of a relay; its exit status and errors, and what it and the server said.
fn relayed(nfsd: &Nfsd, options: &[&str], command: &[&str]) -> (i32, String, [Vec<u8>; 2]) {
    let address: Address = nfsd.address.parse().expect("an address");
    let server: SocketAddr = address.socket_address().expect("found").expect("a network");
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("bound");
    let at = format!("iwarp:{}", listener.local_addr().expect("an address"));
    let relay = std::thread::spawn(move || {
        let (client, _) = listener.accept().expect("a client");
        let server = TcpStream::connect(server).expect("connected");
        let clone = |socket: &TcpStream| socket.try_clone().expect("a descriptor");
        [copy(clone(&client), clone(&server)), copy(server, client)]
    });
    let (status, _, errors) = run_by_way_of(&at, nfsd, options, command);
    let ways = relay.join().expect("a relay");
    (status, errors, ways.map(|way| way.join().expect("a way")))
}

/// The same, where the client succeeds: what both said.
#[track_caller]
fn between(nfsd: &Nfsd, options: &[&str], command: &[&str]) -> [Said; 2] {
    let (status, errors, [client, server]) = relayed(nfsd, options, command);
    assert_eq!(status, 0, "{errors}");
    [Said::of(Kind::Request, &client), Said::of(Kind::Reply, &server)]
}

/// A server with a file, which it puts in FPDUs.
fn serve(options: &[&str]) -> Nfsd {
    let nfsd = Nfsd::start_on_tcp(options);
    put(&nfsd.path().join("file"), &pattern(FILE));
    nfsd
}

const GET: &[&str] = &["get", "file", "/dev/null"];

#[test]
fn either_side_may_want_crcs() {
    for (by_server, by_client, asked, agreed) in [
        (&[][..], &[][..], false, false),
        (&["--crc", "always"], &[], false, true),
        (&[], &["--crc", "always"], true, true),
        (&["--crc", "never"], &["--crc", "if-asked"], false, false),
        (&["--crc", "if-asked"], &["--crc", "never"], false, false),
    ] {
        let [client, server] = between(&serve(by_server), by_client, GET);
        let what = format!("{by_server:?} {by_client:?}");
        assert_eq!((client.setup.crc, server.setup.crc), (asked, agreed), "{what}");
        assert_eq!((client.has_crcs(), server.has_crcs()), (agreed, agreed), "{what}");
    }
}

#[test]
fn ends_without_crc_and_with_required_crc_do_not_connect() {
    let (status, errors, _) = relayed(&serve(&["--crc", "always"]), &["--crc", "never"], GET);
    assert!(status == 1 && errors.contains("it wants CRCs, and `crc` is Never here"), "{errors}");
    let (status, errors, [_, server]) = relayed(&serve(&["--crc", "never"]), &["--crc", "always"], GET);
    assert_eq!(status, 1, "{errors}");
    assert!(Said::of(Kind::Reply, &server).setup.reject, "{errors}");
}

#[test]
fn each_end_announces_its_fpdu_size() {
    let local = tempfile::tempdir().unwrap();
    let original = local.path().join("original");
    put(&original, &pattern(FILE));
    let putting = ["put", original.to_str().expect("text"), "new"];
    // A segment of a loopback device's is shorter or longer, but not as long.
    for (option, is_longest) in [(None, true), (Some("auto"), true), (Some("longest"), true), (Some("segment"), false)]
    {
        let options: Vec<&str> = option.iter().flat_map(|&size| ["--fpdu", size]).collect();
        let [_, server] = between(&serve(&options), &[], GET);
        assert_eq!(
            server.longest() == LONGEST,
            is_longest,
            "{} bytes with {options:?} of the server",
            server.longest()
        );
        let [client, _] = between(&serve(&[]), &options, &putting);
        assert_eq!(
            client.longest() == LONGEST,
            is_longest,
            "{} bytes with {options:?} of the client",
            client.longest()
        );
    }
}

#[test]
fn where_there_is_no_iwarp_its_options_are_refused() {
    let nfsd = Nfsd::start(&[]);
    for option in [["--crc", "always"], ["--fpdu", "segment"]] {
        let (status, _, errors) = run_by_way_of(&nfsd.address, &nfsd, &option, GET);
        assert!(status == 1 && errors.contains("--crc and --fpdu are about iwarp: addresses"), "{errors}");
        let said = Nfsd::refused(&option);
        assert!(said.contains("--crc and --fpdu are about iwarp: addresses"), "{said}");
    }
    let said = Nfsd::refused(&["--crc", "yes"]);
    assert!(said.contains("\"yes\" is none of never, if-asked, always"), "{said}");
}
