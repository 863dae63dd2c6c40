//! A minimal HTTP/1.1 server for scrapes, one request per connection.
//!
//! Clients are not authenticated, so all their resources are bounded: [`MAX_CONNECTIONS`] connections at a time, at
//! most [`MAX_PER_HOST`] of them from one host, each with [`TIMEOUT`] for its request and for its response, and
//! [`MAX_REQUEST`] bytes of request. At a limit, a new connection replaces the oldest one without a complete request
//! (of the same host, if the host's limit is reached), so a client that sends its request immediately does not wait for
//! silent ones. If all connections are being answered, the new one is closed.

use std::fmt::Arguments;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rpcrdma::fabric::host::network;
use rpcrdma::fabric::log_limit::ClockedLog;
use rpcrdma_rpcbind::stream::Timed;

/// Maximum concurrent connections. Each has a thread.
const MAX_CONNECTIONS: usize = 64;
/// Maximum concurrent connections of one host.
const MAX_PER_HOST: usize = 4;
/// Time limit for a request, and for its response.
const TIMEOUT: Duration = Duration::from_secs(2);
/// Longest request, in bytes.
const MAX_REQUEST: usize = 8 << 10;
/// Maximum header fields of a request.
const MAX_FIELDS: usize = 64;

/// The content of a path.
pub(super) struct Page {
    /// Media type.
    pub(super) kind: &'static str,
    pub(super) text: String,
}

/// The open connections, the oldest first.
#[derive(Debug, Default)]
struct Connections {
    open: Mutex<Vec<OpenConnection>>,
    /// Notified when a connection has ended.
    ended: Condvar,
}

/// An open connection.
#[derive(Debug)]
struct OpenConnection {
    address: IpAddr,
    /// The host whose limit applies: the address, or the /64 network of an IPv6 address.
    host: IpAddr,
    stream: Arc<TcpStream>,
    /// Whether its request is incomplete, and no other connection has taken its place.
    awaits_request: bool,
}

/// The place of an open connection. Dropping it frees the place for another connection.
#[derive(Debug)]
struct ConnectionSlot<'a> {
    connections: &'a Connections,
    stream: Arc<TcpStream>,
}

impl Connections {
    fn lock(&self) -> MutexGuard<'_, Vec<OpenConnection>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Admits a connection from an address. At a limit, closes the oldest connection whose request is incomplete, or
    /// returns `None` if there is no such connection. Logs each connection that is refused or closed.
    fn admit(&self, stream: TcpStream, address: IpAddr, log: impl FnOnce(Arguments<'_>)) -> Option<ConnectionSlot<'_>> {
        let (address, host) = (address.to_canonical(), network(address));
        let mut open = self.lock();
        let is_host_full = open.iter().filter(|connection| connection.host == host).count() >= MAX_PER_HOST;
        if is_host_full || open.len() >= MAX_CONNECTIONS {
            let limit = if is_host_full { MAX_PER_HOST } else { MAX_CONNECTIONS };
            let what = if is_host_full { "connections of this host" } else { "connections" };
            let is_replaceable = |connection: &&mut OpenConnection| {
                connection.awaits_request && (!is_host_full || connection.host == host)
            };
            let Some(oldest) = open.iter_mut().find(is_replaceable) else {
                log(format_args!("{address}: connection refused: limit of {limit} {what}, all being answered"));
                return None;
            };
            let closed = oldest.address;
            log(format_args!("{closed}: connection closed without a request: limit of {limit} {what}"));
            oldest.awaits_request = false;
            // The connection's thread then reads the end of the stream and exits.
            let _ = oldest.stream.shutdown(Shutdown::Both);
            let stream = Arc::clone(&oldest.stream);
            let is_open =
                |open: &mut Vec<OpenConnection>| open.iter().any(|connection| Arc::ptr_eq(&connection.stream, &stream));
            open = self.ended.wait_while(open, is_open).unwrap_or_else(PoisonError::into_inner);
        }
        let stream = Arc::new(stream);
        open.push(OpenConnection { address, host, stream: Arc::clone(&stream), awaits_request: true });
        Some(ConnectionSlot { connections: self, stream })
    }
}

impl ConnectionSlot<'_> {
    /// Claims the place for the response. Returns false if another connection has taken it.
    fn claim(&self) -> bool {
        let mut open = self.connections.lock();
        let connection = open.iter_mut().find(|connection| Arc::ptr_eq(&connection.stream, &self.stream));
        connection.is_some_and(|connection| std::mem::take(&mut connection.awaits_request))
    }
}

impl Drop for ConnectionSlot<'_> {
    fn drop(&mut self) {
        self.connections.lock().retain(|connection| !Arc::ptr_eq(&connection.stream, &self.stream));
        self.connections.ended.notify_all();
    }
}

