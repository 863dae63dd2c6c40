//! A peer's end of a connection on the software fabric.
//!
//! The peer's conduct decides when it sends and receives messages. The server's device reads and writes exposed memory
//! on its own.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use rpcrdma::Address;
use rpcrdma::fabric::Access;
use rpcrdma::fabric::software::{SoftwareConfig, SoftwareFabric};
use rpcrdma::wire::{Body, Chunks, Flags, ReadSegment, Revision, Segment, Version, View, ViewBody, WriteList};
use rpcrdma_mempool::Lent;
use rpcrdma_tests::{RawPeer, filled};

use super::wire::PeerEvent;
use crate::device::HOUR;

/// Filler of memory that the server may not write.
const UNTOUCHED: u8 = 0xee;

/// A queued call.
struct Call {
    xid: u32,
    reads: Vec<ReadSegment>,
    writes: Vec<Segment>,
    rpc: Vec<u8>,
}

/// The ring end of a connection.
pub(super) struct Ring {
    peer: RawPeer<SoftwareFabric>,
    /// As long as the longest chunk.
    untouched: Vec<u8>,
    /// Memory exposed for a call each, and memory available for the next one.
    exposed: BTreeMap<u32, (Segment, Lent)>,
    free: Vec<(Segment, Lent)>,
    out: VecDeque<Call>,
    /// Version 2: messages that the server has granted and that are unsent. The first is free.
    may_send: u32,
    introduced: bool,
}

impl Ring {
    pub(super) fn connect(address: &Address, version: Version, chunk: usize) -> Self {
        // Time limits of the fabric use another clock. A peer that takes nothing must notice the end at once.
        let config = SoftwareConfig {
            linger: Duration::ZERO,
            handshake_timeout: HOUR,
            retry_timeout: HOUR,
            ..SoftwareConfig::default()
        };
        let fabric = SoftwareFabric::new(config).expect("a device");
        let mut peer = RawPeer::begin_on(fabric, address, b"").expect("the server listens");
        peer.version = version;
        peer.offers.windowed_credits = false;
        let (exposed, free, out) = (BTreeMap::new(), Vec::new(), VecDeque::new());
        Self {
            peer,
            untouched: vec![UNTOUCHED; chunk],
            exposed,
            free,
            out,
            may_send: 1,
            introduced: version == Version::V1,
        }
    }

    pub(super) fn is_up(&mut self) -> bool {
        self.peer.control();
        if !self.introduced && self.peer.is_up() {
            self.introduced = true;
            self.may_send -= 1;
            self.peer.send_properties();
        }
        self.peer.is_up()
    }

    pub(super) fn is_over(&mut self) -> bool {
        self.peer.control();
        self.peer.is_over()
    }

    /// Calls that may start with `under_way` outstanding. `granted` is the credit value of the last reply.
    pub(super) fn room(&self, under_way: usize, granted: usize) -> usize {
        match self.peer.version {
            Version::V1 => granted.saturating_sub(under_way),
            Version::V2 => (self.may_send as usize).saturating_sub(self.out.len()),
        }
    }

    /// Receives messages of at least `most` bytes in total, if there are as many. Returns their bytes.
    pub(super) fn receive(&mut self, most: usize, events: &mut Vec<PeerEvent>) -> usize {
        let mut taken = 0;
        while taken < most {
            if self.peer.take(1) == 0 {
                break;
            }
            let Some(message) = self.peer.take_message() else { continue };
            taken += message.bytes.len();
            assert_eq!(message.invalidated, None, "an invalidation that was not allowed");
            let view = View::check(&message.bytes, Revision::default()).expect("a message");
            if self.peer.version == Version::V2 && !matches!(view.body(), ViewBody::Error(_)) {
                self.may_send += view.credit() & 0xffff;
            }
            match view.body() {
                ViewBody::Connprop(_) => self.peer.apply_properties(&message.bytes),
                // A pure grant is no event.
                ViewBody::Nomsg(()) if view.xid() == 0 => {}
                _ => events.push(PeerEvent::Message(message.bytes)),
            }
        }
        taken
    }

    /// Exposes `len` bytes of memory for a call, with these contents.
    pub(super) fn expose(&mut self, xid: u32, data: &[u8], len: usize) -> Segment {
        let (segment, memory) = self.free.pop().unwrap_or_else(|| self.peer.expose(&self.untouched, Access::REMOTE));
        assert!(memory.write_at(0, &self.untouched) && memory.write_at(0, data));
        self.exposed.insert(xid, (segment, memory));
        Segment { length: len as u32, ..segment }
    }

    /// Returns the contents, and checks that nothing beyond their length was written.
    pub(super) fn unexpose(&mut self, xid: u32, len: usize) -> Option<Vec<u8>> {
        let (segment, memory) = self.exposed.remove(&xid)?;
        let mut bytes = vec![0; self.untouched.len()];
        assert!(memory.read_at(0, &mut bytes));
        assert!(filled(UNTOUCHED, &bytes[len..]), "beyond the memory that was exposed");
        self.free.push((segment, memory));
        bytes.truncate(len);
        Some(bytes)
    }

    pub(super) fn call(&mut self, xid: u32, reads: &[ReadSegment], writes: &[Segment], rpc: &[u8]) {
        self.out.push_back(Call { xid, reads: reads.to_vec(), writes: writes.to_vec(), rpc: rpc.to_vec() });
    }

    pub(super) fn grant_nothing(&mut self) {
        self.peer.credit = 0;
    }

    /// Announces a message, and writes none of it.
    pub(super) fn announce(&mut self, bytes: usize) {
        self.peer.announce(70 * bytes as u32);
    }

    /// Sends messages of at most `most` bytes in total. Returns their bytes.
    pub(super) fn send(&mut self, most: usize) -> usize {
        let mut sent = 0;
        while let Some(call) = self.out.pop_front() {
            let Call { xid, reads, writes, rpc } = &call;
            let counts: &[u32] = if writes.is_empty() { &[] } else { &[1] };
            let body = Body::Msg(Chunks { reads, writes: WriteList { counts, segments: writes }, ..Chunks::NONE });
            let message = self.peer.message(*xid, Flags::NONE, body, rpc);
            if sent + message.len() > most {
                self.out.push_front(call);
                break;
            }
            sent += message.len();
            self.may_send = self.may_send.saturating_sub(1);
            self.peer.send(&message);
        }
        sent
    }
}
