//! The peers of accepted connections, and reports of them to the upper layer.
//!
//! The upper layer needs these reports to release the state of a peer, such as leases, locks and open files.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Instant;

use log::Level;

use super::clock::nanoseconds;
use super::connection::close_reason::{CloseReason, LocalClose};
use crate::cross_thread::panics::catch_panic;
use crate::fabric::QpId;
use crate::fabric::host::network;
use crate::fabric::log_limit::LogLimit;
use crate::service::{Caller, ShardNumber};

/// A peer connected to a server.
#[derive(Clone, Debug)]
pub struct Peer {
    caller: Caller,
    host: Option<IpAddr>,
    identity: Option<Arc<str>>,
}

impl Peer {
    /// The peer's connection, as in [`CallInfo::caller`](crate::service::CallInfo::caller).
    pub fn caller(&self) -> Caller {
        self.caller
    }

    /// Address of the peer; `None` on fabrics without addresses.
    pub fn host(&self) -> Option<IpAddr> {
        self.host
    }

    /// Authenticated name of the peer, if it has authenticated by now.
    ///
    /// See [`wire.host_auth`](crate::config::WireConfig::host_auth). The first messages of a connection authenticate
    /// it.
    pub fn identity(&self) -> Option<&str> {
        self.identity.as_deref()
    }
}

/// Event of a peer's connection.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum PeerEvent<'a> {
    /// The connection is established.
    ///
    /// Reported before the first call of its [`Caller`] runs.
    Established(&'a Peer),
    /// The connection has closed, with the reason.
    ///
    /// Reported exactly once for each established connection, after the last handler of its [`Caller`]; also at the end
    /// of the server. Deferred calls may still exist.
    Ended(&'a Peer, &'a CloseReason),
}

/// Called with each [`PeerEvent`] of a server; must not block.
///
/// Its panics are caught and logged.
///
/// It runs on the thread of the connection's shard. If that shard has stopped while workers ran calls of the
/// connection, the last worker's thread reports the close.
#[derive(Clone)]
pub struct PeerHook(Arc<Hook>);

struct Hook {
    hook: Box<dyn Fn(PeerEvent<'_>) + Send + Sync>,
    /// Limit of log lines, because peers may connect often.
    log: Mutex<LogLimit>,
    began: Instant,
}

impl PeerHook {
    /// Creates a hook that calls a closure.
    pub fn new(hook: impl Fn(PeerEvent<'_>) + Send + Sync + 'static) -> Self {
        let log = Mutex::new(LogLimit::new(module_path!()));
        Self(Arc::new(Hook { hook: Box::new(hook), log, began: Instant::now() }))
    }

    fn call(&self, event: PeerEvent<'_>) {
        if let Err(panic) = catch_panic(|| (self.0.hook)(event)) {
            let mut log = self.0.log.lock().unwrap_or_else(PoisonError::into_inner);
            let line = format_args!("peer hook panicked: {event:?}: {panic}");
            log.log(nanoseconds(self.0.began.elapsed()), Level::Error, "panics of the peer hook", line);
        }
    }
}

impl fmt::Debug for PeerHook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PeerHook")
    }
}

/// Reports events of accepted connections to the peer hook, if there is one.
#[derive(Debug, Default)]
pub(super) struct PeerReporter {
    hook: Option<PeerHook>,
    shard: ShardNumber,
}

impl PeerReporter {
    /// Reports the connections of a server's shard to this hook.
    pub(super) fn set_hook(&mut self, hook: PeerHook, shard: ShardNumber) {
        (self.hook, self.shard) = (Some(hook), shard);
    }

    /// Reports an established connection; returns the guard that reports its close, if there is a hook.
    pub(super) fn established(
        &self,
        qp: QpId,
        host: Option<IpAddr>,
        identity: Option<Arc<str>>,
    ) -> Option<CloseReport> {
        let hook = self.hook.clone()?;
        let peer = Peer { caller: Caller { shard: self.shard, qp }, host, identity };
        hook.call(PeerEvent::Established(&peer));
        Some(CloseReport(Arc::new(PendingClose { hook, peer, end: OnceLock::new() })))
    }
}