/// Serves all clients and never returns.
pub(super) fn serve(listener: &TcpListener, page: impl Fn(&str) -> Option<Page> + Sync) -> ! {
    let (page, connections) = (&page, &Connections::default());
    let mut log = ClockedLog::new(module_path!());
    std::thread::scope(|scope| {
        loop {
            let (stream, peer) = match listener.accept() {
                Ok(accepted) => accepted,
                Err(error) => {
                    log.accept_failed("exporter", error);
                    // The usual cause is the limit of open files. Connections that end soon free descriptors.
                    std::thread::sleep(Duration::from_millis(100));
                    continue;
                }
            };
            log.report_suppressed();
            let warn = |line: Arguments<'_>| log.warn("connections refused or closed without a request", line);
            let Some(slot) = connections.admit(stream, peer.ip(), warn) else { continue };
            // If no thread can be started, the connection is closed.
            let _ = std::thread::Builder::new().spawn_scoped(scope, move || {
                let page = |path: &str| if slot.claim() { page(path) } else { None };
                // An error concerns only this client.
                let _ = answer(&slot.stream, &page);
            });
        }
    })
}

fn answer(stream: &TcpStream, page: &impl Fn(&str) -> Option<Page>) -> io::Result<()> {
    let request = read_request(&mut Timed::new(stream, TIMEOUT))?;
    let plain = |text: &str| Page { kind: "text/plain", text: format!("{text}\n") };
    let (status, page, with_body) = match request {
        Request::Page { path, with_body } => match page(&path) {
            Some(page) => ("200 OK", page, with_body),
            None => ("404 Not Found", plain("not found; see /metrics"), with_body),
        },
        Request::OtherMethod => ("405 Method Not Allowed", plain("only GET and HEAD are supported"), true),
        Request::Malformed => ("400 Bad Request", plain("malformed HTTP/1 request"), true),
        Request::TooLong => ("431 Request Header Fields Too Large", plain("request too long"), true),
    };
    let mut reply = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {}\r\nContent-Length: {}\r\nAllow: GET, HEAD\r\nConnection: close\r\n\r\n",
        page.kind,
        page.text.len()
    );
    if with_body {
        reply.push_str(&page.text);
    }
    Timed::new(stream, TIMEOUT).write_all(reply.as_bytes())
}

/// A request, or why it is invalid.
#[derive(Debug, PartialEq, Eq)]
enum Request {
    /// GET, or HEAD, whose response has no body.
    Page {
        path: String,
        with_body: bool,
    },
    OtherMethod,
    Malformed,
    TooLong,
}

