//! `rpcrdma` as users run it, and its library on foreign captures.

mod bodies;
mod capture;
mod decode;
mod doctor;
#[cfg(feature = "prometheus")]
mod exporter;
mod patience;
mod pcapng;
mod ping;
mod reencoded;
#[cfg(any(feature = "top", feature = "prometheus"))]
mod served;
mod terminal;
mod tool;
#[cfg(feature = "top")]
mod top;
mod topo;
mod tune;