/// Guard that reports a [`PeerEvent::Ended`] to the upper layer. The connection has one, and so has each of its calls
/// with a worker. The last drop reports the close, so that it is never missed.
#[derive(Clone, Debug)]
pub(super) struct CloseReport(Arc<PendingClose>);

#[derive(Debug)]
struct PendingClose {
    hook: PeerHook,
    peer: Peer,
    /// Authenticated name of the peer, and the close reason.
    end: OnceLock<(Option<Arc<str>>, CloseReason)>,
}

impl CloseReport {
    /// Sets the close reason. Workers may still have calls of the connection.
    pub(super) fn set_reason(self, identity: Option<Arc<str>>, reason: CloseReason) {
        // Each connection closes once.
        let _ = self.0.end.set((identity, reason));
    }
}

impl Drop for PendingClose {
    fn drop(&mut self) {
        // If a shard's thread panics, its connections are dropped without a close reason.
        let known = self.end.take();
        let (identity, reason) = known.unwrap_or_else(|| (self.peer.identity.take(), LocalClose::Stopped.into()));
        self.peer.identity = identity;
        self.hook.call(PeerEvent::Ended(&self.peer, &reason));
    }
}

/// The peer of an accepted connection.
#[derive(Clone, Debug)]
pub(super) struct PeerInfo {
    host: Box<str>,
    /// Name of the owner of the peer's quotas: its host or network or, without addresses, its process.
    pub(super) owner: Box<str>,
    /// Time of the accept, in nanoseconds.
    since: u64,
    /// Whether its first message has not arrived yet.
    pub(super) is_new: bool,
    /// Number of useful messages at the last check: those that were neither rejected nor pure grants.
    useful: u64,
    /// Time of the check that first found this number, in nanoseconds.
    last_useful: u64,
}

impl PeerInfo {
    pub(super) fn new(peer: &str, now: u64) -> Self {
        let (host, owner) = match peer.parse::<SocketAddr>() {
            Ok(at) => (at.ip().to_string().into(), network(at.ip()).to_string().into()),
            Err(_) => (peer.into(), peer.into()),
        };
        Self { host, owner, since: now, is_new: true, useful: 0, last_useful: now }
    }

    /// The peer's address without a port, or the fabric's name of the peer.
    pub(super) fn host(&self) -> &str {
        &self.host
    }

    /// Nanoseconds since the last useful message, given the current number of useful messages.
    pub(super) fn silence(&self, useful: u64, now: u64) -> u64 {
        if useful == self.useful { now.saturating_sub(self.last_useful) } else { 0 }
    }

    /// Times of the accept and of the last useful message, in nanoseconds.
    pub(super) fn times(&self) -> (u64, u64) {
        (self.since, self.last_useful)
    }

