//! Open MOUNT connections, with a limit per host.
#![forbid(unsafe_code)]

use std::net::{IpAddr, Shutdown, TcpStream};
use std::sync::{Arc, Mutex};

use log::Level;
use rpcrdma_fabric::host::network;

use crate::lines;
use crate::lock::lock;

/// Limit of connections of all hosts.
pub(crate) const MAX_CONNECTIONS: usize = 64;
/// Limit of connections per host.
pub(crate) const MAX_PER_HOST: usize = 16;

/// Open connections with the addresses of their peers, the least recently used first.
#[derive(Default)]
pub(crate) struct Connections(Mutex<Vec<(IpAddr, Arc<TcpStream>)>>);

impl Connections {
    /// Adds a connection. At a limit, closes the least recently used one: of the same host at [`MAX_PER_HOST`], of the
    /// host with the most connections at [`MAX_CONNECTIONS`].
    pub(crate) fn admit(&self, stream: TcpStream, peer: IpAddr) -> Arc<TcpStream> {
        let (host, stream) = (network(peer), Arc::new(stream));
        let mut all = lock(&self.0);
        let count = |host| all.iter().filter(|(other, _)| network(*other) == host).count();
        let crowded_host = if count(host) >= MAX_PER_HOST {
            Some(host)
        } else if all.len() >= MAX_CONNECTIONS {
            all.iter().rev().map(|(other, _)| network(*other)).max_by_key(|host| count(*host))
        } else {
            None
        };
        let least_recent = crowded_host.and_then(|host| all.iter().position(|(other, _)| network(*other) == host));
        if let Some((peer, evicted)) = least_recent.map(|at| all.remove(at)) {
            // The connection's thread sees the end of the stream. An error means that the stream is closed already.
            let _ = evicted.shutdown(Shutdown::Both);
            lines::log(
                Level::Warn,
                "idle MOUNT connections evicted",
                format_args!(
                    "{peer}: least recently used MOUNT connection evicted: the limits are {MAX_PER_HOST} per host and \
                     {MAX_CONNECTIONS} in all"
                ),
            );
        }
        all.push((peer.to_canonical(), Arc::clone(&stream)));
        stream
    }

    /// Marks a connection as most recently used, if it is present.
    pub(crate) fn touch(&self, stream: &Arc<TcpStream>) {
        let all = &mut *lock(&self.0);
        if let Some(at) = all.iter().position(|(_, other)| Arc::ptr_eq(other, stream)) {
            all[at..].rotate_left(1);
        }
    }

    pub(crate) fn remove(&self, stream: &Arc<TcpStream>) {
        lock(&self.0).retain(|(_, other)| !Arc::ptr_eq(other, stream));
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn the_least_recently_used_connection_of_the_host_with_the_most_is_evicted() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let to = listener.local_addr().expect("an address");
        let connections = Connections::default();
        let admit = |host: &str| {
            let stream = TcpStream::connect(to).expect("a connection");
            drop(listener.accept());
            connections.admit(stream, host.parse().expect("an address"))
        };
        let is_open = |stream| lock(&connections.0).iter().any(|(_, other)| Arc::ptr_eq(other, stream));
        let greedy: Vec<_> = (0..MAX_PER_HOST).map(|_| admit("fd00::1")).collect();
        connections.touch(&greedy[0]);
        admit("fd00::2");
        assert!(is_open(&greedy[0]) && !is_open(&greedy[1]), "the least recently used one of the same /64 is evicted");
        for n in 0..MAX_CONNECTIONS - MAX_PER_HOST {
            admit(&format!("192.0.2.{}", n / 2));
        }
        assert_eq!(lock(&connections.0).len(), MAX_CONNECTIONS);
        let late = admit("::ffff:198.51.100.1");
        assert!(is_open(&late) && !is_open(&greedy[2]), "the host with the most connections loses one");
        assert!(is_open(&greedy[3]));
        connections.remove(&late);
        assert_eq!(lock(&connections.0).len(), MAX_CONNECTIONS - 1);
    }
}
