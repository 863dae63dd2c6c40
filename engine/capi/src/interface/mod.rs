#![expect(unsafe_code, reason = "a configuration is a pointer of C")]
//! The functions of the interface, as `rpcrdma.h` has them.
//!
//! Each checks its arguments, and does its work within [`entry`](crate::failure::entry).

// In the order of the header.
mod general;

mod config;

mod services;

mod server;

mod call;

mod memory;

mod threads;

mod client;

mod local_client;

mod reply;

pub use {
    call::*, client::*, config::*, general::*, local_client::*, memory::*, reply::*, server::*, services::*, threads::*,
};

use crate::config::Knobs;
use crate::failure::Failure;
use crate::handle::lend;
use crate::types::rpcrdma_config;

/// Makes a configuration of these knobs; of the defaults for null.
///
/// # Safety
/// As [`lend`].
unsafe fn knobs<T>(config: *mut rpcrdma_config, make: impl FnOnce(&Knobs) -> Result<T, Failure>) -> Result<T, Failure> {
    match config.is_null() {
        true => make(&Knobs::default()),
        // SAFETY: the caller's promise.
        false => make(&*unsafe { lend(config) }?),
    }
}
