//! The parts of the `rpcrdma` command. Each subcommand has a file of its own with its arguments and its
//! `run`.
#![forbid(unsafe_code)]

pub mod capture;
pub mod command;
pub mod decode;
mod json;
mod payload;
pub mod ping;
pub mod roce;
