//! Memory for raw tests: registered pools of one size.
#![forbid(unsafe_code)]

use rpcrdma::fabric::{Access, Fabric};
use rpcrdma_mempool::{ArenaConfig, Buf, Class, Pool, PoolConfig};

use crate::failure::Failure;

/// Makes `count` buffers of `size` bytes in a separate, registered arena.
pub(crate) fn registered_pool<F: Fabric>(
    fabric: &mut F,
    size: usize,
    count: usize,
    access: Access,
) -> Result<Pool, Failure> {
    let arena = ArenaConfig { bytes: 0, name: "rpcperf", ..ArenaConfig::default() };
    let pool = Pool::new(&PoolConfig { classes: vec![Class { size, count }], arena })
        .map_err(|e| Failure::run(format!("memory for {count} buffers of {size} bytes"), e))?;
    fabric.register(pool.arena(), access).map_err(|e| Failure::run("register", e))?;
    Ok(pool)
}

/// Allocates from a pool that is large enough for all outstanding work.
pub(crate) fn alloc(pool: &Pool, len: usize) -> Result<Buf, Failure> {
    pool.alloc(len).ok_or_else(|| {
        Failure::Run(format!("no buffer of {len} bytes is free: more work is outstanding than was allowed"))
    })
}
