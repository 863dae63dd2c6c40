//! A minimal HTTP/1.1 server for scrapes, one request per connection.
//!
//! Clients are not authenticated, so all their resources are bounded: [`THREADS`] connections at a time, of them
//! [`PER_HOST`] of one host, each with [`PATIENCE`] for its request and for its response, and [`LONGEST`] bytes of
//! request. At a limit, a new connection replaces the oldest one without a complete request, of the same host if the
//! host's limit is reached: a client that sends its request at once does not wait for silent ones. If all are being
//! answered, the new connection is closed.

use std::fmt::Arguments;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
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

/// The open connections, the oldest first.
#[derive(Debug, Default)]
struct Connections {
    open: Mutex<Vec<Open>>,
    /// One of them has ended.
    ended: Condvar,
}

#[derive(Debug)]
struct Open {
    address: IpAddr,
    /// Its host, as shares count it: of an IPv6 address its network.
    host: IpAddr,
    stream: Arc<TcpStream>,
    /// Its request has not arrived yet, and no other connection has taken its place.
    is_waiting: bool,
}

/// One open connection; its drop makes room for another.
#[derive(Debug)]
struct Slot<'a> {
    of: &'a Connections,
    stream: Arc<TcpStream>,
}

impl Connections {
    fn lock(&self) -> MutexGuard<'_, Vec<Open>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Room for a connection from an address. At a limit, it takes the place of the oldest connection whose request has
    /// not arrived yet; `None` if there is no such connection. `log` gets a line for each connection that is closed.
    fn admit(&self, stream: TcpStream, address: IpAddr, log: impl FnOnce(Arguments<'_>)) -> Option<Slot<'_>> {
        let (address, host) = (address.to_canonical(), network(address));
        let mut open = self.lock();
        let is_host_full = open.iter().filter(|one| one.host == host).count() >= PER_HOST;
        if is_host_full || open.len() >= THREADS {
            let limit = if is_host_full { PER_HOST } else { THREADS };
            let what = if is_host_full { "of this host" } else { "in all" };
            let is_replaceable = |one: &&mut Open| one.is_waiting && (!is_host_full || one.host == host);
            let Some(oldest) = open.iter_mut().find(is_replaceable) else {
                log(format_args!(
                    "{address}: connection refused: {limit} {what} are being answered, which is the limit"
                ));
                return None;
            };
            let of = oldest.address;
            log(format_args!("{of}: connection closed without a request: more than {limit} {what} are open"));
            oldest.is_waiting = false;
            // Its thread reads the end of the stream, and ends at once.
            let _ = oldest.stream.shutdown(Shutdown::Both);
            let stream = Arc::clone(&oldest.stream);
            let is_open = |open: &mut Vec<Open>| open.iter().any(|one| Arc::ptr_eq(&one.stream, &stream));
            open = self.ended.wait_while(open, is_open).unwrap_or_else(PoisonError::into_inner);
        }
        let stream = Arc::new(stream);
        open.push(Open { address, host, stream: Arc::clone(&stream), is_waiting: true });
        Some(Slot { of: self, stream })
    }
}

impl Slot<'_> {
    /// Keeps the place for the response. Returns false if another connection has taken it.
    fn keep(&self) -> bool {
        let mut open = self.of.lock();
        let own = open.iter_mut().find(|one| Arc::ptr_eq(&one.stream, &self.stream));
        own.is_some_and(|own| std::mem::take(&mut own.is_waiting))
    }
}

impl Drop for Slot<'_> {
    fn drop(&mut self) {
        self.of.lock().retain(|one| !Arc::ptr_eq(&one.stream, &self.stream));
        self.of.ended.notify_all();
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
            log.sum_up();
            let warn = |line: Arguments<'_>| log.warn("connections refused or closed without a request", line);
            let Some(slot) = connections.admit(stream, from.ip(), warn) else { continue };
            // Without a thread, the connection closes.
            let _ = std::thread::Builder::new().spawn_scoped(scope, move || {
                let page = |path: &str| if slot.keep() { page(path) } else { None };
                // A client that fails has only itself to tell.
                let _ = answer(&slot.stream, &page);
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
    Some(Asked::Page { path: path_of(request.path.unwrap_or_default()).to_owned(), whole })
}

/// The path of a request target: in origin form, or in absolute form, as for proxies (RFC 9112 §3.2.2).
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
    fn requests_are_parsed_however_they_are_cut() {
        let head = b"GET /metrics?name=up HTTP/1.1\r\nHost: a\r\nAccept: text/plain\r\n\r\n";
        assert!((0..head.len()).all(|end| parse(&head[..end]).is_none()));
        assert_eq!(parse(head), Some(Asked::Page { path: "/metrics".to_owned(), whole: true }));
        assert_eq!(parse(b"HEAD / HTTP/1.0\r\n\r\n"), Some(Asked::Page { path: "/".to_owned(), whole: false }));
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
        assert!(answered(b"GET http://a:1/metrics HTTP/1.1\r\nHost: a:1\r\n\r\n").starts_with("HTTP/1.1 200 "));
        assert!(answered(b"HEAD /metrics HTTP/1.1\r\n\r\n").ends_with("\r\n\r\n"));
        assert!(answered(b"GET /other HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 404 "));
        assert!(answered(b"PUT /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 405 "));
        assert!(answered(b"\x00\x01").starts_with("HTTP/1.1 400 "));
    }

    fn host(last: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, last])
    }

