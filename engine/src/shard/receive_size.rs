//! Resizing of receives while calls run (xcharext-02 §3.1).
//!
//! The shared receive queue serves every connection, so every receive in it must be as large as any peer may rely on:
//! - *growing*: the shard posts larger receives. Messages consume the older ones first. When the last of them is gone,
//!   the shard announces the size to the peers.
//! - *shrinking*: the shard announces the size to the peers. When each is known to have read it, the shard posts
//!   smaller receives.
//!
//! A peer of version 1, or without these operations, keeps its first promise: it blocks shrinking until it disconnects,
//! and does not use growing.

use rpcrdma_mempool::{Class, MemError, Pool, PoolConfig};

use super::context::Context;
use crate::fabric::{Access, Fabric, FabricError};
use crate::proto::exchange::Characteristic;

/// Smallest receives of version 2 without negotiation (its §4.3.2): a new peer may send messages of this size.
const LEAST: usize = 4096;

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
    Bounds {
        /// Requested size.
        wanted: usize,
        /// Largest size.
        most: usize,
    },
    /// An earlier change is still in progress.
    #[error("receive size is changing to {to} bytes")]
    Busy {
        /// Its size.
        to: usize,
    },
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

/// Receives of one size other than the configured one.
#[derive(Debug)]
struct Sized {
    size: usize,
    pool: Pool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Progress {
    Still,
    /// The older receives are used up when this many receives have been consumed.
    Growing(u64),
    /// Peers have to read the smaller limit.
    Shrinking,
}

/// Sizes of a shard's receives.
#[derive(Debug)]
pub(super) struct Sizing {
    /// Lower bound of all receives, announced to new peers.
    announced: usize,
    /// Size of new receives.
    filled: usize,
    stage: Progress,
    /// Size requested by a peer.
    asked: Option<usize>,
    /// Memory of the current size, unless that is the configured one.
    pool: Option<Sized>,
    /// Memory of earlier sizes, still in use.
    retired: Vec<Sized>,
    /// Receives posted since the start.
    posted: u64,
    /// Buffer bytes of a new receive, and of one of the configured size.
    capacity: usize,
    configured_capacity: usize,
}

impl Sizing {
    /// Receives of `size` bytes, in buffers that have `capacity`.
    pub(super) fn new(size: usize, capacity: usize) -> Self {
        Self {
            announced: size,
            filled: size,
            stage: Progress::Still,
            asked: None,
            pool: None,
            retired: Vec::new(),
            posted: 0,
            capacity,
            configured_capacity: capacity,
        }
    }

    /// Size announced to new peers.
    pub(super) fn announced(&self) -> usize {
        self.announced
    }

    /// Size of new receives.
    pub(super) fn filled(&self) -> usize {
        self.filled
    }

    /// Buffer bytes of a new receive.
    #[inline]
    pub(super) fn capacity(&self) -> usize {
        self.capacity
    }

    /// Buffer bytes of a receive of the configured size: longer buffers have other uses, too.
    #[inline]
    pub(super) fn configured_capacity(&self) -> usize {
        self.configured_capacity
    }

    /// Whether the control plane has work with it.
    pub(super) fn is_busy(&self) -> bool {
        self.stage != Progress::Still || self.asked.is_some() || !self.retired.is_empty()
    }

    /// Collects returned buffers.
    pub(super) fn drain_remote(&self) {
        for sized in self.pool.iter().chain(&self.retired) {
            sized.pool.drain_remote();
        }
    }

    /// Pool of new receives, and their bytes. `usual` is the pool for the configured size.
    #[inline]
    pub(super) fn pool_of_receives<'a>(&'a self, usual: &'a Pool) -> (&'a Pool, usize) {
        self.pool.as_ref().map_or((usual, self.filled), |sized| (&sized.pool, sized.size))
    }

    /// Pools of sizes other than the configured one.
    pub(super) fn pools(&self) -> impl Iterator<Item = &Pool> {
        self.pool.iter().chain(&self.retired).map(|sized| &sized.pool)
    }

    pub(super) fn posted(&mut self, count: usize) {
        self.posted += count as u64;
    }
}

impl<F: Fabric> Context<F> {
    /// Changes the receive size of all connections while calls run.
    ///
    /// # Errors
    /// Nothing has changed.
    pub(super) fn change_receive_size(&mut self, bytes: usize) -> Result<(), ResizeCause> {
        let most = self.config.longest_message();
        if !(LEAST..=most).contains(&bytes) || !bytes.is_multiple_of(4) {
            return Err(ResizeCause::Bounds { wanted: bytes, most });
        }
        if self.sizing.stage != Progress::Still {
            let shrinking = self.sizing.stage == Progress::Shrinking;
            let to = if shrinking { self.sizing.announced } else { self.sizing.filled };
            return Err(ResizeCause::Busy { to });
        }
        if bytes > self.sizing.announced {
            self.post_from_now_on(bytes)?;
            self.fabric.fence_receives();
            self.sizing.stage = Progress::Growing(self.sizing.posted);
        } else if bytes < self.sizing.announced {
            self.sizing.announced = bytes;
            self.sizing.stage = Progress::Shrinking;
            self.announce_sizes(false);
        }
        self.schedule.control_now();
        Ok(())
    }

