//! Receives of another size, while calls run (xcharext-02 §3.1).
//!
//! The shared receive queue serves every connection, so every Receive in it must be as large as any peer may
//! rely on:
//! - *growing*: larger Receives are posted from now on. The older ones are taken first, as messages arrive; when the
//!   last of them is gone, the peers are told.
//! - *shrinking*: the peers are told. When each is known to have read that, smaller Receives are posted.
//!
//! A peer that cannot be told, because it is of version 1 or does not know the operations, keeps what it was
//! promised when it connected: it holds shrinking back until it is gone, and makes no use of growing.

use rpcrdma_mempool::{Class, MemError, Pool, PoolConfig};

use super::context::Context;
use crate::fabric::{Access, Fabric, FabricError};

/// Smallest Receives that version 2 has without a word about it (its §4.3.2): nobody can be sure that a peer
/// who is new sends less.
const LEAST: usize = 4096;
/// Why the size of Receives does not change.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ResizeError {
    /// It is not configured.
    #[error(
        "Receives of {wanted} bytes: 4096 to {most} can be had, a multiple of 4; `wire.max_receive_size` bounds it"
    )]
    Bounds {
        /// The size.
        wanted: usize,
        /// The largest.
        most: usize,
    },
    /// An earlier change is not over.
    #[error("the size of Receives is changing to {to} bytes")]
    Busy {
        /// To this.
        to: usize,
    },
    /// No memory for them.
    #[error(transparent)]
    Memory(#[from] MemError),
    /// The device does not take the memory.
    #[error(transparent)]
    Fabric(#[from] FabricError),
    /// The shard has stopped.
    #[error("the shard has stopped")]
    Stopped,
}

/// Receives of one size, if that is not the configured one.
#[derive(Debug)]
struct Sized {
    size: usize,
    pool: Pool,
}

/// Where a change is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Progress {
    Still,
    /// Older Receives are gone when so many have been taken.
    Growing(u64),
    /// Peers are to read that they are told less.
    Shrinking,
}

/// The sizes of a shard's Receives.
#[derive(Debug)]
pub(super) struct Sizing {
    /// No Receive is smaller, and peers that connect are told so.
    announced: usize,
    /// What is posted from now on.
    filled: usize,
    stage: Progress,
    /// A peer asks for this.
    asked: Option<usize>,
    /// Memory of the size that is posted now, unless that is the configured one.
    pool: Option<Sized>,
    /// Memory of earlier sizes that is not home yet.
    retired: Vec<Sized>,
    /// Receives posted since the start.
    posted: u64,
    /// Bytes of the buffer of a Receive that is posted now, and of one of the configured size.
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

    /// What peers that connect are told.
    pub(super) fn announced(&self) -> usize {
        self.announced
    }

    /// What is posted from now on.
    pub(super) fn filled(&self) -> usize {
        self.filled
    }

    /// Bytes of the buffer of a Receive that is posted now.
    #[inline]
    pub(super) fn capacity(&self) -> usize {
        self.capacity
    }

    /// Bytes of the buffer of a Receive of the configured size: longer ones have other uses, too.
    #[inline]
    pub(super) fn configured_capacity(&self) -> usize {
        self.configured_capacity
    }

    /// Something of it is to be looked at now and then.
    pub(super) fn is_busy(&self) -> bool {
        self.stage != Progress::Still || self.asked.is_some() || !self.retired.is_empty()
    }

    /// Takes in what came home.
    pub(super) fn drain_remote(&self) {
        for sized in self.pool.iter().chain(&self.retired) {
            sized.pool.drain_remote();
        }
    }

    /// Where buffers for Receives come from, `usual` for those of the configured size, and bytes of each.
    #[inline]
    pub(super) fn pool_of_receives<'a>(&'a self, usual: &'a Pool) -> (&'a Pool, usize) {
        self.pool.as_ref().map_or((usual, self.filled), |sized| (&sized.pool, sized.size))
    }

    /// The pools of other than the configured size.
    pub(super) fn pools(&self) -> impl Iterator<Item = &Pool> {
        self.pool.iter().chain(&self.retired).map(|sized| &sized.pool)
    }

    /// So many Receives were posted.
    pub(super) fn posted(&mut self, count: usize) {
        self.posted += count as u64;
    }
}

impl<F: Fabric> Context<F> {
    /// Changes the size of the shard's Receives, for all of its connections, while calls run.
    ///
    /// # Errors
    /// Nothing has changed.
    pub(super) fn change_receive_size(&mut self, bytes: usize) -> Result<(), ResizeError> {
        let most = self.config.wire.longest_message();
        if !(LEAST..=most).contains(&bytes) || !bytes.is_multiple_of(4) {
            return Err(ResizeError::Bounds { wanted: bytes, most });
        }
        if self.sizing.stage != Progress::Still {
            let shrinking = self.sizing.stage == Progress::Shrinking;
            let to = if shrinking { self.sizing.announced } else { self.sizing.filled };
            return Err(ResizeError::Busy { to });
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

    /// Receives of this size from now on. Those that wait to be posted are dropped.
    fn post_from_now_on(&mut self, bytes: usize) -> Result<(), ResizeError> {
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
        // What is of another size goes home instead of being posted again.
        self.sizing.capacity = match &self.sizing.pool {
            Some(sized) => sized.pool.stats().classes.first().map_or(bytes, |class| class.size),
            None => self.sizing.configured_capacity,
        };
        Ok(())
    }

    /// Tells each peer what it is to know; `settled` if that is all that comes of what it may have asked for.
    fn announce_sizes(&mut self, settled: bool) {
        let size = self.sizing.announced;
        for conn in self.conns.iter_mut() {
            // A peer that cannot be told keeps to what it was promised.
            let _ = match settled {
                true => conn.proto.settle_receive_size(size),
                false => conn.proto.update_receive_size(size),
            };
            conn.refresh();
            self.ready.add(conn);
        }
    }

    /// Changes to a size that a peer asks for, when it is its turn.
    pub(super) fn ask_for_size(&mut self, bytes: usize) {
        if self.config.wire.resize_on_request {
            self.sizing.asked = Some(bytes);
        }
    }

    /// Goes on with a change of sizes, as the control plane is looked at: no connection is out of the table
    /// then.
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

    /// Posts smaller Receives, if nobody relies on larger ones any more.
    fn shrink(&mut self) {
        let size = self.sizing.announced;
        if !self.conns.iter_mut().all(|conn| conn.proto.promised_receive() <= size) {
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

    /// Gives back the memory of sizes that are no longer used.
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

    /// Sizes of Receives that peers may ask for.
    pub(super) fn sizes_for_peers(&self) -> Option<(usize, usize)> {
        self.config.wire.resize_on_request.then(|| (LEAST, self.config.wire.longest_message()))
    }
}
