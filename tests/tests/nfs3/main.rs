//! The example NFS server as its users run it, called by a client on the engine (and by the example client):
//! every procedure, its errors, bad input, and restarts.
#![forbid(unsafe_code)]

mod bad_input;
mod client;
mod directories;
mod files;
mod iwarp;
mod mount;
mod names;
mod nfs3c;
mod reduced;
mod restart;
mod threads;
