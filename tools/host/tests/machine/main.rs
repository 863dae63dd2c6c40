//! Machines made of files: findings of the checks, and placement of shards.

mod faults;
mod findings;
mod fixes;
mod machines;
mod plans;
mod topologies;
