//! The end of identifiers of the connection manager.
//!
//! The kernel waits, when one is destroyed, until its last datagram is done with: mostly microseconds, but half a minute has been seen
//! on Linux 6.1 when both sides leave at once. No shard waits for that: a thread of the process does, for all of them.

#![forbid(unsafe_code)]

use std::sync::OnceLock;
use std::sync::mpsc::{Sender, channel};

use super::sys::CmId;

/// The number of identifiers that nobody asks for any more.
pub(super) const NOBODY: usize = usize::MAX;

/// Destroys an identifier, some time.
pub(super) fn dispose(mut id: CmId) {
    static REAPER: OnceLock<Option<Sender<CmId>>> = OnceLock::new();
    // Events that are still on their way to us are then no queue pair's.
    id.set_cookie(NOBODY);
    match REAPER.get_or_init(start) {
        // It ends with the process; a failed send gives the identifier back, to be destroyed here.
        Some(reaper) => drop(reaper.send(id)),
        None => drop(id),
    }
}

fn start() -> Option<Sender<CmId>> {
    let (sender, receiver) = channel();
    let thread = std::thread::Builder::new().name("rpcrdma-reaper".to_owned());
    let started = thread.spawn(move || receiver.into_iter().for_each(drop::<CmId>));
    started.inspect_err(|error| log::warn!("a thread for connections that end: {error}")).ok().map(|_| sender)
}
