//! Tests of every fabric: the contract, wrappers, separate processes, and hostile peers.

mod contract;
mod contract_iwarp;
mod contract_software;
#[cfg(feature = "verbs")]
mod contract_verbs;
mod iwarp_peers;
mod processes;
mod remote_fabric;
mod wrappers;
