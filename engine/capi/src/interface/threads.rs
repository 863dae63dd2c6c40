#![expect(unsafe_code, reason = "functions that C calls")]
//! Functions that move polled servers and clients from one thread to another.

use std::cell::RefCell;
use std::ffi::{c_int, c_void};

use crate::failure::{ApiFailure, entry};
use crate::handle::{self, HandleKind, mark_of, new_handle, wrong_kind};
use crate::polled::{PolledClient, PolledServer};
use crate::read_places;
use crate::types::{rpcrdma_local_client, rpcrdma_local_server};

thread_local!(static THREAD_HANDLES: ThreadHandles = const { ThreadHandles(RefCell::new(Vec::new())) });

/// The polled handles that are attached to a thread. They are detached when the thread ends.
struct ThreadHandles(RefCell<Vec<*mut c_void>>);

impl Drop for ThreadHandles {
    fn drop(&mut self) {
        for handle in self.0.take() {
            // SAFETY: handles stay in the list until they end. A handle that is in use by a function, which the end of
            // the thread has cut off, cannot be detached: it stays as it is.
            let _ = unsafe { detach(handle) };
        }
    }
}

impl ThreadHandles {
    fn add(handle: *mut c_void) {
        // The list of an ending thread may be gone: then the handle is not detached.
        let _ = THREAD_HANDLES.try_with(|handles| handles.0.borrow_mut().push(handle));
    }

    fn remove(handle: *mut c_void) {
        let _ = THREAD_HANDLES.try_with(|handles| handles.0.borrow_mut().retain(|known| *known != handle));
    }
}

/// Makes a handle that is attached to this thread.
pub(crate) fn new_bound_handle<K: HandleKind>(value: K::Value) -> *mut K {
    let handle: *mut K = new_handle(value);
    ThreadHandles::add(handle.cast());
    handle
}

/// Prepares a handle to be freed by this thread, and attaches it to the thread if no thread has it.
///
/// # Safety
/// See [`handle::lend`].
pub(crate) unsafe fn prepare_end(handle: *mut c_void) -> Result<(), ApiFailure> {
    // SAFETY: the caller guarantees it.
    unsafe { attach(handle) }?;
    ThreadHandles::remove(handle);
    Ok(())
}

/// Detaches a handle from this thread.
///
/// # Safety
/// See [`handle::lend`].
unsafe fn detach(pointer: *mut c_void) -> Result<(), ApiFailure> {
    // SAFETY: the caller guarantees it.
    match unsafe { mark_of(pointer) }? {
        rpcrdma_local_server::MARK => {
            let leave = |server: &mut PolledServer| {
                server.leave_thread();
                Ok(())
            };
            // SAFETY: the handle is of this kind; the caller guarantees the rest.
            unsafe { handle::detach(pointer.cast::<rpcrdma_local_server>(), leave) }
        }
        rpcrdma_local_client::MARK => {
            // SAFETY: the handle is of this kind; the caller guarantees the rest.
            unsafe { handle::detach(pointer.cast::<rpcrdma_local_client>(), PolledClient::leave_thread) }
        }
        _ => Err(wrong_kind()),
    }
}

/// Attaches a handle to this thread. Returns false if it is attached to this thread already.
///
/// # Safety
/// See [`handle::lend`].
unsafe fn attach(pointer: *mut c_void) -> Result<bool, ApiFailure> {
    // SAFETY: the caller guarantees it.
    match unsafe { mark_of(pointer) }? {
        rpcrdma_local_server::MARK => {
            // SAFETY: the handle is of this kind; the caller guarantees the rest.
            unsafe { handle::attach(pointer.cast::<rpcrdma_local_server>(), PolledServer::enter_thread) }
        }
        rpcrdma_local_client::MARK => {
            // SAFETY: the handle is of this kind; the caller guarantees the rest.
            unsafe { handle::attach(pointer.cast::<rpcrdma_local_client>(), PolledClient::enter_thread) }
        }
        _ => Err(wrong_kind()),
    }
}

/// Detaches a polled server or client from the calling thread.
///
/// `rpcrdma_attach` gives it to another thread. Until then, only that function and `rpcrdma_free` may use it. The end
/// of a thread detaches all its servers and clients.
///
/// A detached handle is not polled, so attach it soon: an event loop must poll at least 20 times a second. Until then,
/// its connections make no progress. Calls and allocations through clients that call back the server's callers
/// (`rpcrdma_local_server_call_back`) wait, even beyond their time-outs.
///
/// # Parameters
/// - `handle`: a polled server or client.
///
/// # Ownership
/// No memory changes hands.
///
/// # Threads
/// The thread of the handle.
///
/// # Returns
/// - 0: the handle is detached.
/// - -EPERM: the calling thread is not that of the handle.
/// - -EBUSY: a handler of the server, or a function that gets the ends of the client's calls, calls `rpcrdma_detach`.
/// - another negative handle code.
///
/// # Safety
/// `handle` is NULL or came from this library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_detach(handle: *mut c_void) -> c_int {
    entry("rpcrdma_detach", || {
        // SAFETY: the caller guarantees it.
        unsafe { detach(handle) }?;
        ThreadHandles::remove(handle);
        read_places::release_thread_parts();
        Ok(0)
    })
}

/// Gives a detached polled server or client to the calling thread.
///
/// The handle was detached by `rpcrdma_detach`, or by the end of its thread. If several threads attach it
/// concurrently, one succeeds.
///
/// # Parameters
/// - `handle`: a polled server or client.
///
/// # Ownership
/// No memory changes hands.
///
/// # Threads
/// Any thread, which polls the handle from then on.
///
/// # Returns
/// - 0: the calling thread has the handle, or had it already.
/// - -EPERM: another thread has it.
/// - another negative handle code.
///
/// # Safety
/// `handle` is NULL or came from this library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_attach(handle: *mut c_void) -> c_int {
    entry("rpcrdma_attach", || {
        // SAFETY: the caller guarantees it.
        if unsafe { attach(handle) }? {
            ThreadHandles::add(handle);
        }
        Ok(0)
    })
}
