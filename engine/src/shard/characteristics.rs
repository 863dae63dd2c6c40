//! Changes of characteristics while calls run (xcharext-02), by peers and by this end.
//!
//! The shared receive queue serves every connection, so every Receive in it must hold the longest message that some
//! peer may still send (§3.1):
//! - *growing*: the shard posts larger Receives. Messages consume the older ones first. When the last older one is
//!   consumed, the shard announces the new size to the peers.
//! - *shrinking*: the shard announces the new size to the peers. When every peer is known to have received it, the
//!   shard posts smaller Receives.
//!
//! A peer of version 1, or without these operations, relies on the first size that was announced to it: it blocks
//! shrinking until it disconnects, and does not use larger Receives.

use std::collections::VecDeque;
use std::mem;

use rpcrdma_mempool::{Class, MemError, Pool, PoolConfig};

use super::connection::{Conn, ConnRef};
use super::context::ShardContext;
use super::memory::SizedPool;
use crate::config::Config;
use crate::fabric::{Access, Fabric, FabricError};
use crate::proto::exchange::{Characteristic, CharacteristicEvent};

/// Smallest Receives of version 2: a new peer may send messages of this size before negotiation (§4.3.2).
pub(super) const MIN_RECEIVE_SIZE: usize = 4096;
/// Events kept for the application.
const MAX_EVENTS: usize = 256;

/// Error of a change of the receive size.
///
/// The text names the cause.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub struct ResizeError(#[from] ResizeCause);

impl ResizeError {
    /// Whether an earlier change is still in progress.
    ///
    /// A later attempt may then succeed.
    pub fn is_busy(&self) -> bool {
        matches!(self.0, ResizeCause::Busy { .. })
    }
}

/// The cause within a [`ResizeError`].
#[derive(Debug, thiserror::Error)]
pub(crate) enum ResizeCause {
    /// The size is out of range.
    #[error("invalid receive size {wanted}: expected a multiple of 4 from 4096 to {max} (debug.max_receive_size)")]
    Bounds { wanted: usize, max: usize },
    /// An earlier change, to this size, is still in progress.
    #[error("receive size is already changing to {to} bytes")]
    Busy { to: usize },
    /// There is no memory for the Receives.
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
    /// Waits until the number of Receives consumed since the start reaches this value: no smaller Receive is left then.
    Growing(u64),
    /// Waits until all peers have received the smaller size.
    Shrinking,
}

/// Changes of characteristics.
#[derive(Debug, Default)]
pub(super) struct CharacteristicChanges {
    /// Events of peers' characteristics, for the application.
    pub(super) events: VecDeque<(ConnRef, CharacteristicEvent)>,
    /// Progress of the last change of the receive size.
    progress: Progress,
    /// Receive size requested by a peer.
    requested: Option<usize>,
}

impl CharacteristicChanges {
    /// Records an event of a connection. A receive size that the peer requests is granted later, if the configuration
    /// allows it.
    pub(super) fn add(&mut self, config: &Config, conn: &Conn, event: CharacteristicEvent) {
        if let CharacteristicEvent::Requested(wanted) = &event
            && config.debug.resize_on_request
        {
            for value in wanted {
                if let Characteristic::ReceiveSize(bytes) = value {
                    self.requested = Some(*bytes as usize);
                }
            }
        }
        self.push_event((ConnRef(conn.origin()), event));
    }

    /// Adds an event; at the limit, drops the oldest one.
    fn push_event(&mut self, change: (ConnRef, CharacteristicEvent)) {
        if self.events.len() == MAX_EVENTS {
            self.events.pop_front();
        }
        self.events.push_back(change);
    }

    /// Applies the terms of a connection, which its last message may have changed: announces the receive size to the
    /// peer, and updates the state that depends on the terms.
    pub(super) fn apply_terms<F: Fabric>(&self, cx: &mut ShardContext<F>, conn: &mut Conn) {
        // The peer may have an earlier value, sent before changes were possible.
        let size = Characteristic::ReceiveSize(cx.memory.sizes.announced as u32);
        let _ = conn.proto.changes().announce(size, false);
        if self.is_busy(cx) {
            cx.schedule.control_now();
        }
        conn.refresh();
    }

    /// Whether a change of the receive size has work for the control plane.
    fn is_busy<F: Fabric>(&self, cx: &ShardContext<F>) -> bool {
        self.progress != Progress::Done || self.requested.is_some() || !cx.memory.sizes.retired.is_empty()
    }

