//! A shard's parts without a device, for tests.

use std::fs::File;
use std::sync::Arc;
use std::time::Duration;

use rustix::fd::{AsFd, BorrowedFd, OwnedFd};

use rpcrdma_mempool::{Arena, ArenaId, Buf, Lent, PagePolicy};

use super::SimulatedTime;
use super::connection::{Conn, Stage};
use super::context::ShardContext;
use crate::config::{Config, LimitsConfig, MemoryConfig};
use crate::fabric::{
    Access, Capabilities, Completion, ConnectParams, ControlEvent, Fabric, FabricAddress, FabricError, FabricErrorKind,
    FabricStats, PostError, Posting, QpId, ReceivedBuf, RequestId, Waker, WindowId, WorkRequest,
};
use crate::proto::{ConnConfig, Connection, CreditMode, DecodedHeader, ReceivedMessage};

/// A device that records posted work requests, and completes none.
pub(super) struct NoDevice {
    /// A descriptor that is never readable.
    never: OwnedFd,
    capabilities: Capabilities,
    /// All posted work requests, in order.
    pub(super) posted: Vec<Posting>,
    windows: u32,
    /// Whether the device has read the memory of all Sends, although it reports no completion.
    pub(super) has_read_sends: bool,
    /// Connect requests to report, one in each poll.
    pub(super) connect_requests: usize,
    /// Number of rejected requests. Each advances the time by the duration in `reject_time`.
    pub(super) rejected: usize,
    pub(super) reject_time: Option<(SimulatedTime, Duration)>,
}

impl Default for NoDevice {
    fn default() -> Self {
        let never = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).expect("a descriptor");
        let capabilities = Capabilities::default();
        Self {
            never,
            capabilities,
            posted: Vec::new(),
            windows: 0,
            has_read_sends: false,
            connect_requests: 0,
            rejected: 0,
            reject_time: None,
        }
    }
}

impl Fabric for NoDevice {
    type Listener = ();

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn stats(&self) -> FabricStats {
        FabricStats::default()
    }

    fn register(&mut self, _: &Arena, _: Access) -> Result<(), FabricError> {
        Ok(())
    }

    fn deregister(&mut self, _: ArenaId) -> Result<(), FabricError> {
        Ok(())
    }

    fn holds_sends(&mut self, _: QpId) -> bool {
        !self.has_read_sends
    }

    fn bind(_: &FabricAddress) -> Result<(), FabricError> {
        Ok(())
    }

    fn listen(&mut self, (): &()) -> Result<(), FabricError> {
        Ok(())
    }

    fn unlisten(&mut self) {}

    fn connect(&mut self, _: &FabricAddress, _: &ConnectParams) -> Result<QpId, FabricError> {
        Err(FabricError::new(FabricErrorKind::Misuse, "there is no device"))
    }

    fn accept(&mut self, _: RequestId, _: &ConnectParams) -> Result<QpId, FabricError> {
        Err(FabricError::new(FabricErrorKind::Misuse, "there is no device"))
    }

    fn reject(&mut self, _: RequestId, _: &[u8]) {
        self.rejected += 1;
        if let Some((time, reject_time)) = &self.reject_time {
            time.advance(*reject_time);
        }
    }

    fn disconnect(&mut self, _: QpId) {}

    fn destroy_qp(&mut self, _: QpId) {}

    fn poll_control(&mut self, events: &mut Vec<ControlEvent>) {
        let Some(rest) = self.connect_requests.checked_sub(1) else { return };
        self.connect_requests = rest;
        let request = RequestId(rest as u64);
        events.push(ControlEvent::ConnectRequest { request, private_data: Vec::new(), peer: "x".into() });
    }

    fn alloc_window(&mut self, qp: QpId) -> Result<WindowId, FabricError> {
        self.windows += 1;
        Ok(WindowId { qp, index: self.windows })
    }

    fn next_rkey(&self, window: WindowId) -> u32 {
        window.index
    }

    fn remote_address(&self, mem: &Lent, offset: usize) -> u64 {
        (mem.start() + offset) as u64
    }

    fn post_recv(&mut self, _: Option<QpId>, bufs: &mut Vec<Buf>) -> usize {
        let count = bufs.len();
        bufs.clear();
        count
    }

