//! Changes of characteristics while calls run (xcharext-02), by peers and by this end.
//!
//! The shared receive queue serves every connection, so every receive in it must be as large as any peer may rely on
//! (§3.1):
//! - *growing*: the shard posts larger receives. Messages consume the older ones first. When the last of them is gone,
//!   the shard announces the size to the peers.
//! - *shrinking*: the shard announces the size to the peers. When each is known to have read it, the shard posts
//!   smaller receives.
//!
//! A peer of version 1, or without these operations, keeps its first promise: it blocks shrinking until it disconnects,
//! and does not use growing.

use std::collections::VecDeque;
use std::mem;

use rpcrdma_mempool::{Class, MemError, Pool, PoolConfig};

use super::connection::{Conn, ConnRef};
use super::context::Context;
use super::memory::SizedPool;
use crate::config::Config;
use crate::fabric::{Access, Fabric, FabricError};
use crate::proto::exchange::{Characteristic, Event};

/// Smallest receives of version 2 without negotiation (its §4.3.2): a new peer may send messages of this size.
pub(super) const LEAST: usize = 4096;
/// Events kept for the application.
const MOST_EVENTS: usize = 256;

/// The receive size cannot change. The text names the reason.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub struct ResizeError(#[from] ResizeCause);

impl ResizeError {
    /// Whether an earlier change is still in progress: try again later.
    pub fn is_busy(&self) -> bool {
        matches!(self.0, ResizeCause::Busy { .. })
    }
}

/// The cause within a [`ResizeError`].
#[derive(Debug, thiserror::Error)]
pub(crate) enum ResizeCause {
    /// The size is out of range.
    #[error("receives of {wanted} bytes: 4096 to {most}, a multiple of 4 (debug.max_receive_size)")]
    Bounds { wanted: usize, most: usize },
    /// An earlier change, to this size, is still in progress.
    #[error("receive size is changing to {to} bytes")]
    Busy { to: usize },
    /// No memory for the receives.
    #[error(transparent)]
    Memory(#[from] MemError),
    /// The device rejected the memory.
    #[error(transparent)]
    Fabric(#[from] FabricError),
    /// The shard has stopped.
    #[error("shard stopped")]
    Stopped,
}

/// Progress of a change of the receive size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Progress {
    #[default]
    Done,
    /// The older receives are used up when this many receives have been consumed.
    Growing(u64),
    /// Peers have to read the smaller limit.
    Shrinking,
}

/// Changes of characteristics.
#[derive(Debug, Default)]
pub(super) struct Changes {
    /// Events of peers' characteristics, for the application.
    pub(super) events: VecDeque<(ConnRef, Event)>,
    /// Progress of the last change of the receive size.
    progress: Progress,
    /// Receive size requested by a peer.
    requested: Option<usize>,
}

impl Changes {
    /// Records an event of a connection. A requested receive size, if allowed, is granted when possible.
    pub(super) fn add(&mut self, config: &Config, conn: &Conn, event: Event) {
        if let Event::Requested(wanted) = &event
            && config.debug.resize_on_request
        {
            for value in wanted {
                if let Characteristic::ReceiveSize(bytes) = value {
                    self.requested = Some(*bytes as usize);
                }
            }
        }
        self.keep((ConnRef(conn.origin()), event));
    }

    /// Adds an event; drops the oldest of too many.
    fn keep(&mut self, change: (ConnRef, Event)) {
        if self.events.len() == MOST_EVENTS {
            self.events.pop_front();
        }
        self.events.push_back(change);
    }

    /// Adopts the terms of a connection, which its last message may have changed.
    pub(super) fn adopt_terms<F: Fabric>(&self, cx: &mut Context<F>, conn: &mut Conn) {
        // The peer may have an earlier value, sent before changes were possible.
        let size = Characteristic::ReceiveSize(cx.memory.sizes.announced as u32);
        let _ = conn.proto.changes().announce(size, false);
        if self.is_busy(cx) {
            cx.schedule.control_now();
        }
        conn.refresh();
    }

    /// Whether a change of the receive size has work for the control plane.
    fn is_busy<F: Fabric>(&self, cx: &Context<F>) -> bool {
        self.progress != Progress::Done || self.requested.is_some() || !cx.memory.sizes.retired.is_empty()
    }

