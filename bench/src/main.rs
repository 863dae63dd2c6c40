//! `rpcperf`.
fn main() {}
