#![expect(unsafe_code, reason = "functions that C calls")]
//! Version, error text, log, and the end of handles.

use std::ffi::{c_char, c_int, c_void};
use std::thread;

use rustix::io::Errno;

use crate::failure::{self, ApiFailure, entry};
use crate::handle::{self, HandleKind, mark_of};
use crate::interface::threads::prepare_end;
use crate::log::{LogSink, install};
use crate::read_places;
use crate::types::*;

/// Returns the version of the library, such as `0.1.0`.
///
/// # Ownership
/// The text is static.
///
/// # Threads
/// Any thread.
///
/// # Returns
/// The version; never NULL.
#[unsafe(no_mangle)]
pub extern "C" fn rpcrdma_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

/// Returns the text of the calling thread's last failure.
///
/// The text has at most 1023 bytes. A failing call and this function must not be arguments of one `printf`, because C
/// may run them in either order.
///
/// # Ownership
/// The text is in a buffer of the thread, which the thread's next failure overwrites.
///
/// # Threads
/// Any thread; each has its own text.
///
/// # Returns
/// The text; never NULL.
#[unsafe(no_mangle)]
pub extern "C" fn rpcrdma_error() -> *const c_char {
    failure::last_text()
}

/// Passes each line of the log to a function.
///
/// Each line is passed on immediately. A process can set the function once.
///
/// Lines that peers or calls can cause are limited: a shard passes at most 8 lines of a kind in 10 seconds, and then one
/// line with the number of those left out, such as `17 more: connect requests refused`.
///
/// # Parameters
/// - `function`: gets `context`, the level of the line (1 error, 2 warning, 3 information, 4 debug), and the line. It
///   must not call this library, nor block, because it runs within functions of this library while they use their
///   handles, and on the threads of servers and clients.
/// - `context`: first argument of `function`.
/// - `max_level`: highest level of the lines that are written, 0 (none) to 4.
///
/// # Ownership
/// The library keeps `function` and `context` until the process ends. A line is valid until `function` returns.
///
/// # Threads
/// Any thread. Any thread may run `function`.
///
/// # Returns
/// - 0: the function gets the log.
/// - -EINVAL: `function` is NULL, or `max_level` is not 0 to 4.
/// - -EBUSY: the process has a log already.
///
/// # Safety
/// `function` may be called with `context` on any thread, until the process ends.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_log(
    function: Option<unsafe extern "C-unwind" fn(context: *mut c_void, level: c_int, line: *const c_char)>,
    context: *mut c_void,
    max_level: c_int,
) -> c_int {
    entry("rpcrdma_log", || {
        let function = function.ok_or_else(|| ApiFailure::argument("function is NULL"))?;
        // SAFETY: the caller guarantees it.
        let sink = unsafe { LogSink::new(function, context) };
        install(sink, max_level).map(|()| 0)
    })
}

/// Checks that the calling thread may wait for the end of a server. If several threads end the server concurrently, one
/// of them frees it. So only a thread of this library, which the server waits for, accesses the server here.
///
/// # Safety
/// See [`handle::share`].
pub(crate) unsafe fn check_may_end(server: *mut rpcrdma_server) -> Result<(), ApiFailure> {
    let is_library_thread = thread::current().name().is_some_and(|name| name.starts_with("rpcrdma-"));
    // SAFETY: the caller guarantees it.
    match is_library_thread && unsafe { handle::share(server) }?.get()?.is_on_own_thread() {
        true => Err(ApiFailure::new(
            Errno::DEADLK,
            "a server waits for the end of its handlers and tasks, so they cannot end it",
        )),
        false => Ok(()),
    }
}

/// Frees a handle of any kind but a call.
///
/// A server or client closes its connections immediately; `rpcrdma_server_drain` lets calls finish first. The function
/// blocks until the threads of the server or client have ended, so a handler or task cannot free its own server. Calls
/// of a polled client that is freed are not reported any more.
///
/// # Parameters
/// - `handle`: the handle. NULL is ignored.
///
/// # Ownership
/// The handle becomes invalid. A configuration, services, and an arena may be freed before the servers and clients that
/// were started with them. Buffers and replies may outlive their client or server: their contents stay as they are
/// until they are freed.
///
/// # Threads
/// Any thread. A polled server or client is freed on its own thread, or on any thread once it is detached, by
/// `rpcrdma_detach` or by the end of its thread.
///
/// # Returns
/// - 0: the handle is freed.
/// - -EPERM: another thread has the polled server or client.
/// - -EINVAL: the handle is a call, which `rpcrdma_call_answer` ends, or a reply that a callback got.
/// - -EDEADLK: a handler or task frees its own server, which has threads.
/// - -EBUSY: a handler frees its own polled server, or another function uses the handle.
/// - another negative handle code.
///
/// # Safety
/// `handle` is NULL or came from this library, and nobody uses it any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcrdma_free(handle: *mut c_void) -> c_int {
    if handle.is_null() {
        return 0;
    }
    entry("rpcrdma_free", || {
        // SAFETY: the caller guarantees it.
        let mark = unsafe { mark_of(handle) }?;
        if mark == rpcrdma_server::MARK {
            // SAFETY: the handle is of this kind; the caller guarantees the rest.
            unsafe { check_may_end(handle.cast()) }?;
            // SAFETY: the handle is of this kind. Handlers of the server use it until the server has ended.
            drop(unsafe { handle::share(handle.cast::<rpcrdma_server>()) }?.take()?);
        }
        let is_polled = [rpcrdma_local_server::MARK, rpcrdma_local_client::MARK].contains(&mark);
        if is_polled {
            // SAFETY: the caller guarantees it.
            unsafe { prepare_end(handle) }?;
        }
        macro_rules! end {
            ($($kind:ty),*) => {
                match mark {
                    // SAFETY: the handle is of this kind; the caller guarantees the rest.
                    $(mark if mark == <$kind>::MARK => drop(unsafe { handle::take(handle.cast::<$kind>()) }?),)*
                    mark if mark == rpcrdma_call::MARK => {
                        return Err(ApiFailure::argument("a call ends with rpcrdma_call_answer"));
                    }
                    _ => return Err(handle::wrong_kind()),
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
            read_places::release_thread_parts();
        }
        Ok(0)
    })
}
