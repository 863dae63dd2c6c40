//! Implementation of the `rpcrdma` command.
//!
//! Each subcommand has a file with its arguments and its `run` function.
#![forbid(unsafe_code)]
#![warn(clippy::print_stderr)]

mod body;
pub mod capture;
pub mod cli;
pub mod command;
pub mod decode;
pub mod doctor;
#[cfg(feature = "prometheus")]
pub mod exporter;
pub mod iwarp;
mod json;
pub mod message;
mod network;
mod payload;
pub mod ping;
pub mod roce;
#[cfg(any(feature = "prometheus", feature = "top"))]
mod stats_socket;
pub mod target;
pub mod tcp;
#[cfg(feature = "top")]
pub mod top;
pub mod topo;
#[cfg(feature = "tune")]
pub mod tune;
#[cfg(any(feature = "top", feature = "tune"))]
mod units;
