//! Memory windows of one stream, with bytes and rights (RFC 5042 §6).
//!
//! Only this side reads or writes the memory, so bounds and rights are exact for each segment.

#![forbid(unsafe_code)]

use rpcrdma_mempool::{ArenaId, Lent};

use crate::Access;
use crate::iwarp::wire::Fault;
use crate::keys::{Keys, Revoked};

/// Refusals of a peer's access (RFC 5040 §7.1 and RFC 5041 §8.2).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in super::super) enum Refused {
    /// The STag does not exist, or is no longer valid.
    InvalidStag,
    /// Bytes outside of the window.
    Bounds,
    /// The window does not grant this.
    Rights,
    /// Address and length pass the end of all addresses.
    Wrap,
}

impl Refused {
    /// The fault in a tagged segment, a Write or Read Response, which DDP places; or in a Read Request, which RDMAP
    /// checks.
    pub(in super::super) fn fault(self, tagged: bool) -> Fault {
        match (self, tagged) {
            (Self::InvalidStag, true) => Fault::TaggedInvalidStag,
            (Self::InvalidStag, false) => Fault::InvalidStag,
            (Self::Bounds, true) => Fault::TaggedBounds,
            (Self::Bounds, false) => Fault::Bounds,
            (Self::Rights, _) => Fault::AccessRights,
            (Self::Wrap, true) => Fault::TaggedOffsetWrap,
            (Self::Wrap, false) => Fault::OffsetWrap,
        }
    }
}

/// The memory that a window exposes.
#[derive(Debug)]
struct Exposure {
    mem: Lent,
    /// First byte exposed, within `mem`.
    offset: usize,
    /// The same as the peer names it.
    address: u64,
    len: u64,
    access: Access,
    /// The stream position after the last byte taken from here.
    busy_until: u64,
}

/// The windows of our side of one queue pair.
#[derive(Debug)]
pub(in super::super) struct Windows {
    pub(in super::super) keys: Keys,
    exposures: Vec<Option<Exposure>>,
}

impl Windows {
    /// No windows. `random` makes their STags hard to guess.
    pub(in super::super) fn new(limit: u32, random: u32) -> Self {
        Self { keys: Keys::new(limit, random), exposures: Vec::new() }
    }

    /// Makes a window, within the limit.
    pub(in super::super) fn add(&mut self) -> Option<u32> {
        let index = self.keys.add()?;
        self.exposures.push(None);
        Some(index)
    }

    /// Executes a bind: `len` bytes of `mem` from `offset` on, with remote address `address`. False if the window is
    /// still bound.
    pub(in super::super) fn bind(
        &mut self,
        index: u32,
        mem: &Lent,
        offset: usize,
        len: usize,
        address: u64,
        access: Access,
    ) -> bool {
        let Some(place @ None) = self.exposures.get_mut(index as usize) else { return false };
        *place = Some(Exposure { mem: mem.clone(), offset, address, len: len as u64, access, busy_until: 0 });
        self.keys.bound(index);
        true
    }

    /// Revokes a window by index, for a local invalidation. The stream has sent all before `sent`. Repeat it while it
    /// returns `Busy`: nothing more of the window is taken meanwhile.
    pub(in super::super) fn revoke(&mut self, index: u32, sent: u64) -> Revoked {
        let Some(place) = self.exposures.get_mut(index as usize) else { return Revoked::NotBound };
        let Some(exposure) = place else { return Revoked::NotBound };
        if exposure.busy_until > sent {
            exposure.access = Access::LOCAL;
            return Revoked::Busy;
        }
        *place = None;
        self.keys.revoked(index);
        Revoked::Done
    }

    /// Revokes by STag, at the request of a peer's message.
    pub(in super::super) fn revoke_key(&mut self, stag: u32, sent: u64) -> Revoked {
        let Some(index) = self.keys.find(stag) else { return Revoked::NotBound };
        let revoked = self.revoke(index, sent);
        if revoked == Revoked::Done {
            self.keys.invalidated(index);
        }
        revoked
    }

    /// The memory of `len` bytes at `address` of this STag, with its offset.
    pub(in super::super) fn find(
        &self,
        stag: u32,
        address: u64,
        len: u64,
        write: bool,
    ) -> Result<(&Lent, usize), Refused> {
        let exposure = self.keys.find(stag).and_then(|index| self.exposures.get(index as usize)?.as_ref());
        let exposure = exposure.ok_or(Refused::InvalidStag)?;
        address.checked_add(len).ok_or(Refused::Wrap)?;
        let skip = address.checked_sub(exposure.address).ok_or(Refused::Bounds)?;
        exposure.len.checked_sub(skip).filter(|left| len <= *left).ok_or(Refused::Bounds)?;
        let granted = if write { exposure.access.remote_write } else { exposure.access.remote_read };
        if granted { Ok((&exposure.mem, exposure.offset + skip as usize)) } else { Err(Refused::Rights) }
    }

    /// Marks the window's bytes as under way, up to this stream position.
    pub(in super::super) fn keep_until(&mut self, stag: u32, position: u64) {
        if let Some(index) = self.keys.find(stag)
            && let Some(Some(exposure)) = self.exposures.get_mut(index as usize)
        {
            exposure.busy_until = position;
        }
    }

    /// Whether memory of this arena is exposed right now.
    pub(in super::super) fn exposes(&self, arena: ArenaId) -> bool {
        self.exposures.iter().flatten().any(|exposure| exposure.mem.arena() == arena)
    }

    /// Ends the stream: no memory is reachable from here on.
    pub(in super::super) fn clear(&mut self) {
        self.exposures.iter_mut().for_each(|exposure| *exposure = None);
    }
}
