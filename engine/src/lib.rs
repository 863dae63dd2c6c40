//! ONC RPC over RDMA.
pub mod fabric;
pub mod wire;
