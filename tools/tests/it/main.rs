//! Tests of the program `rpcrdma`, and of its library on captures of other implementations.

mod bodies;
mod capture;
mod decode;
mod doctor;
#[cfg(feature = "prometheus")]
mod exporter;
#[cfg(any(feature = "top", feature = "prometheus"))]
mod loaded_server;
mod pcapng;
mod ping;
mod reencode;
mod terminal;
mod tool;
#[cfg(feature = "top")]
mod top;
mod topo;
mod tune;
mod wait;
