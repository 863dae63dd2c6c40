//! What a fabric must do: the contract on each of them, behind wrappers and between processes; and peers that misbehave.

mod contract;
mod contract_iwarp;
mod contract_software;
#[cfg(feature = "verbs")]
mod contract_verbs;
mod far;
mod iwarp_peers;
mod processes;
mod wrappers;
