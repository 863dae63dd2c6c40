//! A TCP proxy between a peer and a server, which can delay bytes and insert others.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::thread::JoinHandle;

use rpcrdma::Address;
use rustix::net::{AddressFamily, SocketType, bind, connect, socket};

/// Request to the thread of the proxy.
enum Request {
    /// Stops all forwarding, except by `Pass`.
    Hold,
    /// Moves up to this many bytes in each direction.
    Pass(usize),
    /// Sends these bytes to the server.
    Inject(Vec<u8>),
}

/// A proxy of one connection. It forwards all bytes until [`hold`](Self::hold).
pub struct TcpProxy {
    address: Address,
    requests: Option<Sender<(Request, Sender<usize>)>>,
    thread: Option<JoinHandle<()>>,
}

impl TcpProxy {
    /// Starts a proxy that connects to a server over TCP from address `from` in 127.0.0.0/8.
    pub fn new(server: &Address, from: Ipv4Addr) -> Self {
        let Address::Iwarp(server) = server else { panic!("{server}: expected an address over TCP") };
        let server: SocketAddr = server.0.parse().expect("an address");
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
        let listening = listener.local_addr().expect("a bound listener");
        let (requests, received) = channel();
        let thread = std::thread::spawn(move || {
            let (peer, _) = listener.accept().expect("a peer");
            let socket = socket(AddressFamily::INET, SocketType::STREAM, None).expect("a socket");
            bind(&socket, &SocketAddr::from((from, 0))).expect("an address of this host");
            connect(&socket, &server).expect("a listening server");
            run([peer, TcpStream::from(socket)], &received);
        });
        let address = format!("iwarp:{listening}").parse().expect("an address");
        Self { address, requests: Some(requests), thread: Some(thread) }
    }

    /// Address to which the peer connects.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// Stops all forwarding, except by [`pass`](Self::pass).
    pub fn hold(&self) {
        self.request(Request::Hold);
    }

    /// Moves up to `bytes` bytes in each direction; returns the number of bytes to the server.
    pub fn pass(&self, bytes: usize) -> usize {
        self.request(Request::Pass(bytes))
    }

    /// Sends bytes to the server in the peer's name.
    pub fn inject(&self, bytes: &[u8]) {
        self.request(Request::Inject(bytes.to_vec()));
    }

    /// Sends a request to the thread. Returns the number of bytes that it has moved to the server.
    fn request(&self, request: Request) -> usize {
        let (reply, answer) = channel();
        let requests = self.requests.as_ref().expect("present until the drop");
        // The thread ends with the connection, after which no bytes move.
        requests.send((request, reply)).map_or(0, |()| answer.recv().unwrap_or(0))
    }
}

impl Drop for TcpProxy {
    fn drop(&mut self) {
        self.requests = None;
        let result = self.thread.take().map(JoinHandle::join);
        assert!(std::thread::panicking() || result.is_some_and(|result| result.is_ok()), "the proxy has panicked");
    }
}

/// Forwards bytes until the proxy is dropped or an end closes.
fn run(ends: [TcpStream; 2], received: &Receiver<(Request, Sender<usize>)>) {
    let [peer, server] = &ends;
    for end in &ends {
        end.set_nonblocking(true).expect("a socket");
        // Nagle's algorithm would delay forwarded bytes.
        end.set_nodelay(true).expect("a socket");
    }
    let mut held = false;
    loop {
        let moved = match received.try_recv() {
            Err(TryRecvError::Disconnected) => return,
            Err(TryRecvError::Empty) if held => {
                std::thread::yield_now();
                continue;
            }
            Err(TryRecvError::Empty) => forward(peer, server, 1 << 16).and_then(|_| forward(server, peer, 1 << 16)),
            Ok((request, reply)) => {
                let moved = match request {
                    Request::Hold => {
                        held = true;
                        Some(0)
                    }
                    Request::Pass(bytes) => {
                        let moved = forward(peer, server, bytes);
                        moved.and_then(|moved| forward(server, peer, bytes).map(|_| moved))
                    }
                    Request::Inject(bytes) => write_all(server, &bytes).map(|()| bytes.len()),
                };
                // Cannot fail, because the caller waits for the reply.
                let _ = reply.send(moved.unwrap_or(0));
                moved
            }
        };
        if moved.is_none() {
            return;
        }
    }
}

/// Forwards up to `bytes` bytes; returns their number, or `None` if an end has closed.
fn forward(mut from: &TcpStream, to: &TcpStream, bytes: usize) -> Option<usize> {
    let mut buffer = vec![0; bytes];
    let mut len = 0;
    while len < bytes {
        match from.read(&mut buffer[len..]) {
            // The bytes that arrived before the end must still be forwarded.
            Ok(0) if len > 0 => break,
            Ok(0) => return None,
            Ok(n) => len += n,
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            Err(_) => return None,
        }
    }
    write_all(to, &buffer[..len]).map(|()| len)
}

/// Writes all bytes; `None` if the end has closed.
fn write_all(mut to: &TcpStream, mut bytes: &[u8]) -> Option<()> {
    while !bytes.is_empty() {
        match to.write(bytes) {
            Ok(n) => bytes = &bytes[n..],
            Err(error) if error.kind() == ErrorKind::WouldBlock => std::thread::yield_now(),
            Err(_) => return None,
        }
    }
    Some(())
}
