//! A minimal HTTP/1.1 server for scrapes, one request per connection.
//!
//! Clients are not authenticated, so all their resources are bounded: [`THREADS`] connections at a time, of them
//! [`PER_HOST`] of one host, each with [`PATIENCE`] for its request and for its response, and [`LONGEST`] bytes of
//! request. Further connections are closed at once: none waits for silent ones of another host.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, TcpListener, TcpStream};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rpcrdma::fabric::host::network;
use rpcrdma::fabric::log_limit::ClockedLog;
use rpcrdma_rpcbind::stream::Timed;

/// Most concurrent connections.
const THREADS: usize = 64;
/// Most concurrent connections of one host.
const PER_HOST: usize = 4;
/// Time limit for a request, and for its response.
const PATIENCE: Duration = Duration::from_secs(2);
/// Longest request, in bytes.
const LONGEST: usize = 8 << 10;
/// Most header fields of a request.
const FIELDS: usize = 64;

/// Contents of a path.
pub(super) struct Page {
    /// Media type.
    pub(super) kind: &'static str,
    pub(super) text: String,
}

/// The host of each open connection.
#[derive(Debug, Default)]
struct Connections(Mutex<Vec<IpAddr>>);

/// One open connection; its drop makes room for another.
#[derive(Debug)]
struct Slot<'a> {
    of: &'a Connections,
    host: IpAddr,
}

impl Connections {
    /// Room for a connection of this host; `None` at the limits.
    fn admit(&self, host: IpAddr) -> Option<Slot<'_>> {
        let host = network(host);
        let mut hosts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if hosts.len() >= THREADS || hosts.iter().filter(|one| **one == host).count() >= PER_HOST {
            return None;
        }
        hosts.push(host);
        Some(Slot { of: self, host })
    }
}

impl Drop for Slot<'_> {
    fn drop(&mut self) {
        let mut hosts = self.of.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = hosts.iter().position(|host| *host == self.host) {
            hosts.swap_remove(at);
        }
    }
}

/// Serves all clients, forever.
pub(super) fn serve(listener: &TcpListener, page: impl Fn(&str) -> Option<Page> + Sync) -> ! {
    let (page, connections) = (&page, &Connections::default());
    let mut log = ClockedLog::new(module_path!());
    std::thread::scope(|scope| {
        loop {
            let (stream, from) = match listener.accept() {
                Ok(accepted) => accepted,
                Err(error) => {
                    log.accept_failed("exporter", error);
                    // Mostly too many open files: some will be closed.
                    std::thread::sleep(Duration::from_millis(100));
                    continue;
                }
            };
            let Some(slot) = connections.admit(from.ip()) else { continue };
            // Without a thread, the connection closes.
            let _ = std::thread::Builder::new().spawn_scoped(scope, move || {
                // A client that fails has only itself to tell.
                drop(answer(&stream, page));
                drop(slot);
            });
        }
    })
}

fn answer(stream: &TcpStream, page: &impl Fn(&str) -> Option<Page>) -> io::Result<()> {
    let asked = request(&mut Timed::new(stream, PATIENCE))?;
    let plain = |text: &str| Page { kind: "text/plain", text: format!("{text}\n") };
    let (status, page, whole) = match asked {
        Asked::Page { path, whole } => match page(&path) {
            Some(page) => ("200 OK", page, whole),
            None => ("404 Not Found", plain("there is /metrics"), whole),
        },
        Asked::Other => ("405 Method Not Allowed", plain("GET and HEAD are all that there is"), true),
        Asked::Malformed => ("400 Bad Request", plain("this is no request of HTTP/1"), true),
        Asked::TooLong => ("431 Request Header Fields Too Large", plain("the request is too long"), true),
    };
    let mut reply = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {}\r\nContent-Length: {}\r\nAllow: GET, HEAD\r\nConnection: close\r\n\r\n",
        page.kind,
        page.text.len()
    );
    if whole {
        reply.push_str(&page.text);
    }
    Timed::new(stream, PATIENCE).write_all(reply.as_bytes())
}

/// A parsed request.
#[derive(Debug, PartialEq, Eq)]
enum Asked {
    /// The contents of a path, or the head only.
    Page {
        path: String,
        whole: bool,
    },
    Other,
    Malformed,
    TooLong,
}

