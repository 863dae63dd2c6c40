//! A minimal HTTP/1.1 server for scrapes, one request per connection.
//!
//! Clients are not authenticated, so all their resources are bounded: [`THREADS`] at a time, each for [`PATIENCE`] in
//! total, with [`LONGEST`] bytes of request.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use rpcrdma_rpcbind::stream::Timed;

/// Concurrent requests. Others wait in the kernel's queue.
const THREADS: usize = 4;
/// Time limit for a request and its response.
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

/// Serves all clients, forever.
///
/// # Errors
/// A thread cannot be started.
pub(super) fn serve(listener: &TcpListener, page: impl Fn(&str) -> Option<Page> + Sync) -> io::Result<()> {
    let page = &page;
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            std::thread::Builder::new().spawn_scoped(scope, move || {
                loop {
                    match listener.accept() {
                        // A client that fails has only itself to tell.
                        Ok((stream, _)) => drop(answer(&stream, page)),
                        // Such as too many open files, which is so for a while.
                        Err(_) => std::thread::sleep(Duration::from_millis(100)),
                    }
                }
            })?;
        }
        Ok(())
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
    fn silent_clients_are_disconnected() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let _silent = TcpStream::connect(listener.local_addr().expect("an address")).expect("it listens");
        let error = answer(&listener.accept().expect("a client").0, &|_: &str| None).expect_err("it asks for nothing");
        assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
    }
}
