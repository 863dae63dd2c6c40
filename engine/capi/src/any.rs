#![expect(unsafe_code, reason = "a handle is a pointer that callers in C hold")]
//! Handles for functions that take any kind of server or client.

use std::ffi::c_void;
use std::sync::Arc;

use rpcrdma::Server;

use crate::failure::ApiFailure;
use crate::handle::{HandleKind, LentHandle, lend, mark_of, share, wrong_kind};
use crate::types::{rpcrdma_client, rpcrdma_local_client, rpcrdma_local_server, rpcrdma_server};

/// A server or a client.
pub(crate) enum AnyEndpoint<'a> {
    Server(Arc<Server>),
    LocalServer(LentHandle<'a, rpcrdma_local_server>),
    Client(LentHandle<'a, rpcrdma_client>),
    LocalClient(LentHandle<'a, rpcrdma_local_client>),
}

/// Lends the value of a server's or client's handle.
///
/// # Errors
/// See [`lend`].
///
/// # Safety
/// See [`lend`] and [`share`].
pub(crate) unsafe fn lend_any<'a>(handle: *mut c_void) -> Result<AnyEndpoint<'a>, ApiFailure> {
    // SAFETY: the caller guarantees it.
    match unsafe { mark_of(handle) }? {
        // SAFETY: the handle is of this kind.
        rpcrdma_server::MARK => unsafe { share(handle.cast::<rpcrdma_server>()) }?.get().map(AnyEndpoint::Server),
        // SAFETY: the handle is of this kind.
        rpcrdma_local_server::MARK => unsafe { lend(handle.cast()) }.map(AnyEndpoint::LocalServer),
        // SAFETY: the handle is of this kind.
        rpcrdma_client::MARK => unsafe { lend(handle.cast()) }.map(AnyEndpoint::Client),
        // SAFETY: the handle is of this kind.
        rpcrdma_local_client::MARK => unsafe { lend(handle.cast()) }.map(AnyEndpoint::LocalClient),
        _ => Err(wrong_kind()),
    }
}
