#![expect(unsafe_code, reason = "a configuration is a pointer of C")]
//! The functions of the interface, which `rpcrdma.h` declares.
//!
//! Each function checks its arguments, and does its work, within [`entry`](crate::failure::entry).

// The modules are in the order of the header.
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
use crate::failure::ApiFailure;
use crate::handle::lend;
use crate::types::rpcrdma_config;

/// Makes a configuration of knobs, or of the defaults if `config` is null.
///
/// # Safety
/// See [`lend`].
unsafe fn knobs<T>(
    config: *mut rpcrdma_config,
    make: impl FnOnce(&Knobs) -> Result<T, ApiFailure>,
) -> Result<T, ApiFailure> {
    match config.is_null() {
        true => make(&Knobs::default()),
        // SAFETY: the caller passes NULL or a handle of this library.
        false => make(&*unsafe { lend(config) }?),
    }
}
