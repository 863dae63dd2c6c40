//! Inputs of a hostile peer, for the fuzz targets of `tests/fuzz`.
//!
//! The inputs are handshake bytes, and writes to the shared memory of a connection that has no socket.

use std::os::fd::AsFd;

use rpcrdma_mempool::{ArenaId, Buf, Line, PeerMapping, PeerRings, SharedMapping};

use super::SoftwareFabric;
use super::connect::table_bytes;
use super::memory::{Layout, Side, Word};
use super::message::SocketMessage;
use super::qp::{SoftwareQp, SoftwareQpState};
use super::region::{self, ExposedMemory};
use super::ring::{RecordHeader, RingProducer};
use super::window::{OwnWindows, PeerWindows};
use crate::connection_manager::ManagedFabric;
use crate::{ConnectParams, QpId};

/// Bytes of each ring.
pub const RING: usize = 4096;
/// Longest message.
pub const MAX_MESSAGE: usize = RING / 2;
/// Windows of each side.
pub const WINDOWS: u32 = 4;
/// Bytes of memory that the peer exposes, as region 0.
pub const EXPOSED: usize = 4096;

/// Checks that a decoded datagram encodes to the same bytes. Refusals are an exception, because their text is escaped
/// for logs.
pub fn handshake(bytes: &[u8]) {
    match SocketMessage::decode(bytes) {
        Ok(SocketMessage::Refused { reason }) => assert!(!reason.contains(char::is_control)),
        Ok(message) => assert_eq!(message.encode()[..], *bytes),
        Err(why) => assert!(!why.is_empty()),
    }
}

/// The parts of a connection's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Progress reports, doorbells, and both rings.
    Rings,
    /// The table of the peer's own windows.
    Table,
    /// The table of this side's windows, which the peer maps too.
    Ours,
    /// Memory that the peer has exposed.
    Exposed,
}

/// The peer's side of a connection.
#[derive(Debug)]
pub struct Peer {
    memory: [SharedMapping; 4],
    rings: PeerRings,
    producer: RingProducer,
    layout: Layout,
}

impl Peer {
    /// Creates the shared memory, which successive connections reuse.
    pub fn new() -> Self {
        let layout = Layout { side: Side::Connector, ring_bytes: RING as u32 };
        let table = table_bytes(WINDOWS).expect("a valid number");
        let memory =
            [layout.bytes(), table, table, EXPOSED].map(|bytes| SharedMapping::create(bytes, "fuzz").expect("memory"));
        let rings = layout.rings(map(&memory[0])).expect("the rings fit in the memory");
        Self { memory, rings, producer: layout.producer(), layout }
    }

    /// Bytes of a part.
    pub fn len(&self, part: Part) -> usize {
        self.memory[part as usize].len()
    }

    /// Creates a connected queue pair with zeroed shared memory, which may expose memory of the arena `exposed`.
    pub fn join(&mut self, fabric: &mut SoftwareFabric, exposed: ArenaId, params: &ConnectParams) -> QpId {
        for part in &self.memory {
            assert!(part.write(0, &[0; 4 * RING][..part.len()]));
        }
        self.producer = self.layout.producer();
        self.rings = self.layout.rings(map(&self.memory[0])).expect("the rings fit in the memory");
        let layout = Layout { side: Side::Acceptor, ..self.layout };
        let ring = layout.rings(map(&self.memory[0])).expect("the rings fit in the memory");
        let windows = OwnWindows::new(map(&self.memory[Part::Ours as usize]), params.windows, 0x5a5a_5a5a);
        let mappings = fabric.common.peer_memory.budget.reserve(region::MAPPINGS_PER_CONNECTION).expect("mappings");
        let (max_message, memory) = (MAX_MESSAGE as u32, ExposedMemory::new(0, mappings));
        let id = fabric.table.insert(|id| SoftwareQp::new(id, layout, ring, windows, params, max_message, memory));
        let region = fabric.common.regions.get(exposed).expect("the arena is registered").id;
        let qp = fabric.table.get_mut(id).expect("the queue pair was just inserted");
        qp.peer_windows = Some(PeerWindows::new(map(&self.memory[Part::Table as usize]), WINDOWS));
        qp.state = SoftwareQpState::Up;
        // This is the state after the arena's descriptor was sent to the peer.
        qp.announced.push((exposed, region));
        let exposed = self.memory[Part::Exposed as usize].fd().try_clone_to_owned().expect("dup");
        let common = &mut fabric.common;
        qp.exposed
            .add(&mut common.peer_memory, 0, exposed, EXPOSED as u64, &common.config)
            .expect("the region is within the budget");
        fabric.start_polling(id.slot);
        id
    }

    /// Writes bytes anywhere, as the peer can. Returns false if they exceed the part.
    pub fn poke(&self, part: Part, at: usize, bytes: &[u8]) -> bool {
        self.memory[part as usize].write(at, bytes)
    }

    /// Reads bytes of a part.
    pub fn peek(&self, part: Part, at: usize, bytes: &mut [u8]) -> bool {
        self.memory[part as usize].read(at, bytes)
    }

    /// Sends a message as an honest peer does. `head` is the peer's progress in this side's ring. Returns false if the
    /// ring has no space.
    pub fn send(&mut self, payload: &[u8], invalidate: Option<u32>, head: u64) -> bool {
        // Like the fabric, the peer reads this side's progress report and enlarges its ring.
        let mut report = [0; 8];
        assert!(self.peek(Part::Rings, size_of::<Line>() * self.layout.lines().peer_report, &mut report));
        let honest = self.producer.acknowledge(u64::from_ne_bytes(report));
        let len = payload.len() as u32;
        if honest
            && !self.producer.has_room(len)
            && let Some(bytes) = self.producer.larger(len)
        {
            assert!(self.rings.move_tx(self.layout.tx_ring(), bytes as usize));
            self.producer.grow(&self.rings.tx(), bytes);
        }
        let has_room = self.producer.has_room(len);
        if honest && has_room {
            return self.producer.push(&self.rings.tx(), payload, || RecordHeader::message(len, invalidate, head));
        }
        false
    }

    /// See [`SoftwareFabric::announce`].
    pub fn announce(&self, len: u32) {
        announce(&self.rings, &self.producer, len, 0);
    }

    /// Position of the peer's progress word in [`Part::Rings`]. A non-zero word after the progress word refuses a
    /// message.
    pub fn report(&self) -> usize {
        size_of::<Line>() * self.layout.lines().own_report
    }
}

impl SoftwareFabric {
    /// Bytes of the smallest Receive in the shared queue. Peers must not get a larger limit. Scans all Receives.
    pub fn smallest_receive(&self) -> Option<usize> {
        self.common.receives.iter().map(Buf::capacity).min()
    }

    /// Announces a message of any length without writing it, as a hostile peer can.
    pub fn announce(&mut self, qp: QpId, len: u32) {
        if let Some(qp) = self.table.get_mut(qp) {
            announce(&qp.ring, &qp.tx, len, qp.rx.taken());
        }
    }
}

fn announce(rings: &PeerRings, producer: &RingProducer, len: u32, head: u64) {
    let (ring, at) = (rings.tx(), producer.sent());
    let RecordHeader { first, second } = RecordHeader::message(len, None, head);
    ring.word(at + 8).set(second);
    ring.word(at).publish(first);
}

impl Default for Peer {
    fn default() -> Self {
        Self::new()
    }
}

fn map(memory: &SharedMapping) -> PeerMapping {
    region::map(memory.fd().as_fd().try_clone_to_owned().expect("dup"), memory.len()).expect("map")
}