/// Reads the head of a request. A body is not expected and not read.
fn read_request(stream: &mut impl Read) -> io::Result<Request> {
    let mut bytes = Vec::new();
    let mut buffer = [0; 1024];
    loop {
        match stream.read(&mut buffer) {
            Ok(0) => return Ok(Request::Malformed),
            Ok(count) => bytes.extend_from_slice(&buffer[..count]),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
        if let Some(request) = parse(&bytes) {
            return Ok(request);
        }
    }
}

/// Parses a request. Returns `None` if it is incomplete.
fn parse(bytes: &[u8]) -> Option<Request> {
    let mut fields = [httparse::EMPTY_HEADER; MAX_FIELDS];
    let mut request = httparse::Request::new(&mut fields);
    match request.parse(bytes) {
        Ok(httparse::Status::Complete(_)) => {}
        Ok(httparse::Status::Partial) if bytes.len() < MAX_REQUEST => return None,
        Ok(httparse::Status::Partial) | Err(httparse::Error::TooManyHeaders) => return Some(Request::TooLong),
        Err(_) => return Some(Request::Malformed),
    }
    let with_body = request.method == Some("GET");
    if !with_body && request.method != Some("HEAD") {
        return Some(Request::OtherMethod);
    }
    Some(Request::Page { path: path_of(request.path.unwrap_or_default()).to_owned(), with_body })
}

/// Returns the path of a request target, which is in origin form or, as for proxies, in absolute form (RFC 9112
/// §3.2.2).
fn path_of(target: &str) -> &str {
    let is_http = |scheme: &str| ["http", "https"].iter().any(|http| scheme.eq_ignore_ascii_case(http));
    let target = match target.split_once("://") {
        Some((scheme, rest)) if is_http(scheme) => rest.find(['/', '?']).map_or("", |end| &rest[end..]),
        _ => target,
    };
    let path = target.split_once('?').map_or(target, |(path, _)| path);
    if path.is_empty() { "/" } else { path }
}

#[cfg(test)]
mod tests {
    use std::thread::ScopedJoinHandle;

    use super::*;

    #[test]
    fn requests_are_parsed_once_they_are_complete() {
        let head = b"GET /metrics?name=up HTTP/1.1\r\nHost: a\r\nAccept: text/plain\r\n\r\n";
        assert!((0..head.len()).all(|end| parse(&head[..end]).is_none()));
        assert_eq!(parse(head), Some(Request::Page { path: "/metrics".to_owned(), with_body: true }));
        assert_eq!(parse(b"HEAD / HTTP/1.0\r\n\r\n"), Some(Request::Page { path: "/".to_owned(), with_body: false }));
        for (target, path) in [
            ("http://host:9/metrics?name=up", "/metrics"),
            ("HTTPS://[::1]/metrics", "/metrics"),
            ("http://host", "/"),
            ("http://host?/metrics", "/"),
            ("/http://host/metrics", "/http://host/metrics"),
            ("ftp://host/metrics", "ftp://host/metrics"),
        ] {
            assert_eq!(path_of(target), path, "{target}");
        }
        assert_eq!(parse(b"POST /metrics HTTP/1.1\r\n\r\n"), Some(Request::OtherMethod));
        assert_eq!(parse(b"\x16\x03\x01\x02\x00"), Some(Request::Malformed));
        let many = format!("GET / HTTP/1.1\r\n{}\r\n", "a: b\r\n".repeat(MAX_FIELDS + 1));
        assert_eq!(parse(many.as_bytes()), Some(Request::TooLong));
        let long = format!("GET / HTTP/1.1\r\na: {}", "b".repeat(MAX_REQUEST));
        assert_eq!(parse(long.as_bytes()), Some(Request::TooLong));
    }

    /// Returns the response to these bytes.
    fn response(sent: &[u8]) -> String {
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
    fn responses_have_a_status_a_length_and_an_end() {
        let text = response(b"GET /metrics HTTP/1.1\r\n\r\n");
        assert!(text.starts_with("HTTP/1.1 200 OK\r\nContent-Type: text/x\r\nContent-Length: 8\r\n"), "{text}");
        assert!(text.ends_with("\r\n\r\nfigures\n") && text.contains("Connection: close"), "{text}");
        assert!(response(b"GET http://a:1/metrics HTTP/1.1\r\nHost: a:1\r\n\r\n").starts_with("HTTP/1.1 200 "));
        assert!(response(b"HEAD /metrics HTTP/1.1\r\n\r\n").ends_with("\r\n\r\n"));
        assert!(response(b"GET /other HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 404 "));
        assert!(response(b"PUT /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 405 "));
        assert!(response(b"\x00\x01").starts_with("HTTP/1.1 400 "));
    }

    fn host(last: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, last])
    }

    /// Connections of several hosts, all with clones of one socket.
    struct Clients {
        connections: Connections,
        socket: TcpStream,
    }

    impl Clients {
        fn new() -> Self {
            let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
            let socket = TcpStream::connect(listener.local_addr().expect("an address")).expect("it listens");
            Self { connections: Connections::default(), socket }
        }

        /// Admits a connection that is then answered. Returns the logged line if it is refused.
        fn admit_answered(&self, host: IpAddr) -> Result<ConnectionSlot<'_>, String> {
            let mut line = String::new();
            let stream = self.socket.try_clone().expect("a descriptor");
            let slot = self.connections.admit(stream, host, |text| line = text.to_string()).ok_or(line)?;
            assert!(slot.claim());
            Ok(slot)
        }
    }

    #[test]
    fn connections_of_a_host_are_limited() {
        let clients = Clients::new();
        let mut slots: Vec<_> = (0..130).map_while(|_| clients.admit_answered(host(1)).ok()).collect();
        assert_eq!(slots.len(), MAX_PER_HOST);
        let mapped = "::ffff:10.0.0.1".parse().expect("an address");
        let refused = clients.admit_answered(mapped).expect_err("the same host");
        let expected = "10.0.0.1: connection refused: limit of 4 connections of this host, all being answered";
        assert_eq!(refused, expected);
        let of_v6 = |address: &str| address.parse::<IpAddr>().expect("an address");
        let network: Vec<_> =
            (0..9).filter_map(|n| clients.admit_answered(of_v6(&format!("fd00::{n}:1"))).ok()).collect();
        assert_eq!(network.len(), MAX_PER_HOST, "a network of 64 bits is one host");
        let refused = clients.admit_answered(of_v6("fd00::9:1")).expect_err("the same network");
        assert!(refused.starts_with("fd00::9:1: connection refused: "), "{refused}");
        assert!(clients.admit_answered(of_v6("fd00:0:0:1::1")).is_ok(), "another network");
        drop(network);
        slots.push(clients.admit_answered(host(2)).expect("room"));
        slots.remove(0);
        slots.push(clients.admit_answered(host(1)).expect("an ended connection makes room"));
        assert!(clients.admit_answered(host(1)).is_err());
        slots.extend((2..200).filter_map(|last| clients.admit_answered(host(last)).ok()));
        assert_eq!(slots.len(), MAX_CONNECTIONS);
        let refused = clients.admit_answered(host(250)).expect_err("no room");
        assert_eq!(refused, "10.0.0.250: connection refused: limit of 64 connections, all being answered");
    }

    #[test]
    fn at_a_limit_the_oldest_connection_without_a_request_is_closed() {
        let clients = &Clients::new();
        let lines = &Mutex::new(Vec::new());
        let log = |text: Arguments<'_>| lines.lock().expect("a log").push(text.to_string());
        let admit = |host| {
            let stream = clients.socket.try_clone().expect("a descriptor");
            clients.connections.admit(stream, host, log).expect("room")
        };
        // Waits until a connection has lost its place to a new connection, which waits for its end.
        let wait_for_replacement = |next: &ScopedJoinHandle<'_, _>, slot: &ConnectionSlot<'_>| {
            let is_own = |connection: &OpenConnection| {
                connection.awaits_request && Arc::ptr_eq(&connection.stream, &slot.stream)
            };
            while clients.connections.lock().iter().any(is_own) {
                assert!(!next.is_finished());
                std::thread::yield_now();
            }
        };
        let answered = admit(host(1));
        assert!(answered.claim());
        let oldest = admit(host(1));
        let others: Vec<_> = (1..MAX_PER_HOST - 1).map(|_| admit(host(1))).collect();
        std::thread::scope(|scope| {
            let next = scope.spawn(|| admit(host(1)));
            wait_for_replacement(&next, &oldest);
            assert!(!oldest.claim(), "another connection takes its place");
            drop(oldest);
            drop(next.join().expect("room"));
        });
        let closed = "10.0.0.1: connection closed without a request: limit of 4 connections of this host";
        assert_eq!(std::mem::take(&mut *lines.lock().expect("a log")), [closed]);
        let rest: Vec<_> =
            (MAX_PER_HOST - 1..MAX_CONNECTIONS).map(|at| admit(host(2 + (at / MAX_PER_HOST) as u8))).collect();
        std::thread::scope(|scope| {
            let next = scope.spawn(|| admit(host(250)));
            wait_for_replacement(&next, &others[0]);
            drop(others);
            next.join().expect("room");
        });
        let closed = "10.0.0.1: connection closed without a request: limit of 64 connections";
        assert_eq!(*lines.lock().expect("a log"), [closed]);
        assert!(rest.iter().all(ConnectionSlot::claim));
    }

    #[test]
    fn silent_connections_do_not_delay_a_request_of_their_host() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        std::thread::spawn(move || serve(&listener, |_: &str| Some(Page { kind: "text/x", text: "figures\n".into() })));
        for _ in 0..20 {
            let connect = |_| {
                let mut stream = TcpStream::connect(address).expect("it listens");
                // The connection may be closed already.
                let _ = stream.write_all(b"GET /me");
                stream
            };
            let _silent: Vec<_> = (0..30).map(connect).collect();
            let mut client = TcpStream::connect(address).expect("it listens");
            client.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").expect("there is room");
            let mut text = String::new();
            client.read_to_string(&mut text).expect("it ends");
            assert!(text.ends_with("figures\n"), "{text}");
        }
    }

    #[test]
    fn silent_connections_of_one_host_do_not_delay_another() {
        // One port serves both address families, and the other host connects by IPv6.
        let Ok(listener) = TcpListener::bind("[::]:0") else { return println!("not run: no IPv6") };
        let port = listener.local_addr().expect("an address").port();
        std::thread::spawn(move || serve(&listener, |_: &str| Some(Page { kind: "text/x", text: "figures\n".into() })));
        let silent: Vec<_> = (0..130).map(|_| TcpStream::connect(("127.0.0.1", port)).expect("it listens")).collect();
        let Ok(mut other) = TcpStream::connect(("::1", port)) else { return println!("not run: no IPv6") };
        other.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").expect("there is room");
        let mut text = String::new();
        other.read_to_string(&mut text).expect("it ends");
        assert!(text.ends_with("figures\n"), "{text}");
        // Most silent connections were closed before the request was answered, because they were accepted earlier.
        let open = silent.iter().filter(|stream| {
            stream.set_nonblocking(true).expect("a socket");
            matches!((&mut &**stream).read(&mut [0]), Err(error) if error.kind() == ErrorKind::WouldBlock)
        });
        assert!(open.count() <= MAX_PER_HOST);
    }

    #[test]
    fn silent_clients_are_disconnected() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let _silent = TcpStream::connect(listener.local_addr().expect("an address")).expect("it listens");
        let error = answer(&listener.accept().expect("a client").0, &|_: &str| None).expect_err("it asks for nothing");
        assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
    }
}
