//! Connections of peers and their ends, told to the upper layer, so that it can give back what it keeps for a
//! peer: leases, locks, open files.

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use super::close_reason::CloseReason;
use super::conn::Conn;
use crate::fabric::QpId;
use crate::handoff::panics::caught;
use crate::service::Caller;

/// A peer that has a connection to a server.
#[derive(Clone, Debug)]
pub struct Peer {
    caller: Caller,
    host: Option<IpAddr>,
    identity: Option<Arc<str>>,
}

impl Peer {
    fn of(shard: u32, conn: &Conn) -> Self {
        Self { caller: Caller { shard, qp: conn.origin() }, host: conn.host(), identity: conn.peer().cloned() }
    }

    /// Its connection, as its calls have it ([`ServerCall::caller`](crate::ServerCall::caller)).
    pub fn caller(&self) -> Caller {
        self.caller
    }

    /// Where it comes from; `None` on a fabric without addresses.
    pub fn host(&self) -> Option<IpAddr> {
        self.host
    }

    /// The name that it has proved ([`Config::host_auth`](crate::Config::host_auth)), if it has by now: the
    /// proof is in its first messages, behind the connection.
    pub fn identity(&self) -> Option<&str> {
        self.identity.as_deref()
    }
}

/// What happened to a connection of a peer.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum PeerEvent<'a> {
    /// It is there: the peer may call. Told before the first call of its [`Caller`] runs.
    Established(&'a Peer),
    /// It is over, and why. Told once for each that was established, when no handler runs for its [`Caller`]
    /// any more, or will. Calls that handlers have kept, to answer them later, are with whoever has them.
    Ended(&'a Peer, &'a CloseReason),
}

/// What is called with each [`PeerEvent`] of a server, on the thread of the shard that has the connection: it
/// must not block. Panics are caught, and logged.
#[derive(Clone)]
pub struct PeerHook(Arc<dyn Fn(PeerEvent<'_>) + Send + Sync>);

impl PeerHook {
    /// Calls this.
    pub fn new(hook: impl Fn(PeerEvent<'_>) + Send + Sync + 'static) -> Self {
        Self(Arc::new(hook))
    }

    fn tell(&self, event: PeerEvent<'_>) {
        if let Err(panic) = caught(|| (self.0)(event)) {
            log::error!("what is told of connections has panicked: {event:?}: {panic}");
        }
    }
}

impl fmt::Debug for PeerHook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PeerHook")
    }
}

/// Who is told, and of what not yet.
#[derive(Debug, Default)]
pub(super) struct Peers {
    hook: Option<PeerHook>,
    shard: u32,
    /// Those that have ended with calls at workers.
    leaving: Vec<Leaving>,
}

#[derive(Debug)]
struct Leaving {
    peer: Peer,
    reason: CloseReason,
    /// Calls that have not come home.
    calls: u32,
}

impl Peers {
    /// This is told from now on of the connections of a server's shard.
    pub(super) fn tell(&mut self, hook: PeerHook, shard: u32) {
        (self.hook, self.shard) = (Some(hook), shard);
    }

    /// A connection of a peer may be used, or is used already.
    pub(super) fn established(&self, conn: &mut Conn) {
        let Some(hook) = &self.hook else { return };
        if conn.accepted().is_some() && conn.set_told() {
            hook.tell(PeerEvent::Established(&Peer::of(self.shard, conn)));
        }
    }

    /// A connection is over, for this reason. Workers may still have calls of it.
    pub(super) fn ended(&mut self, conn: &Conn, reason: &CloseReason) {
        let Some(hook) = &self.hook else { return };
        if !conn.was_told() {
            return;
        }
        let (peer, calls) = (Peer::of(self.shard, conn), conn.served.calls_at_workers());
        if calls == 0 {
            hook.tell(PeerEvent::Ended(&peer, reason));
        } else {
            self.leaving.push(Leaving { peer, reason: reason.clone(), calls });
        }
    }

    /// A call of a connection that is over has come home from a worker.
    #[cold]
    pub(super) fn came_home(&mut self, qp: QpId) {
        let Some(at) = self.leaving.iter().position(|one| one.peer.caller.qp == qp) else { return };
        self.leaving[at].calls -= 1;
        if self.leaving[at].calls == 0 {
            let Leaving { peer, reason, .. } = self.leaving.swap_remove(at);
            if let Some(hook) = &self.hook {
                hook.tell(PeerEvent::Ended(&peer, &reason));
            }
        }
    }
}
