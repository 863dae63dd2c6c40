#![expect(unsafe_code, reason = "functions of C")]
//! Polled servers and clients that go from one thread to another.

use std::cell::RefCell;
use std::ffi::{c_int, c_void};

use crate::failure::{Failure, entry};
use crate::handle::{self, Kind, foreign, hold, mark_of};
use crate::polled::{Polled, PolledServer};
use crate::reads;
use crate::types::{rpcrdma_local_client, rpcrdma_local_server};

thread_local!(static HELD: Held = const { Held(RefCell::new(Vec::new())) });

/// Polled handles that a thread uses. Its end detaches them.
struct Held(RefCell<Vec<*mut c_void>>);

impl Drop for Held {
    fn drop(&mut self) {
        for handle in self.0.take() {
            // SAFETY: handles stay in the list until they end. A failure leaves one as it is: a function uses it that
            // the end of the thread has cut off.
            let _ = unsafe { detach(handle) };
        }
    }
}

impl Held {
    fn add(handle: *mut c_void) {
        // A thread that ends detaches no more of them.
        let _ = HELD.try_with(|held| held.0.borrow_mut().push(handle));
    }

    fn remove(handle: *mut c_void) {
        let _ = HELD.try_with(|held| held.0.borrow_mut().retain(|known| *known != handle));
    }
}

/// A new handle that this thread uses.
pub(crate) fn hold_here<K: Kind>(value: K::Value) -> *mut K {
    let handle: *mut K = hold(value);
    Held::add(handle.cast());
    handle
}

/// Prepares a handle for its end: attaches it to this thread if no thread uses it.
///
/// # Safety
/// As for [`handle::lend`].
pub(crate) unsafe fn before_end(handle: *mut c_void) -> Result<(), Failure> {
    // SAFETY: the caller's promise.
    unsafe { attach(handle) }?;
    Held::remove(handle);
    Ok(())
}

/// # Safety
/// As for [`handle::lend`].
unsafe fn detach(pointer: *mut c_void) -> Result<(), Failure> {
    // SAFETY: the caller's promise.
    match unsafe { mark_of(pointer) }? {
        rpcrdma_local_server::MARK => {
            let leave = |server: &mut PolledServer| {
                server.leave_thread();
                Ok(())
            };
            // SAFETY: it is of this kind; the caller's promise.
            unsafe { handle::detach(pointer.cast::<rpcrdma_local_server>(), leave) }
        }
        rpcrdma_local_client::MARK => {
            // SAFETY: it is of this kind; the caller's promise.
            unsafe { handle::detach(pointer.cast::<rpcrdma_local_client>(), Polled::leave_thread) }
        }
        _ => Err(foreign()),
    }
}

/// # Safety
/// As for [`handle::lend`].
unsafe fn attach(pointer: *mut c_void) -> Result<bool, Failure> {
    // SAFETY: the caller's promise.
    match unsafe { mark_of(pointer) }? {
        rpcrdma_local_server::MARK => {
            // SAFETY: it is of this kind; the caller's promise.
            unsafe { handle::attach(pointer.cast::<rpcrdma_local_server>(), PolledServer::enter_thread) }
        }
        rpcrdma_local_client::MARK => {
            // SAFETY: it is of this kind; the caller's promise.
            unsafe { handle::attach(pointer.cast::<rpcrdma_local_client>(), Polled::enter_thread) }
        }
        _ => Err(foreign()),
    }
}

/// Detaches a polled server or client from the calling thread: `rpcrdma_attach` gives it to another one. Until then
/// only that function and `rpcrdma_free` may be used with it. The end of a thread detaches all that it has.
///
/// A detached handle is not polled: attach it soon, as a loop polls 20 times a second. Until then its connections stand
/// still: calls and allocations through its server's clients (`rpcrdma_local_server_call_back`) wait, whatever their
/// time-outs.
///
/// Returns 0, or -EPERM on another thread than its own; -EBUSY in its own functions: a handler of the server, or one
/// that gets the ends of the client's calls.
///
/// # Safety
/// `handle` as for `rpcrdma_free`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_detach(handle: *mut c_void) -> c_int {
    entry("rpcrdma_detach", || {
        // SAFETY: the caller's promise.
        unsafe { detach(handle) }?;
        Held::remove(handle);
        reads::end_shard();
        Ok(0)
    })
}

/// Gives a polled server or client to the calling thread: one that was detached by `rpcrdma_detach`, or by the end of
/// its thread.
///
/// Returns 0, also if the calling thread has it already, or -EPERM if another thread has it. Of several threads that
/// attach it at once, one wins.
///
/// # Safety
/// `handle` as for `rpcrdma_free`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_attach(handle: *mut c_void) -> c_int {
    entry("rpcrdma_attach", || {
        // SAFETY: the caller's promise.
        if unsafe { attach(handle) }? {
            Held::add(handle);
        }
        Ok(0)
    })
}
