//! `rpcrdma`.
fn main() {}
