//! A peer's end of a connection on the software fabric.
//!
//! The peer's conduct decides when it sends and receives messages. The server's device reads and writes exposed memory
//! without the peer.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use rpcrdma::Address;
use rpcrdma::fabric::Access;
use rpcrdma::fabric::software::{SoftwareConfig, SoftwareFabric};
use rpcrdma::wire::{Body, Chunks, Flags, ReadSegment, Revision, Segment, Version, View, ViewBody, WriteList};
use rpcrdma_mempool::Lent;
use rpcrdma_tests::{RawPeer, is_filled_with};

use super::wire::PeerEvent;
use crate::device::HOUR;

/// Filler of memory that the server may not write.
const UNTOUCHED: u8 = 0xee;

/// A call that waits to be sent.
struct QueuedCall {
    xid: u32,
    reads: Vec<ReadSegment>,
    writes: Vec<Segment>,
    rpc: Vec<u8>,
}

/// The ring end of a connection.
pub(super) struct Ring {
    peer: RawPeer<SoftwareFabric>,
    /// Filler of the length of the longest chunk.
    untouched: Vec<u8>,
    /// By XID of an outstanding call: its exposed memory.
    exposed: BTreeMap<u32, (Segment, Lent)>,
    /// Exposed memory that no call uses.
    free: Vec<(Segment, Lent)>,
    out: VecDeque<QueuedCall>,
    /// Version 2: number of messages that may be sent. The first message needs no grant.
    may_send: u32,
    /// Whether the CONNPROP has been sent. True from the start in version 1, which has no CONNPROP.
    sent_connprop: bool,
}

impl Ring {
    pub(super) fn connect(address: &Address, version: Version, chunk: usize) -> Self {
        // Disables the fabric's time limits, which do not use simulated time. Without a linger time, a peer that stops
        // receiving notices the end of its connection immediately.
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
            sent_connprop: version == Version::V1,
        }
    }

    /// Whether the connection is established. Once it is, sends the CONNPROP.
    pub(super) fn is_up(&mut self) -> bool {
        self.peer.poll_control();
        if !self.sent_connprop && self.peer.is_up() {
            self.sent_connprop = true;
            self.may_send -= 1;
            self.peer.send_properties();
        }
        self.peer.is_up()
    }

    pub(super) fn is_over(&mut self) -> bool {
        self.peer.poll_control();
        self.peer.is_over()
    }

    /// Number of calls that may start while `outstanding` are outstanding. `granted` is the last reply's credit value.
    pub(super) fn available_credits(&self, outstanding: usize, granted: usize) -> usize {
        match self.peer.version {
            Version::V1 => granted.saturating_sub(outstanding),
            Version::V2 => (self.may_send as usize).saturating_sub(self.out.len()),
        }
    }

    /// Receives messages until their total length reaches `max` bytes. Returns that length.
    pub(super) fn receive(&mut self, max: usize, events: &mut Vec<PeerEvent>) -> usize {
        let mut received = 0;
        while received < max {
            if self.peer.poll_completions(1) == 0 {
                break;
            }
            let Some(message) = self.peer.take_message() else { continue };
            received += message.bytes.len();
            assert_eq!(message.invalidated, None, "no header permits a remote invalidation");
            let view = View::check(&message.bytes, Revision::default()).expect("a message");
            if self.peer.version == Version::V2 && !matches!(view.body(), ViewBody::Error(_)) {
                self.may_send += view.credit() & 0xffff;
            }
            match view.body() {
                ViewBody::Connprop(_) => self.peer.apply_properties(&message.bytes),
                // A pure grant has no further content.
                ViewBody::Nomsg(()) if view.xid() == 0 => {}
                _ => events.push(PeerEvent::Message(message.bytes)),
            }
        }
        received
    }

    /// Exposes `len` bytes of memory for a call. They start with `data`; the rest is filler.
    pub(super) fn expose(&mut self, xid: u32, data: &[u8], len: usize) -> Segment {
        let (segment, memory) = self.free.pop().unwrap_or_else(|| self.peer.expose(&self.untouched, Access::REMOTE));
        assert!(memory.write_at(0, &self.untouched) && memory.write_at(0, data));
        self.exposed.insert(xid, (segment, memory));
        Segment { length: len as u32, ..segment }
    }

    /// Returns the memory's contents, and checks that the server wrote nothing behind them.
    pub(super) fn unexpose(&mut self, xid: u32, len: usize) -> Option<Vec<u8>> {
        let (segment, memory) = self.exposed.remove(&xid)?;
        let mut bytes = vec![0; self.untouched.len()];
        assert!(memory.read_at(0, &mut bytes));
        assert!(is_filled_with(UNTOUCHED, &bytes[len..]), "the memory behind the exposed part must be unchanged");
        self.free.push((segment, memory));
        bytes.truncate(len);
        Some(bytes)
    }

    pub(super) fn call(&mut self, xid: u32, reads: &[ReadSegment], writes: &[Segment], rpc: &[u8]) {
        self.out.push_back(QueuedCall { xid, reads: reads.to_vec(), writes: writes.to_vec(), rpc: rpc.to_vec() });
    }

    pub(super) fn grant_nothing(&mut self) {
        self.peer.credit = 0;
    }

    /// Announces a message of `70 * bytes` bytes, but writes none of it.
    pub(super) fn announce(&mut self, bytes: usize) {
        self.peer.announce(70 * bytes as u32);
    }

    /// Sends queued messages of at most `max` bytes in total. Returns their bytes.
    pub(super) fn send(&mut self, max: usize) -> usize {
        let mut sent = 0;
        while let Some(call) = self.out.pop_front() {
            let QueuedCall { xid, reads, writes, rpc } = &call;
            let counts: &[u32] = if writes.is_empty() { &[] } else { &[1] };
            let body = Body::Msg(Chunks { reads, writes: WriteList { counts, segments: writes }, ..Chunks::NONE });
            let message = self.peer.message(*xid, Flags::NONE, body, rpc);
            if sent + message.len() > max {
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
