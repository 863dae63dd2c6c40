//! Destruction of connection manager identifiers on separate threads.
//!
//! The kernel waits for an identifier's last datagram when it destroys the identifier. That takes microseconds, but
//! more than 30 s while it repeats an unanswered datagram (Linux 6.1). Separate threads wait in place of the shards.

#![forbid(unsafe_code)]

use super::sys::CmId;
use crate::reaper::Reaper;

/// Number of an identifier without an owner.
pub(super) const NOBODY: usize = usize::MAX;

/// Limit of identifiers that wait for destruction. At the limit no new identifier is created. Existing identifiers may
/// still exceed it.
const MAX_WAITING: usize = 1024;

static REAPER: Reaper<CmId> = Reaper::new("rpcrdma-reaper", 64, MAX_WAITING);

/// Queues an identifier for destruction.
pub(super) fn dispose(mut id: CmId) {
    // Its pending events then match no queue pair.
    id.set_cookie(NOBODY);
    REAPER.dispose(id);
}

/// Whether the kernel's destruction of identifiers lags far behind. Then neither peers nor we may create more.
pub(super) fn is_behind() -> bool {
    REAPER.is_full()
}