    /// Changes the receive size of all connections while calls run.
    ///
    /// # Errors
    /// Nothing has changed.
    pub(super) fn resize<F: Fabric>(&mut self, cx: &mut Context<F>, bytes: usize) -> Result<(), ResizeCause> {
        let (most, announced) = (cx.config.longest_message(), cx.memory.sizes.announced);
        if !(LEAST..=most).contains(&bytes) || !bytes.is_multiple_of(4) {
            return Err(ResizeCause::Bounds { wanted: bytes, most });
        }
        match self.progress {
            Progress::Done => {}
            Progress::Growing(_) => return Err(ResizeCause::Busy { to: cx.memory.sizes.filled }),
            Progress::Shrinking => return Err(ResizeCause::Busy { to: announced }),
        }
        if bytes > announced {
            switch_to(cx, bytes)?;
            cx.fabric.fence_receives();
            self.progress = Progress::Growing(cx.memory.sizes.posted);
        } else if bytes < announced {
            (cx.memory.sizes.announced, self.progress) = (bytes, Progress::Shrinking);
            announce(cx, false);
        }
        cx.schedule.control_now();
        Ok(())
    }

    /// Continues a change of size, in the control plane: no connection is lent then.
    pub(super) fn control<F: Fabric>(&mut self, cx: &mut Context<F>) {
        if !self.is_busy(cx) {
            return;
        }
        let consumed = cx.memory.sizes.posted - cx.memory.receives.posted() as u64;
        match self.progress {
            Progress::Growing(until) if consumed >= until => {
                (cx.memory.sizes.announced, self.progress) = (cx.memory.sizes.filled, Progress::Done);
                announce(cx, true);
            }
            Progress::Shrinking => self.shrink(cx),
            _ => {}
        }
        if self.progress == Progress::Done
            && let Some(bytes) = self.requested.take()
        {
            if let Err(error) = self.resize(cx, bytes) {
                let line = format_args!("a peer asks for Receives of {bytes} bytes: {error}");
                cx.warn("unavailable sizes of Receives", line);
            }
            if self.progress == Progress::Done {
                announce(cx, true);
            }
        }
        // Memory of sizes that are not used any more.
        let is_unused = |sized: &mut SizedPool| {
            sized.pool.drain_remote();
            sized.pool.stats().classes.iter().all(|class| class.outstanding == 0)
        };
        let unused: Vec<_> = cx.memory.sizes.retired.extract_if(.., is_unused).collect();
        for sized in unused {
            if let Err(error) = cx.fabric.deregister(sized.pool.arena().id()) {
                let line = format_args!("memory of receives of {} bytes: {error}", sized.size);
                cx.error("memory that is not given back", line);
            }
        }
    }

    /// Posts smaller receives once no peer relies on larger ones.
    fn shrink<F: Fabric>(&mut self, cx: &mut Context<F>) {
        let size = cx.memory.sizes.announced;
        if !cx.conns.iter_mut().all(|conn| conn.proto.changes().promised_receive() <= size) {
            return;
        }
        if let Err(error) = switch_to(cx, size) {
            let line = format_args!("receives of {size} bytes: {error}; larger receives stay");
            cx.warn("unavailable sizes of Receives", line);
        }
        self.progress = Progress::Done;
        announce(cx, true);
    }
}

/// Switches to receives of this size, and drops those not posted yet.
fn switch_to<F: Fabric>(cx: &mut Context<F>, bytes: usize) -> Result<(), ResizeCause> {
    let sizes = &mut cx.memory.sizes;
    let next = match sizes.retired.iter().position(|sized| sized.size == bytes) {
        _ if bytes == cx.config.wire.receive_size => None,
        Some(at) => Some(sizes.retired.swap_remove(at)),
        None => {
            let count = cx.config.memory.receives + cx.config.memory.message_buffers;
            let classes = vec![Class { size: bytes, count }];
            let pool = Pool::new(&PoolConfig { classes, arena: cx.config.arena() })?;
            cx.fabric.register(pool.arena(), Access::LOCAL)?;
            Some(SizedPool { size: bytes, pool })
        }
    };
    // Buffers of another size are freed instead of posted.
    sizes.capacity = match &next {
        Some(sized) => sized.pool.stats().classes.first().map_or(bytes, |class| class.size),
        None => sizes.configured_capacity,
    };
    sizes.retired.extend(mem::replace(&mut sizes.own, next));
    sizes.filled = bytes;
    cx.memory.receives.drop_waiting();
    Ok(())
}

/// Announces the size to each peer; `settled`: as the answer to its request.
fn announce<F: Fabric>(cx: &mut Context<F>, settled: bool) {
    let size = cx.memory.sizes.announced;
    for conn in cx.conns.iter_mut() {
        // A peer without the operations keeps its first promise.
        let _ = conn.proto.changes().announce(Characteristic::ReceiveSize(size as u32), settled);
        conn.refresh();
        cx.ready.add(conn);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_too_many_changes_the_oldest_go() {
        let mut changes = Changes::default();
        for bytes in 0..=MOST_EVENTS as u32 {
            changes.keep((ConnRef::NONE, Event::Peer(Characteristic::ReceiveSize(bytes))));
        }
        let first = Event::Peer(Characteristic::ReceiveSize(1));
        assert_eq!((changes.events.len(), changes.events.front().map(|(_, event)| event)), (MOST_EVENTS, Some(&first)));
    }
}