    /// Switches to receives of this size, and drops those not posted yet.
    fn post_from_now_on(&mut self, bytes: usize) -> Result<(), ResizeCause> {
        let again = self.sizing.retired.iter().position(|sized| sized.size == bytes);
        let next = match again {
            _ if bytes == self.config.wire.receive_size => None,
            Some(at) => Some(self.sizing.retired.swap_remove(at)),
            None => {
                let count = self.config.memory.receives + self.config.memory.message_buffers;
                let classes = vec![Class { size: bytes, count }];
                let pool = Pool::new(&PoolConfig { classes, arena: self.config.arena() })?;
                self.fabric.register(pool.arena(), Access::LOCAL)?;
                Some(Sized { size: bytes, pool })
            }
        };
        let before = std::mem::replace(&mut self.sizing.pool, next);
        self.sizing.retired.extend(before);
        self.sizing.filled = bytes;
        self.receives.drop_waiting();
        // Buffers of another size are freed instead of posted.
        self.sizing.capacity = match &self.sizing.pool {
            Some(sized) => sized.pool.stats().classes.first().map_or(bytes, |class| class.size),
            None => self.sizing.configured_capacity,
        };
        Ok(())
    }

    /// Announces the size to each peer; `settled`: as the answer to its request.
    fn announce_sizes(&mut self, settled: bool) {
        let size = self.sizing.announced;
        for conn in self.conns.iter_mut() {
            // A peer without the operations keeps its first promise.
            let _ = conn.proto.changes().announce(Characteristic::ReceiveSize(size as u32), settled);
            conn.refresh();
            self.ready.add(conn);
        }
    }

    /// Records a change that a peer requested, if allowed; it starts when possible.
    pub(super) fn ask_for_size(&mut self, bytes: usize) {
        if self.config.debug.resize_on_request {
            self.sizing.asked = Some(bytes);
        }
    }

    /// Continues a change of size, in the control plane: no connection is lent then.
    pub(super) fn resize(&mut self) {
        if !self.sizing.is_busy() {
            return;
        }
        let taken = self.sizing.posted - self.receives.posted() as u64;
        match self.sizing.stage {
            Progress::Growing(until) if taken >= until => {
                self.sizing.announced = self.sizing.filled;
                self.sizing.stage = Progress::Still;
                self.announce_sizes(true);
            }
            Progress::Shrinking => self.shrink(),
            _ => {}
        }
        if self.sizing.stage == Progress::Still
            && let Some(bytes) = self.sizing.asked.take()
        {
            if let Err(error) = self.change_receive_size(bytes) {
                self.warn(
                    "sizes of Receives that cannot be had",
                    format_args!("a peer asks for Receives of {bytes} bytes: {error}"),
                );
            }
            if self.sizing.stage == Progress::Still {
                self.announce_sizes(true);
            }
        }
        self.release_memory();
    }

    /// Posts smaller receives once no peer relies on larger ones.
    fn shrink(&mut self) {
        let size = self.sizing.announced;
        if !self.conns.iter_mut().all(|conn| conn.proto.changes().promised_receive() <= size) {
            return;
        }
        if let Err(error) = self.post_from_now_on(size) {
            self.warn(
                "sizes of Receives that cannot be had",
                format_args!("receives of {size} bytes: {error}; larger receives stay"),
            );
        }
        self.sizing.stage = Progress::Still;
        self.announce_sizes(true);
    }

    /// Frees the memory of unused sizes.
    fn release_memory(&mut self) {
        self.sizing.drain_remote();
        let home = |sized: &mut Sized| sized.pool.stats().classes.iter().all(|class| class.outstanding == 0);
        let unused: Vec<_> = self.sizing.retired.extract_if(.., home).collect();
        for sized in unused {
            if let Err(error) = self.fabric.deregister(sized.pool.arena().id()) {
                let line = format_args!("memory of receives of {} bytes: {error}", sized.size);
                self.error("memory that is not given back", line);
            }
        }
    }

    /// Receive sizes that peers may request.
    pub(super) fn sizes_for_peers(&self) -> Option<(usize, usize)> {
        self.config.debug.resize_on_request.then(|| (LEAST, self.config.longest_message()))
    }
}
