#![expect(unsafe_code, reason = "a handle is a pointer that callers in C hold")]
//! Handles of servers and clients, where a function takes any of them.

use std::ffi::c_void;
use std::sync::Arc;

use rpcrdma::Server;

use crate::failure::Failure;
use crate::handle::{Kind, Lent, foreign, lend, mark_of, share};
use crate::types::{rpcrdma_client, rpcrdma_local_client, rpcrdma_local_server, rpcrdma_server};

/// A server or a client.
pub(crate) enum Any<'a> {
    Server(Arc<Server>),
    LocalServer(Lent<'a, rpcrdma_local_server>),
    Client(Lent<'a, rpcrdma_client>),
    LocalClient(Lent<'a, rpcrdma_local_client>),
}

/// The value of a handle of either kind.
///
/// # Errors
/// As [`lend`].
///
/// # Safety
/// As [`lend`] and [`share`].
pub(crate) unsafe fn any<'a>(handle: *mut c_void) -> Result<Any<'a>, Failure> {
    // SAFETY: the caller's promise.
    match unsafe { mark_of(handle) }? {
        // SAFETY: it is of this kind.
        rpcrdma_server::MARK => unsafe { share(handle.cast::<rpcrdma_server>()) }?.get().map(Any::Server),
        // SAFETY: it is of this kind.
        rpcrdma_local_server::MARK => unsafe { lend(handle.cast()) }.map(Any::LocalServer),
        // SAFETY: it is of this kind.
        rpcrdma_client::MARK => unsafe { lend(handle.cast()) }.map(Any::Client),
        // SAFETY: it is of this kind.
        rpcrdma_local_client::MARK => unsafe { lend(handle.cast()) }.map(Any::LocalClient),
        _ => Err(foreign()),
    }
}