    /// Changes the receive size of all connections while calls run.
    ///
    /// # Errors
    /// The size is invalid, an earlier change is in progress, or memory is missing. Nothing has changed.
    pub(super) fn resize<F: Fabric>(&mut self, cx: &mut ShardContext<F>, bytes: usize) -> Result<(), ResizeCause> {
        let (max, announced) = (cx.config.longest_message(), cx.memory.sizes.announced);
        if !(MIN_RECEIVE_SIZE..=max).contains(&bytes) || !bytes.is_multiple_of(4) {
            return Err(ResizeCause::Bounds { wanted: bytes, max });
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

    /// Continues a change of size, in the control plane, where no connection is lent.
    pub(super) fn control<F: Fabric>(&mut self, cx: &mut ShardContext<F>) {
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
                let line =
                    format_args!("cannot change the receive size to {bytes} bytes, as a peer requested: {error}");
                cx.warn("failed changes of the receive size", line);
            }
            if self.progress == Progress::Done {
                announce(cx, true);
            }
        }
        // Frees the memory of sizes that are no longer in use.
        let is_unused = |sized: &mut SizedPool| {
            sized.pool.drain_remote();
            sized.pool.stats().classes.iter().all(|class| class.outstanding == 0)
        };
        let unused: Vec<_> = cx.memory.sizes.retired.extract_if(.., is_unused).collect();
        for sized in unused {
            if let Err(error) = cx.fabric.deregister(sized.pool.arena().id()) {
                let line = format_args!("memory of Receives of {} bytes cannot be deregistered: {error}", sized.size);
                cx.error("failures to deregister memory", line);
            }
        }
    }

    /// Posts smaller receives once no peer relies on larger ones.
    fn shrink<F: Fabric>(&mut self, cx: &mut ShardContext<F>) {
        let size = cx.memory.sizes.announced;
        if !cx.conns.iter_mut().all(|conn| conn.proto.changes().guaranteed_receive_size() <= size) {
            return;
        }
        if let Err(error) = switch_to(cx, size) {
            let line =
                format_args!("cannot change the receive size to {size} bytes: {error}; larger Receives stay in use");
            cx.warn("failed changes of the receive size", line);
        }
        self.progress = Progress::Done;
        announce(cx, true);
    }
}

/// Posts Receives of this size from now on, and drops the other Receives that are not posted yet.
fn switch_to<F: Fabric>(cx: &mut ShardContext<F>, bytes: usize) -> Result<(), ResizeCause> {
    let sizes = &mut cx.memory.sizes;
    let next = if bytes == cx.config.wire.receive_size {
        None
    } else if let Some(at) = sizes.retired.iter().position(|sized| sized.size == bytes) {
        Some(sizes.retired.swap_remove(at))
    } else {
        let count = cx.config.memory.receives + cx.config.memory.message_buffers;
        let classes = vec![Class { size: bytes, count }];
        let pool = Pool::new(&PoolConfig { classes, arena: cx.config.arena() })?;
        cx.fabric.register(pool.arena(), Access::LOCAL)?;
        Some(SizedPool { size: bytes, pool })
    };
    // Buffers of another capacity will be freed instead of posted.
    sizes.capacity = match &next {
        Some(sized) => sized.pool.stats().classes.first().map_or(bytes, |class| class.size),
        None => sizes.configured_capacity,
    };
    sizes.retired.extend(mem::replace(&mut sizes.current, next));
    sizes.filled = bytes;
    cx.memory.receives.drop_waiting();
    Ok(())
}

/// Announces the size to each peer; `settled` marks it as the answer to a pending request.
fn announce<F: Fabric>(cx: &mut ShardContext<F>, settled: bool) {
    let size = cx.memory.sizes.announced;
    for conn in cx.conns.iter_mut() {
        // The announcement fails for a peer without these operations, which relies on the first size.
        let _ = conn.proto.changes().announce(Characteristic::ReceiveSize(size as u32), settled);
        conn.refresh();
        cx.ready.add(conn);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_events_beyond_the_limit_are_dropped() {
        let mut changes = CharacteristicChanges::default();
        for bytes in 0..=MAX_EVENTS as u32 {
            changes.push_event((ConnRef::NONE, CharacteristicEvent::Peer(Characteristic::ReceiveSize(bytes))));
        }
        let first = CharacteristicEvent::Peer(Characteristic::ReceiveSize(1));
        assert_eq!((changes.events.len(), changes.events.front().map(|(_, event)| event)), (MAX_EVENTS, Some(&first)));
    }
}
