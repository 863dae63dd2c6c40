//! Fuzz targets, one module each.
//!
//! `targets/` passes their functions `run` to libFuzzer. `tests/tests/corpus.rs` runs them over the corpus.

pub mod capture;
pub mod connection;
pub mod endpoint;
pub mod generated;
pub mod handshake;
pub mod iwarp;
pub mod messages;
pub mod packets;
pub mod private_data;
pub mod properties;
pub mod ring;
pub mod rpc;
pub mod xdrgen;
