//! Hugepage arenas and per-core buffer pools.
