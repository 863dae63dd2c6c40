#![expect(unsafe_code, reason = "functions of C")]
//! Version, errors, log, and the end of handles.

use std::ffi::{c_char, c_int, c_void};
use std::thread;

use rustix::io::Errno;

use crate::failure::{self, Failure, entry};
use crate::handle::{self, Kind, mark_of};
use crate::interface::threads::before_end;
use crate::log::{Sink, install};
use crate::reads;
use crate::types::*;

/// Version of the library, such as `0.1.0`.
#[unsafe(no_mangle)]
pub extern "C" fn rpcrdma_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

/// Text of this thread's last failure: at most 1023 bytes. Never NULL.
///
/// It is in a buffer of the thread, which the next failure overwrites. A failing call and this one are not arguments of
/// one `printf`: C may run them in either order.
#[unsafe(no_mangle)]
pub extern "C" fn rpcrdma_error() -> *const c_char {
    failure::last()
}

/// Passes each line of the log to `function`, from any thread, as soon as it is written.
///
/// `level` is 1 (error) to 4 (debug); lines above `most`, 0 to 4, are not written. Once per process. `context` is its
/// first argument.
///
/// It runs within functions of this library while they use their handles, and on the threads of servers and clients: it
/// must not call this library, nor block.
///
/// Returns 0; -EINVAL if `function` is NULL, or `most` not 0 to 4; or -EBUSY if the process has a log already.
///
/// # Safety
/// `function` may be called with `context` on any thread, until the process ends.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_log(
    function: Option<unsafe extern "C-unwind" fn(context: *mut c_void, level: c_int, line: *const c_char)>,
    context: *mut c_void,
    most: c_int,
) -> c_int {
    entry("rpcrdma_log", || {
        let function = function.ok_or_else(|| Failure::argument("function is NULL"))?;
        // SAFETY: the caller's promise.
        let sink = unsafe { Sink::new(function, context) };
        install(sink, most).map(|()| 0)
    })
}

/// Whether the calling thread may wait for the end of a server. Of several threads that end it at once, one wins: so
/// only threads of this library look into it.
///
/// # Safety
/// As [`handle::share`].
pub(crate) unsafe fn may_end(server: *mut rpcrdma_server) -> Result<(), Failure> {
    let is_ours = thread::current().name().is_some_and(|name| name.starts_with("rpcrdma-"));
    // SAFETY: the caller's promise.
    match is_ours && unsafe { handle::share(server) }?.get()?.is_on_own_thread() {
        true => Err(Failure::new(Errno::DEADLK, "a server's handlers and tasks cannot end it: it waits for their end")),
        false => Ok(()),
    }
}

/// Ends a handle of any kind, but not a call's. NULL is ignored.
///
/// A server or client closes its connections at once; `rpcrdma_server_drain` lets calls finish first. It blocks until
/// their threads have ended, so a handler or task cannot end its own server. A configuration, services, and an arena
/// may end before the servers and clients that were started with them. Buffers and replies may outlive their client or
/// server: what they hold stays as it is until they are freed. Calls of a polled client that ends are not reported any
/// more.
///
/// A polled server or client ends on its own thread, or on any one once it is detached: by `rpcrdma_detach`, or by the
/// end of its thread.
///
/// Returns 0; -EPERM for a polled one that another thread has; -EINVAL for a call, which `rpcrdma_call_answer` ends,
/// and for a reply that a callback got; -EDEADLK for a server in one of its handlers or tasks.
///
/// # Safety
/// `handle` is NULL or came from this library, and nobody uses it any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_free(handle: *mut c_void) -> c_int {
    if handle.is_null() {
        return 0;
    }
    entry("rpcrdma_free", || {
        // SAFETY: the caller's promise.
        let mark = unsafe { mark_of(handle) }?;
        if mark == rpcrdma_server::MARK {
            // SAFETY: it is of this kind; the caller's promise.
            unsafe { may_end(handle.cast()) }?;
            // SAFETY: as above. Its handlers use the handle until it has ended.
            drop(unsafe { handle::share(handle.cast::<rpcrdma_server>()) }?.take()?);
        }
        let is_polled = [rpcrdma_local_server::MARK, rpcrdma_local_client::MARK].contains(&mark);
        if is_polled {
            // SAFETY: as above.
            unsafe { before_end(handle) }?;
        }
        macro_rules! end {
            ($($kind:ty),*) => {
                match mark {
                    // SAFETY: it is of this kind; the caller's promise.
                    $(mark if mark == <$kind>::MARK => drop(unsafe { handle::take(handle.cast::<$kind>()) }?),)*
                    mark if mark == rpcrdma_call::MARK => {
                        return Err(Failure::argument("a call ends with rpcrdma_call_answer"));
                    }
                    _ => return Err(handle::foreign()),
                }
            };
        }
        end!(
            rpcrdma_config,
            rpcrdma_services,
            rpcrdma_server,
            rpcrdma_local_server,
            rpcrdma_client,
            rpcrdma_local_client,
            rpcrdma_reply,
            rpcrdma_buffer,
            rpcrdma_arena
        );
        if is_polled {
            reads::end_shard();
        }
        Ok(0)
    })
}
