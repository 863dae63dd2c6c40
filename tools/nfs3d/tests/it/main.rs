//! Tests of the programs `nfs3d` and `nfs3c`.
//!
//! A client on the engine and `nfs3c` call the server: every procedure, its errors, bad input, restarts. Other tests
//! check the systemd units.
#![forbid(unsafe_code)]

mod bad_input;
mod client;
mod creation;
mod directories;
mod fake_server;
mod files;
mod identities;
mod iwarp;
mod key;
mod limits;
mod misbehaving_servers;
mod mount;
mod names;
mod nfs3c;
mod privileges;
mod reduced;
mod restart;
mod threads;
mod unit;
