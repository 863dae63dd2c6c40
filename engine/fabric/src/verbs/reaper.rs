//! The end of identifiers of the connection manager.
//!
//! The kernel waits, when one is destroyed, for its last datagram. That takes microseconds, but more than 30 s while it
//! repeats an unanswered one (Linux 6.1). Threads of the process wait in place of the shards.

#![forbid(unsafe_code)]

use super::sys::CmId;
use crate::reaper::Reaper;

/// The number of unclaimed identifiers.
pub(super) const NOBODY: usize = usize::MAX;

/// Identifiers that may wait for their end while new ones are made. Those that there are when it is reached
/// may follow.
const MOST: usize = 1024;

static REAPER: Reaper<CmId> = Reaper::new("rpcrdma-reaper", 64, MOST);

/// Destroys an identifier, some time.
pub(super) fn dispose(mut id: CmId) {
    // Events that are still on their way to us are then no queue pair's.
    id.set_cookie(NOBODY);
    REAPER.dispose(id);
}

/// Whether the kernel's destruction of identifiers is far behind. Then no more must be made, neither for peers nor for
/// us.
pub(super) fn is_behind() -> bool {
    REAPER.is_full()
}
