//! `nfs3d` as its users run it, called by a client on the engine and by `nfs3c`: every procedure, its errors, bad
//! input, restarts, and the unit of systemd.
#![forbid(unsafe_code)]

mod bad_input;
mod client;
mod creation;
mod directories;
mod fake;
mod files;
mod identities;
mod iwarp;
mod key;
mod limits;
mod mount;
mod names;
mod nfs3c;
mod privileges;
mod reduced;
mod restart;
mod strange_servers;
mod threads;
mod unit;
