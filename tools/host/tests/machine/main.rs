//! Machines made of files: findings of the checks, and placement of shards.

mod faults;
mod follow;
mod looks;
mod plans;
mod shapes;
mod trees;
