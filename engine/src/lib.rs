//! ONC RPC over RDMA.
pub mod fabric;