    /// Connections of hosts by their last number, and the logged lines. All have one socket.
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

        /// A connection that is being answered, or the logged line.
        fn answered(&self, host: IpAddr) -> Result<Slot<'_>, String> {
            let mut line = String::new();
            let stream = self.socket.try_clone().expect("a descriptor");
            let slot = self.connections.admit(stream, host, |text| line = text.to_string()).ok_or(line)?;
            assert!(slot.keep());
            Ok(slot)
        }
    }

    #[test]
    fn a_host_has_a_share_of_the_connections() {
        let clients = Clients::new();
        let mut slots: Vec<_> = (0..130).map_while(|_| clients.answered(host(1)).ok()).collect();
        assert_eq!(slots.len(), PER_HOST);
        let mapped = "::ffff:10.0.0.1".parse().expect("an address");
        let refused = clients.answered(mapped).expect_err("the same host");
        let says = "10.0.0.1: connection refused: 4 of this host are being answered, which is the limit";
        assert_eq!(refused, says);
        let of_v6 = |address: &str| address.parse::<IpAddr>().expect("an address");
        let network: Vec<_> = (0..9).filter_map(|n| clients.answered(of_v6(&format!("fd00::{n}:1"))).ok()).collect();
        assert_eq!(network.len(), PER_HOST, "a network of 64 bits is one host");
        let refused = clients.answered(of_v6("fd00::9:1")).expect_err("the same network");
        assert!(refused.starts_with("fd00::9:1: connection refused: "), "{refused}");
        assert!(clients.answered(of_v6("fd00:0:0:1::1")).is_ok(), "another network");
        drop(network);
        slots.push(clients.answered(host(2)).expect("room"));
        slots.remove(0);
        slots.push(clients.answered(host(1)).expect("an ended connection makes room"));
        assert!(clients.answered(host(1)).is_err());
        slots.extend((2..200).filter_map(|last| clients.answered(host(last)).ok()));
        assert_eq!(slots.len(), THREADS);
        let refused = clients.answered(host(250)).expect_err("no room");
        assert_eq!(refused, "10.0.0.250: connection refused: 64 in all are being answered, which is the limit");
    }

    #[test]
    fn connections_without_a_request_make_room_the_oldest_first() {
        let clients = &Clients::new();
        let lines = &Mutex::new(Vec::new());
        let log = |text: Arguments<'_>| lines.lock().expect("a log").push(text.to_string());
        let admit = |host| {
            let stream = clients.socket.try_clone().expect("a descriptor");
            clients.connections.admit(stream, host, log).expect("room")
        };
        // Waits until a connection has lost its place, and the new one waits for its end.
        let replaces = |next: &ScopedJoinHandle<'_, _>, slot: &Slot<'_>| {
            let is_own = |one: &Open| one.is_waiting && Arc::ptr_eq(&one.stream, &slot.stream);
            while clients.connections.lock().iter().any(is_own) {
                assert!(!next.is_finished());
                std::thread::yield_now();
            }
        };
        let answered = admit(host(1));
        assert!(answered.keep());
        let oldest = admit(host(1));
        let others: Vec<_> = (1..PER_HOST - 1).map(|_| admit(host(1))).collect();
        std::thread::scope(|scope| {
            let next = scope.spawn(|| admit(host(1)));
            replaces(&next, &oldest);
            assert!(!oldest.keep(), "another connection takes its place");
            drop(oldest);
            drop(next.join().expect("room"));
        });
        let closed = "10.0.0.1: connection closed without a request: more than 4 of this host are open";
        assert_eq!(std::mem::take(&mut *lines.lock().expect("a log")), [closed]);
        let rest: Vec<_> = (PER_HOST - 1..THREADS).map(|at| admit(host(2 + (at / PER_HOST) as u8))).collect();
        std::thread::scope(|scope| {
            let next = scope.spawn(|| admit(host(250)));
            replaces(&next, &others[0]);
            drop(others);
            next.join().expect("room");
        });
        let closed = "10.0.0.1: connection closed without a request: more than 64 in all are open";
        assert_eq!(*lines.lock().expect("a log"), [closed]);
        assert!(rest.iter().all(Slot::keep));
    }

    #[test]
    fn silent_connections_do_not_delay_a_request_of_their_host() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        std::thread::spawn(move || serve(&listener, |_: &str| Some(Page { kind: "text/x", text: "figures\n".into() })));
        for _ in 0..20 {
            let begun = |_| {
                let mut stream = TcpStream::connect(address).expect("it listens");
                // It may be closed already.
                let _ = stream.write_all(b"GET /me");
                stream
            };
            let _silent: Vec<_> = (0..30).map(begun).collect();
            let mut client = TcpStream::connect(address).expect("it listens");
            client.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").expect("there is room");
            let mut text = String::new();
            client.read_to_string(&mut text).expect("it ends");
            assert!(text.ends_with("figures\n"), "{text}");
        }
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