    /// Records the number of useful messages, and the time if the number changed.
    pub(super) fn record_useful(&mut self, useful: u64, now: u64) {
        if useful != self.useful {
            (self.useful, self.last_useful) = (useful, now);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;
    use std::sync::Mutex;

    use super::*;
    use crate::shard::connection::Conn;
    use crate::shard::testing::open_conn;

    /// Reported events, as text.
    #[derive(Clone, Default)]
    struct RecordedEvents(Arc<Mutex<Vec<String>>>);

    impl RecordedEvents {
        fn hook(&self) -> PeerHook {
            let events = self.clone();
            PeerHook::new(move |event| {
                let text = match event {
                    PeerEvent::Established(peer) => format!("{} established", peer.caller().qp.slot),
                    PeerEvent::Ended(peer, reason) => format!("{}: {reason}", peer.caller().qp.slot),
                };
                events.0.lock().unwrap().push(text);
            })
        }

        fn take(&self) -> Vec<String> {
            std::mem::take(&mut self.0.lock().unwrap())
        }
    }

    /// A connection of a peer, not yet reported.
    fn accepted(slot: u32) -> Box<Conn> {
        let mut conn = open_conn(slot, true);
        let at = SocketAddr::from((Ipv4Addr::LOCALHOST, 1));
        conn.set_accepted(PeerInfo::new(&at.to_string(), 0), Some(at.ip()));
        conn
    }

    fn reporter(events: &RecordedEvents) -> PeerReporter {
        let mut reporter = PeerReporter::default();
        reporter.set_hook(events.hook(), ShardNumber::default());
        reporter
    }

    #[test]
    fn each_connection_and_its_close_are_reported_once() {
        let events = RecordedEvents::default();
        let reporter = reporter(&events);
        let mut conn = accepted(3);
        conn.report_closed(&LocalClose::Requested.into());
        assert!(events.take().is_empty(), "no close is reported before the connection is established");
        conn.report_established(&reporter);
        conn.report_established(&reporter);
        assert_eq!(events.take(), ["3 established"]);
        conn.report_closed(&LocalClose::Evicted.into());
        assert_eq!(events.take(), [format!("3: {}", LocalClose::Evicted)]);
        conn.report_closed(&LocalClose::Requested.into());
        drop(conn);
        assert!(events.take().is_empty(), "the close is reported once");
    }

    #[test]
    fn a_close_is_reported_after_the_last_call_with_workers() {
        let events = RecordedEvents::default();
        let reporter = reporter(&events);
        let mut conn = accepted(3);
        conn.report_established(&reporter);
        let calls = [conn.close_report.clone(), conn.close_report.clone()];
        conn.report_closed(&LocalClose::Requested.into());
        drop((conn, reporter));
        assert_eq!(events.take(), ["3 established"], "the close is not reported while workers have calls");
        let [first, last] = calls;
        drop(first);
        assert!(events.take().is_empty());
        std::thread::spawn(move || drop(last)).join().unwrap();
        assert_eq!(events.take(), [format!("3: {}", LocalClose::Requested)]);
    }

    #[test]
    fn open_connections_are_reported_closed_when_their_shard_is_dropped() {
        let events = RecordedEvents::default();
        let reporter = reporter(&events);
        let mut conn = accepted(7);
        conn.report_established(&reporter);
        drop((conn, reporter));
        assert_eq!(events.take(), ["7 established".to_owned(), format!("7: {}", LocalClose::Stopped)]);
    }

    #[test]
    fn addresses_of_one_ipv6_network_are_one_host() {
        let owner = |peer| PeerInfo::new(peer, 0).owner;
        assert_eq!(owner("[2001:db8::1]:1"), owner("[2001:db8::2:2]:1"));
        assert_eq!(owner("[::ffff:192.0.2.1]:1"), owner("192.0.2.1:2"));
        assert_ne!(owner("192.0.2.1:1"), owner("192.0.2.2:1"));
    }

    #[test]
    fn the_port_of_a_peer_is_not_part_of_its_host() {
        let host = |peer| PeerInfo::new(peer, 0).host;
        assert_eq!(host("10.1.2.3:4711"), host("10.1.2.3:4712"));
        assert_ne!(host("10.1.2.3:4711"), host("10.1.2.4:4711"));
        assert_eq!(&*host("[fe80::1]:99"), "fe80::1");
        assert_eq!(&*host("pid 17 uid 0"), "pid 17 uid 0");
    }

    #[test]
    fn silence_counts_from_the_last_useful_message() {
        let mut peer = PeerInfo::new("x", 5);
        peer.record_useful(0, 100);
        assert_eq!(peer.last_useful, 5);
        peer.record_useful(3, 200);
        peer.record_useful(3, 300);
        assert_eq!(peer.last_useful, 200);
    }
}