/// Reads the head of a request. A body is not asked for, and not read.
fn request(stream: &mut impl Read) -> io::Result<Asked> {
    let mut bytes = Vec::new();
    let mut part = [0; 1024];
    loop {
        match stream.read(&mut part) {
            Ok(0) => return Ok(Asked::Malformed),
            Ok(count) => bytes.extend_from_slice(&part[..count]),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
        if let Some(asked) = parse(&bytes) {
            return Ok(asked);
        }
    }
}

/// Parses a request; `None` if it is incomplete.
fn parse(bytes: &[u8]) -> Option<Asked> {
    let mut fields = [httparse::EMPTY_HEADER; FIELDS];
    let mut request = httparse::Request::new(&mut fields);
    match request.parse(bytes) {
        Ok(httparse::Status::Complete(_)) => {}
        Ok(httparse::Status::Partial) if bytes.len() < LONGEST => return None,
        Ok(httparse::Status::Partial) | Err(httparse::Error::TooManyHeaders) => return Some(Asked::TooLong),
        Err(_) => return Some(Asked::Malformed),
    }
    let whole = request.method == Some("GET");
    if !whole && request.method != Some("HEAD") {
        return Some(Asked::Other);
    }
    let path = request.path.unwrap_or_default();
    let path = path.split_once('?').map_or(path, |(path, _)| path);
    Some(Asked::Page { path: path.to_owned(), whole })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_parsed_however_they_are_cut() {
        let head = b"GET /metrics?name=up HTTP/1.1\r\nHost: a\r\nAccept: text/plain\r\n\r\n";
        assert!((0..head.len()).all(|end| parse(&head[..end]).is_none()));
        assert_eq!(parse(head), Some(Asked::Page { path: "/metrics".to_owned(), whole: true }));
        assert_eq!(parse(b"HEAD / HTTP/1.0\r\n\r\n"), Some(Asked::Page { path: "/".to_owned(), whole: false }));
        assert_eq!(parse(b"POST /metrics HTTP/1.1\r\n\r\n"), Some(Asked::Other));
        assert_eq!(parse(b"\x16\x03\x01\x02\x00"), Some(Asked::Malformed));
        let many = format!("GET / HTTP/1.1\r\n{}\r\n", "a: b\r\n".repeat(FIELDS + 1));
        assert_eq!(parse(many.as_bytes()), Some(Asked::TooLong));
        let long = format!("GET / HTTP/1.1\r\na: {}", "b".repeat(LONGEST));
        assert_eq!(parse(long.as_bytes()), Some(Asked::TooLong));
    }

    /// The response to these bytes.
    fn answered(sent: &[u8]) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let mut client = TcpStream::connect(listener.local_addr().expect("an address")).expect("it listens");
        client.write_all(sent).expect("there is room");
        let page = |path: &str| (path == "/metrics").then(|| Page { kind: "text/x", text: "figures\n".to_owned() });
        answer(&listener.accept().expect("a client").0, &page).expect("an answer");
        let mut text = String::new();
        client.read_to_string(&mut text).expect("it ends");
        text
    }

    #[test]
    fn answers_have_a_length_and_an_end() {
        let text = answered(b"GET /metrics HTTP/1.1\r\n\r\n");
        assert!(text.starts_with("HTTP/1.1 200 OK\r\nContent-Type: text/x\r\nContent-Length: 8\r\n"), "{text}");
        assert!(text.ends_with("\r\n\r\nfigures\n") && text.contains("Connection: close"), "{text}");
        assert!(answered(b"HEAD /metrics HTTP/1.1\r\n\r\n").ends_with("\r\n\r\n"));
        assert!(answered(b"GET /other HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 404 "));
        assert!(answered(b"PUT /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 405 "));
        assert!(answered(b"\x00\x01").starts_with("HTTP/1.1 400 "));
    }

    #[test]
    fn a_host_has_a_share_of_the_connections() {
        let connections = Connections::default();
        let host = |last: u8| IpAddr::from([10, 0, 0, last]);
        let mut slots: Vec<_> = (0..130).filter_map(|_| connections.admit(host(1))).collect();
        assert_eq!(slots.len(), PER_HOST);
        let mapped = "::ffff:10.0.0.1".parse().expect("an address");
        assert!(connections.admit(mapped).is_none(), "the same host");
        let of_v6 = |address: &str| address.parse::<IpAddr>().expect("an address");
        let network: Vec<_> = (0..9).filter_map(|n| connections.admit(of_v6(&format!("fd00::{n}:1")))).collect();
        assert_eq!(network.len(), PER_HOST, "a network of 64 bits is one host");
        assert!(connections.admit(of_v6("fd00:0:0:1::1")).is_some(), "another network");
        drop(network);
        assert!(connections.admit(host(2)).is_some());
        slots.pop();
        slots.extend(connections.admit(host(1)));
        assert_eq!(slots.len(), PER_HOST, "an ended connection makes room");
        slots.extend((2..200).filter_map(|last| connections.admit(host(last))));
        assert_eq!(slots.len(), THREADS);
    }

    #[test]
    fn silent_connections_of_one_host_do_not_delay_another() {
        // One port for both families: the other host connects by IPv6.
        let Ok(listener) = TcpListener::bind("[::]:0") else { return println!("not run: no IPv6") };
        let port = listener.local_addr().expect("an address").port();
        std::thread::spawn(move || serve(&listener, |_: &str| Some(Page { kind: "text/x", text: "figures\n".into() })));
        let silent: Vec<_> = (0..130).map(|_| TcpStream::connect(("127.0.0.1", port)).expect("it listens")).collect();
        let Ok(mut other) = TcpStream::connect(("::1", port)) else { return println!("not run: no IPv6") };
        other.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").expect("there is room");
        let mut text = String::new();
        other.read_to_string(&mut text).expect("it ends");
        assert!(text.ends_with("figures\n"), "{text}");
        // All but a few of the silent ones were closed before: they were accepted earlier.
        let open = silent.iter().filter(|stream| {
            stream.set_nonblocking(true).expect("a socket");
            matches!((&mut &**stream).read(&mut [0]), Err(error) if error.kind() == ErrorKind::WouldBlock)
        });
        assert!(open.count() <= PER_HOST);
    }

    #[test]
    fn silent_clients_are_disconnected() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let _silent = TcpStream::connect(listener.local_addr().expect("an address")).expect("it listens");
        let error = answer(&listener.accept().expect("a client").0, &|_: &str| None).expect_err("it asks for nothing");
        assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
    }
}
