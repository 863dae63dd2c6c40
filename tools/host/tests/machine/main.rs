//! Machines made of files: what the checks say of them, and where shards go on them.

mod faults;
mod follow;
mod looks;
mod plans;
mod shapes;
mod trees;