    fn post_send(&mut self, _: QpId, chain: &mut Vec<Posting>) -> Result<(), PostError> {
        self.posted.append(chain);
        Ok(())
    }

    fn poll_cq(&mut self, _: &mut Vec<Completion>, _: usize) -> usize {
        0
    }

    fn arm(&mut self) {}

    fn wait(&mut self, _: Option<Duration>) -> bool {
        false
    }

    fn waker(&self) -> Waker {
        // No test sleeps here, so any writable file suffices.
        let file = File::options().write(true).open("/dev/null").expect("the null device");
        Waker::new(Arc::new(file.into()))
    }

    fn descriptor(&self) -> BorrowedFd<'_> {
        self.never.as_fd()
    }

    fn longest_wait(&self) -> Option<Duration> {
        None
    }
}

impl NoDevice {
    /// Messages sent since the last call.
    pub(super) fn take_sent(&mut self) -> Vec<Vec<u8>> {
        let sends = self.posted.drain(..).filter_map(|posting| match posting.wr {
            WorkRequest::Send { buf, .. } => Some(buf.to_vec()),
            _ => None,
        });
        sends.collect()
    }
}

/// Shared state of a shard's parts, with little memory.
pub(super) fn context(mut config: Config) -> ShardContext<NoDevice> {
    (config.memory.pages, config.debug.prefault) = (PagePolicy::Small, false);
    let mut cx = ShardContext::open(NoDevice::default(), config, true).expect("memory");
    cx.refill();
    cx
}

/// A configuration with few buffers.
pub(super) fn small_config() -> Config {
    Config {
        memory: MemoryConfig {
            receives: 256,
            message_buffers: 64,
            small_buffers: 64,
            bulk_buffers: vec![(4096, 8)],
            long_buffers: vec![(65536, 4)],
            ..MemoryConfig::default()
        },
        limits: LimitsConfig { credits: 16, ..LimitsConfig::default() },
        ..Config::default()
    }
}

/// An open version 1 connection.
pub(super) fn open_conn(slot: u32, server: bool) -> Box<Conn> {
    let mut conn = new_conn(slot, server);
    conn.enter(Stage::Open);
    conn.refresh();
    conn
}

/// A version 1 connection, not established yet.
pub(super) fn new_conn(slot: u32, server: bool) -> Box<Conn> {
    let config = ConnConfig {
        credit_mode: CreditMode::V1,
        server,
        accepts_calls: server,
        credits: 16,
        max_calls: if server { 0 } else { 16 },
        ..ConnConfig::default()
    };
    Box::new(Conn::new(QpId { slot, generation: 0 }, Connection::new(config)))
}

/// A message received in this buffer.
pub(super) fn received(mut buf: Buf, bytes: &[u8]) -> ReceivedBuf {
    buf[..bytes.len()].copy_from_slice(bytes);
    ReceivedBuf::new(buf, bytes.len())
}

/// Lets the protocol handle a message; returns the call or reply that it completes, and its header.
pub(super) fn handle(conn: &mut Conn, message: &[u8]) -> (ReceivedMessage, DecodedHeader) {
    let header = conn.proto.layouts().decode(message);
    let received = conn.proto.handle_message(message, header.as_ref());
    (received, header.unwrap_or(*conn.proto.header()))
}

/// A version 1 message without chunks (RFC 8166 §4.2): header, then the RPC message, whose first word is the XID.
pub(super) fn message(credits: u32, rpc: &[u32]) -> Vec<u8> {
    message_with_lists(credits, &[0, 0, 0], rpc)
}

/// A version 1 message with chunk lists, as words.
pub(super) fn message_with_lists(credits: u32, lists: &[u32], rpc: &[u32]) -> Vec<u8> {
    let header = [rpc[0], 1, credits, 0];
    header.iter().chain(lists).chain(rpc).flat_map(|word| word.to_be_bytes()).collect()
}

/// The RPC header of a call (RFC 5531 §9) of program 1, version 1.
pub(super) fn call(xid: u32, procedure: u32) -> [u32; 10] {
    [xid, 0, 2, 1, 1, procedure, 0, 0, 0, 0]
}

/// The RPC header of a successful reply.
pub(super) fn reply(xid: u32) -> [u32; 6] {
    [xid, 1, 0, 0, 0, 0]
}
