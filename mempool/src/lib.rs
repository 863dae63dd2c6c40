//! Hugepage arenas, per-core buffer pools, and buffers whose type states their owner.
//!
//! The memory layer of an RPC-over-RDMA engine. It is independent of NICs: devices register an [`Arena`] by address.
//!
//! 1. An [`Arena`] is one sealed memfd, mapped once and prefaulted. It uses hugetlb pages where the host has them, on
//!    the configured NUMA node. Its [`ArenaReport`] states in one line the pages obtained and how to get larger ones.
//!    An arena can also be memory that the application has mapped itself ([`ExternalMemory`]).
//! 2. A [`Pool`] cuts (part of) an arena into buffers of a few size classes. It belongs to the thread that made it:
//!    allocating and freeing there uses no atomic operation and never calls the global allocator. Buffers dropped by
//!    other threads return through a lock-free list, which [`Pool::drain_remote`] empties once per turn.
//! 3. A buffer is always exactly one of four types, and each change of ownership consumes the old value:
//!
//! | type | access to the bytes | sharing | back to [`Buf`] |
//! | --- | --- | --- | --- |
//! | [`Buf`] | its owner, any thread | none | – |
//! | [`Frozen`] | all holders, reading only | cloned, any thread | never; returns with the last clone |
//! | [`Lent`] | the device, or copies in and out on the owner thread | cloned, owner thread only | [`Lent::reclaim`] |
//! | [`Posted`] | the device | none | [`Posted::complete`], unsafe: the device is done |
//!
//! Buffers are not wiped: a fresh arena is all zeroes, a reused buffer still holds the bytes of its last use.
//!
//! [`PeerMapping`] and [`SharedMapping`] are memory that another process maps too, and [`PeerRings`] are rings in such
//! memory. Their bytes are copied in and out. No reference to them is ever formed, except to atomics.
//!
//! ```
//! use rpcrdma_mempool::{ArenaConfig, Class, Pool, PoolConfig};
//! let pool = Pool::new(&PoolConfig {
//!     classes: vec![Class { size: 4096, count: 64 }],
//!     arena: ArenaConfig::default(),
//! })?;
//! println!("{}", pool.arena().report());
//! let mut buf = pool.alloc(5).expect("64 buffers are free");
//! buf.copy_from_slice(b"hello");
//! drop(buf);
//! pool.close()?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod arena;
mod available;
mod buf;
mod classes;
mod config;
mod core;
mod error;
mod external_memory;
mod host;
mod index_stack;
mod map;
#[cfg_attr(all(target_arch = "x86_64", target_os = "linux", not(loom), not(miri)), path = "thread_pointer.rs")]
mod owner;
mod pool;
mod prefetch;
mod report;
mod ring;
mod shared;
mod stats;
pub mod sync;

pub use arena::{Arena, ArenaId};
pub use available::AvailableMemory;
pub use buf::{Buf, Frozen, Lent, Posted};
pub use config::{ArenaConfig, Class, PagePolicy, PageSize, PoolConfig};
pub use error::{Leak, MemError};
pub use external_memory::ExternalMemory;
pub use host::{MemoryLimits, exceeded_limit, thread_limits};
#[doc(hidden)]
pub use index_stack::IndexStack;
#[doc(hidden)]
pub use owner::current as current_thread;
pub use pool::Pool;
pub use prefetch::prefetch;
pub use report::ArenaReport;
pub use ring::{PeerRing, PeerRings};
pub use shared::{Line, PeerMapping, SharedMapping};
pub use stats::{Census, ClassCensus, ClassStats, PoolStats};
