//! Destruction of connection manager identifiers on separate threads.
//!
//! When the kernel destroys an identifier, it waits for the identifier's last datagram. That takes microseconds, but
//! more than 30 s while the kernel repeats an unanswered datagram (Linux 6.1). Separate threads wait instead of the
//! shards.

#![forbid(unsafe_code)]

use super::sys::CmId;
use crate::reaper::Reaper;

/// Number of an identifier without an owner.
pub(super) const NO_OWNER: usize = usize::MAX;

/// Maximum identifiers that wait for destruction. At the limit no new identifier is created, but existing ones may
/// still exceed it.
const MAX_WAITING: usize = 1024;

static REAPER: Reaper<CmId> = Reaper::new("rpcrdma-reaper", 64, MAX_WAITING);

/// Queues an identifier for destruction.
pub(super) fn dispose(mut id: CmId) {
    // The identifier's pending events then match no queue pair.
    id.set_cookie(NO_OWNER);
    REAPER.dispose(id);
}

/// Whether too many identifiers wait for destruction. Then neither peers nor this side may create more.
pub(super) fn is_backlogged() -> bool {
    REAPER.is_full()
}
