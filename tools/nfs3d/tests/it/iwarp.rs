//! Effect of the iWARP options on the bytes that both programs send over TCP, as recorded by a relay.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::thread::JoinHandle;

use rpcrdma::Address;
use rpcrdma::fabric::iwarp::wire::{MpaFrame, MpaFrameKind, ReaderStep, SegmentError, SegmentReader, fpdu_len};

use crate::client::{Nfsd, pattern, put};
use crate::nfs3c::run_at;

/// The longest FPDU that the fabric sends, in bytes.
const LONGEST: usize = 65464;
/// Bytes of the copied file, which take many FPDUs of any length.
const FILE: usize = 65536 * 8;

/// The bytes that one side has sent.
#[derive(Debug)]
struct SentStream {
    setup: MpaFrame,
    stream: Vec<u8>,
}

impl SentStream {
    fn parse(kind: MpaFrameKind, bytes: &[u8]) -> Self {
        let (setup, len) = MpaFrame::decode(kind, bytes).expect("a frame of set-up").expect("a complete frame");
        Self { setup, stream: bytes[len..].to_vec() }
    }

    /// Lengths of the FPDUs. With `crc`, each must have a valid CRC.
    fn fpdus(&self, crc: bool) -> Result<Vec<usize>, SegmentError> {
        let (mut reader, mut input, mut lengths) = (SegmentReader::new(crc), &self.stream[..], Vec::new());
        while let Some(step) = reader.step(&mut input)? {
            if let ReaderStep::Segment { segment, len } = step {
                // `encode` includes the two bytes of the length, which `fpdu_len` adds.
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

/// Starts a thread that copies a stream to its end, and returns its bytes.
fn copy(mut from: TcpStream, mut to: TcpStream) -> JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let (mut copied, mut buffer) = (Vec::new(), vec![0; 1 << 16]);
        // The stream may end by a reset.
        while let Ok(n @ 1..) = from.read(&mut buffer) {
            copied.extend_from_slice(&buffer[..n]);
            if to.write_all(&buffer[..n]).is_err() {
                break;
            }
        }
        // The other end may be closed already.
        let _ = to.shutdown(Shutdown::Write);
        copied
    })
}

/// Runs the client through a relay. Returns its exit status, its errors, and the bytes that it and the server sent.
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
    let (status, _, errors) = run_at(&at, nfsd, options, command);
    let directions = relay.join().expect("a relay");
    (status, errors, directions.map(|direction| direction.join().expect("no panic")))
}

/// Runs the client through a relay, successfully. Returns the streams of the client and the server.
#[track_caller]
fn streams(nfsd: &Nfsd, options: &[&str], command: &[&str]) -> [SentStream; 2] {
    let (status, errors, [client, server]) = relayed(nfsd, options, command);
    assert_eq!(status, 0, "{errors}");
    [SentStream::parse(MpaFrameKind::Request, &client), SentStream::parse(MpaFrameKind::Reply, &server)]
}

/// Starts a server with a file.
fn serve(options: &[&str]) -> Nfsd {
    let nfsd = Nfsd::start_on_tcp(options);
    put(&nfsd.path().join("file"), &pattern(FILE));
    nfsd
}

const GET: &[&str] = &["get", "file", "/dev/null"];

#[test]
fn crcs_are_used_if_either_side_requires_them() {
    for (by_server, by_client, requested, agreed) in [
        (&[][..], &[][..], false, false),
        (&["--crc", "always"], &[], false, true),
        (&[], &["--crc", "always"], true, true),
        (&["--crc", "never"], &["--crc", "if-asked"], false, false),
        (&["--crc", "if-asked"], &["--crc", "never"], false, false),
    ] {
        let [client, server] = streams(&serve(by_server), by_client, GET);
        let what = format!("{by_server:?} {by_client:?}");
        assert_eq!((client.setup.crc, server.setup.crc), (requested, agreed), "{what}");
        assert_eq!((client.has_crcs(), server.has_crcs()), (agreed, agreed), "{what}");
    }
}

#[test]
fn sides_that_refuse_and_require_crcs_do_not_connect() {
    let (status, errors, _) = relayed(&serve(&["--crc", "always"]), &["--crc", "never"], GET);
    assert!(status == 1 && errors.contains("CRCs are required, but `iwarp.crc` is `never` here"), "{errors}");
    let (status, errors, [_, server]) = relayed(&serve(&["--crc", "never"]), &["--crc", "always"], GET);
    assert_eq!(status, 1, "{errors}");
    assert!(SentStream::parse(MpaFrameKind::Reply, &server).setup.reject, "{errors}");
}

#[test]
fn the_fpdu_option_sets_the_size_of_sent_fpdus() {
    let local = tempfile::tempdir().unwrap();
    let original = local.path().join("original");
    put(&original, &pattern(FILE));
    let put_command = ["put", original.to_str().expect("text"), "new"];
    // The length of a segment of the loopback device differs from the longest FPDU.
    for (option, is_longest) in [(None, true), (Some("auto"), true), (Some("longest"), true), (Some("segment"), false)]
    {
        let options: Vec<&str> = option.iter().flat_map(|&size| ["--fpdu", size]).collect();
        let [_, server] = streams(&serve(&options), &[], GET);
        assert_eq!(
            server.longest() == LONGEST,
            is_longest,
            "{} bytes with {options:?} of the server",
            server.longest()
        );
        let [client, _] = streams(&serve(&[]), &options, &put_command);
        assert_eq!(
            client.longest() == LONGEST,
            is_longest,
            "{} bytes with {options:?} of the client",
            client.longest()
        );
    }
}

#[test]
fn iwarp_options_without_an_iwarp_address_are_refused() {
    let nfsd = Nfsd::start(&[]);
    for option in [["--crc", "always"], ["--fpdu", "segment"]] {
        let (status, _, errors) = run_at(&nfsd.address, &nfsd, &option, GET);
        assert!(status == 1 && errors.contains("--crc and --fpdu need an iwarp: address"), "{errors}");
        let errors = Nfsd::start_error(&option);
        assert!(errors.contains("--crc and --fpdu need an iwarp: address"), "{errors}");
    }
    let errors = Nfsd::start_error(&["--crc", "yes"]);
    assert!(errors.contains("invalid CRC mode `yes`: expected never, if-asked, always"), "{errors}");
}
