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
use crate::config::Config;
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
struct SizedPool {
    size: usize,
    pool: Pool,
}

/// A change of size in progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    None,
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
    change: Change,
    /// Size requested by a peer.
    requested: Option<usize>,
    /// Memory of the current size, unless that is the configured one.
    pool: Option<SizedPool>,
    /// Memory of earlier sizes, still in use.
    retired: Vec<SizedPool>,
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
            change: Change::None,
            requested: None,
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
        self.change != Change::None || self.requested.is_some() || !self.retired.is_empty()
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

    /// Collects buffers that other threads have returned.
    pub(super) fn drain_remote(&self) {
        self.pools().for_each(|pool| _ = pool.drain_remote());
    }

    /// Counts posted receives.
    pub(super) fn count_posted(&mut self, count: usize) {
        self.posted += count as u64;
    }
}

/// Receive sizes that peers may request.
pub(super) fn for_peers(config: &Config) -> Option<(usize, usize)> {
    config.debug.resize_on_request.then(|| (LEAST, config.longest_message()))
}

/// Changes the receive size of all connections while calls run.
///
/// # Errors
/// Nothing has changed.
pub(super) fn change<F: Fabric>(cx: &mut Context<F>, bytes: usize) -> Result<(), ResizeCause> {
    let most = cx.config.longest_message();
    if !(LEAST..=most).contains(&bytes) || !bytes.is_multiple_of(4) {
        return Err(ResizeCause::Bounds { wanted: bytes, most });
    }
    let announced = cx.sizing.announced;
    match cx.sizing.change {
        Change::None => {}
        Change::Growing(_) => return Err(ResizeCause::Busy { to: cx.sizing.filled }),
        Change::Shrinking => return Err(ResizeCause::Busy { to: announced }),
    }
    if bytes > announced {
        switch_to(cx, bytes)?;
        cx.fabric.fence_receives();
        cx.sizing.change = Change::Growing(cx.sizing.posted);
    } else if bytes < announced {
        (cx.sizing.announced, cx.sizing.change) = (bytes, Change::Shrinking);
        announce(cx, false);
    }
    cx.schedule.control_now();
    Ok(())
}

/// Records a change that a peer requested, if allowed; it starts when possible.
pub(super) fn request<F: Fabric>(cx: &mut Context<F>, bytes: usize) {
    if cx.config.debug.resize_on_request {
        cx.sizing.requested = Some(bytes);
    }
}

/// Continues a change of size, in the control plane: no connection is lent then.
pub(super) fn advance<F: Fabric>(cx: &mut Context<F>) {
    if !cx.sizing.is_busy() {
        return;
    }
    let consumed = cx.sizing.posted - cx.receives.posted() as u64;
    match cx.sizing.change {
        Change::Growing(until) if consumed >= until => {
            (cx.sizing.announced, cx.sizing.change) = (cx.sizing.filled, Change::None);
            announce(cx, true);
        }
        Change::Shrinking => shrink(cx),
        _ => {}
    }
    if cx.sizing.change == Change::None
        && let Some(bytes) = cx.sizing.requested.take()
    {
        if let Err(error) = change(cx, bytes) {
            let line = format_args!("a peer asks for Receives of {bytes} bytes: {error}");
            cx.warn("unavailable sizes of Receives", line);
        }
        if cx.sizing.change == Change::None {
            announce(cx, true);
        }
    }
    // Memory of sizes that are not used any more.
    cx.sizing.drain_remote();
    let is_unused = |sized: &mut SizedPool| sized.pool.stats().classes.iter().all(|class| class.outstanding == 0);
    let unused: Vec<_> = cx.sizing.retired.extract_if(.., is_unused).collect();
    for sized in unused {
        if let Err(error) = cx.fabric.deregister(sized.pool.arena().id()) {
            let line = format_args!("memory of receives of {} bytes: {error}", sized.size);
            cx.error("memory that is not given back", line);
        }
    }
}

/// Posts smaller receives once no peer relies on larger ones.
fn shrink<F: Fabric>(cx: &mut Context<F>) {
    let size = cx.sizing.announced;
    if !cx.conns.iter_mut().all(|conn| conn.proto.changes().promised_receive() <= size) {
        return;
    }
    if let Err(error) = switch_to(cx, size) {
        let line = format_args!("receives of {size} bytes: {error}; larger receives stay");
        cx.warn("unavailable sizes of Receives", line);
    }
    cx.sizing.change = Change::None;
    announce(cx, true);
}

/// Switches to receives of this size, and drops those not posted yet.
fn switch_to<F: Fabric>(cx: &mut Context<F>, bytes: usize) -> Result<(), ResizeCause> {
    let sizing = &mut cx.sizing;
    let next = match sizing.retired.iter().position(|sized| sized.size == bytes) {
        _ if bytes == cx.config.wire.receive_size => None,
        Some(at) => Some(sizing.retired.swap_remove(at)),
        None => {
            let count = cx.config.memory.receives + cx.config.memory.message_buffers;
            let classes = vec![Class { size: bytes, count }];
            let pool = Pool::new(&PoolConfig { classes, arena: cx.config.arena() })?;
            cx.fabric.register(pool.arena(), Access::LOCAL)?;
            Some(SizedPool { size: bytes, pool })
        }
    };
    // Buffers of another size are freed instead of posted.
    sizing.capacity = match &next {
        Some(sized) => sized.pool.stats().classes.first().map_or(bytes, |class| class.size),
        None => sizing.configured_capacity,
    };
    let before = std::mem::replace(&mut sizing.pool, next);
    sizing.retired.extend(before);
    sizing.filled = bytes;
    cx.receives.drop_waiting();
    Ok(())
}

/// Announces the size to each peer; `settled`: as the answer to its request.
fn announce<F: Fabric>(cx: &mut Context<F>, settled: bool) {
    let size = cx.sizing.announced;
    for conn in cx.conns.iter_mut() {
        // A peer without the operations keeps its first promise.
        let _ = conn.proto.changes().announce(Characteristic::ReceiveSize(size as u32), settled);
        conn.refresh();
        cx.ready.add(conn);
    }
}
