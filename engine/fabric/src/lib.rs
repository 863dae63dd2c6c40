//! The RDMA device interface: one trait, and the types that it uses.
//!
//! A [`Fabric`] is one shard's device: its completion queue, its shared receive queue, its queue pairs and its
//! connection manager. One thread owns and drives it. Semantics are those of reliable connected queue pairs (InfiniBand
//! Architecture 1.2.1 chapter 9; RFC 5040). Requests of a queue pair take effect in order, and a Write is visible
//! before the Send behind it. Reads are unordered with later Sends unless fenced. A request can fail because the peer
//! has no Receive posted, or because of its length or access rights. An error flushes the queue pair.
//!
//! # Ownership of memory
//! 1. Memory given to the fabric is *moved* into it. It is a [`Buf`] in [`Fabric::post_recv`] or [`WorkRequest::Send`],
//!    and a clone of a [`Lent`] or [`Frozen`] in other requests. Safe code cannot reach the bytes meanwhile.
//! 2. A buffer posted as a Receive returns in its [`Completion`], as a [`ReceivedBuf`] with the arrived data. A sent
//!    buffer returns to its pool by itself, once the device has finished with it.
//! 3. [`Lent`] memory is usable again when every clone is dropped. The fabric drops its clones at the completion of the
//!    Read or Write. For a bound window it drops them at the proof of revocation. The proof is the completion of a
//!    [`WorkRequest::LocalInvalidate`], a Receive completion whose `invalidated` has the key, or the destruction of the
//!    queue pair.
//! 4. The same rules hold for flushed work requests: the completion comes first, and the memory is returned after it.
//!
//! The *fabrics over sockets* are [`software`] and [`iwarp`]: a Unix or TCP socket sets up each of their connections.
//!
//! | file | holds |
//! | --- | --- |
//! | [`iwarp`] | the fabric over plain TCP, in user space |
//! | [`software`] | the fabric over shared memory of one host |
//! | `verbs` | the fabric over libibverbs and librdmacm, with the feature `verbs` |
//! | [`any`] | the fabric of an address, chosen at run time |
//! | `device_event` | events of a device or its port |
//! | `error` | failures of a fabric or its environment |
//! | `forward` | methods that wrappers of fabrics share, and those that the fabrics over sockets share |
//! | `checks` | checks of work requests, common to all fabrics |
//! | `arrival` | a single message from a poll |
//! | `received`, `receives` | buffers with received data; a queue of posted Receives |
//! | `registrations` | registered arenas of the fabrics over sockets |
//! | [`host`] | `HOST:PORT` addresses |
//! | `window_keys` | the keys of memory windows |
//! | `qp_table` | queue pairs, by slot and generation |
//! | [`socket_file`] | files that Unix sockets are bound to |
//! | `connection_manager` | dialing, accepting and handshakes of the fabrics over sockets |
//! | `epoll_set` | the watched descriptors of a fabric, and a waker |
//! | [`path`] | packet parameters: traffic class, service level, path MTU |
//! | `units` | times and sizes in configuration files |
//! | `stall_timer` | time without progress of the peer |
//! | `accept_balancer` | distribution of connections among fabrics that share an address |
//! | `reaper` | slow destruction, on separate threads |
//! | [`log_limit`] | rate limit of log lines that peers can cause |

// docs.rs sets `docsrs`, so that items show their feature.
#![cfg_attr(docsrs, feature(doc_cfg))]

/// Defines a struct, and its `Default` from the values given with the fields.
macro_rules! with_defaults {
    (
        $(#[$meta:meta])* pub struct $name:ident {
            $($(#[$field_meta:meta])* pub $field:ident: $type:ty = $default:expr,)*
        }
    ) => {
        $(#[$meta])*
        pub struct $name { $($(#[$field_meta])* pub $field: $type,)* }

        impl Default for $name {
            fn default() -> Self {
                Self { $($field: $default,)* }
            }
        }
    };
}

mod accept_balancer;
pub mod any;
mod arrival;
mod checks;
mod connection_manager;
mod device_event;
mod epoll_set;
mod error;
mod forward;
pub mod host;
pub mod iwarp;
pub mod log_limit;
pub mod path;
mod qp_table;
mod reaper;
mod received;
mod receives;
mod registrations;
pub mod socket_file;
pub mod software;
mod stall_timer;
#[cfg(any(test, feature = "testing"))]
#[path = "../tests/harness/mod.rs"]
pub mod testing;
// For the configuration files of this crate and its users.
#[cfg(feature = "units")]
#[doc(hidden)]
pub mod units;
#[cfg(feature = "verbs")]
pub mod verbs;
mod window_keys;

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

pub use self::arrival::{Arrival, Found};
pub use self::device_event::DeviceEvent;
pub use self::error::{FabricError, FabricErrorKind};
pub use self::received::ReceivedBuf;
use rpcrdma_mempool::{Arena, ArenaId, Buf, Frozen, Lent};
use rustix::fd::BorrowedFd;

/// A queue pair, by slot and generation; never names a newer queue pair.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct QpId {
    /// Index into the fabric's table: small, dense, reused.
    pub slot: u32,
    /// Counts the uses of the slot.
    pub generation: u32,
}

impl QpId {
    /// The identifier of no queue pair.
    pub const NONE: Self = Self { slot: u32::MAX, generation: 0 };
}

impl Default for QpId {
    fn default() -> Self {
        Self::NONE
    }
}

impl fmt::Debug for QpId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "qp{}.{}", self.slot, self.generation)
    }
}

/// A fabric-specific address: the part after `soft:`, `iwarp:` or `verbs:`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct FabricAddress(pub String);

with_defaults! {
    /// A device's capabilities, read once when it is opened.
    #[derive(Clone, Debug)]
    #[non_exhaustive]
    pub struct Capabilities {
        /// The fabric: the word before the colon of its addresses.
        pub scheme: &'static str = "",
        /// Human-readable device name.
        pub device: String = String::new(),
        /// Maximum outstanding work requests per send queue.
        pub max_send_wr: u32 = 1024,
        /// Receives that may be posted to one receive queue.
        pub max_recv_wr: u32 = 4096,
        /// Bytes that a Send may carry inside its work request (0: none).
        pub max_inline_data: u32 = 0,
        /// Longest message, in bytes.
        pub max_message: u32 = 1 << 30,
        /// Bytes of private data in a connect request.
        pub max_connect_private_data: usize = 56,
        /// Bytes of private data in an accept or reject.
        pub max_accept_private_data: usize = 196,
        /// RDMA Reads outstanding per queue pair, as initiator and as responder.
        pub max_read_depth: u16 = 16,
        /// Whether the device binds type-2 memory windows and obeys Send With Invalidate.
        pub remote_invalidate: bool = true,
        /// Whether a peer can reach all memory exposed on its connection, whatever its windows. Such memory must come
        /// from an arena that serves no other peer.
        pub exposure_needs_own_arena: bool = false,
        /// Whether the bounds of a window are checked at each access. Otherwise a peer reaches the whole arena of any
        /// window of its connection, while the window is bound.
        pub checks_window_bounds: bool = true,
        /// Whether success proves that a Send or Write reached the peer's memory. A refusal by the peer then fails the
        /// request. Otherwise success means that the data left this side (RFC 5040 §5.5), and a refusal ends the
        /// connection.
        pub acknowledges: bool = true,
    }
}

/// Rights that memory is registered or exposed with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Access {
    /// The peer may RDMA Read it.
    pub remote_read: bool,
    /// The peer may RDMA Write it.
    pub remote_write: bool,
}

impl Access {
    /// This side's work requests only.
    pub const LOCAL: Self = Self { remote_read: false, remote_write: false };
    /// The peer may read.
    pub const REMOTE_READ: Self = Self { remote_read: true, remote_write: false };
    /// The peer may write.
    pub const REMOTE_WRITE: Self = Self { remote_read: false, remote_write: true };
    /// The peer may do both.
    pub const REMOTE: Self = Self { remote_read: true, remote_write: true };

    /// Whether these rights include those of `access`.
    pub(crate) fn permits(self, access: Self) -> bool {
        (self.remote_read || !access.remote_read) && (self.remote_write || !access.remote_write)
    }
}

/// Exposed memory of the peer: steering tag and address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteMemory {
    /// `R_key`, STag, or RFC 8166 `rdma_handle`.
    pub rkey: u32,
    /// First byte, in the addressing of the exposing side (`rdma_offset`).
    pub address: u64,
}

/// A memory window of one queue pair; see [`Fabric::alloc_window`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WindowId {
    /// The queue pair that the window belongs to.
    pub qp: QpId,
    /// Index among the windows of that queue pair.
    pub index: u32,
}

/// The source of an RDMA Write.
#[derive(Clone, Debug)]
pub enum Source {
    /// Memory of this call alone.
    Lent(Lent),
    /// Immutable memory that many calls may send concurrently.
    Frozen(Frozen),
}

/// Bytes between a queue pair and its peer, from [`Fabric::flow`]. They may include headers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Flow {
    /// Bytes moved so far, both directions together. It never decreases.
    pub moved: u64,
    /// Outstanding bytes of posted requests and the peer's Reads, both directions.
    pub queued: u64,
}

/// One element of a posted chain. Offsets and lengths are in bytes, within the named buffer.
#[derive(Debug)]
pub enum WorkRequest {
    /// Sends the buffer's current contents.
    Send {
        /// The message; returns to its pool by itself.
        buf: Buf,
        /// The peer's key that the message invalidates (Send With Invalidate).
        invalidate: Option<u32>,
        /// Wait for earlier Reads of this queue pair.
        fence: bool,
    },
    /// RDMA Write.
    Write {
        /// The local side.
        src: Source,
        /// First byte in the local buffer.
        offset: usize,
        /// Bytes.
        len: usize,
        /// The peer's side.
        remote: RemoteMemory,
    },
    /// RDMA Read.
    Read {
        /// The local side.
        dst: Lent,
        /// First byte in the local buffer.
        offset: usize,
        /// Bytes.
        len: usize,
        /// The peer's side.
        remote: RemoteMemory,
    },
    /// Binds a free window to part of a buffer, with the key of [`Fabric::next_rkey`].
    Bind {
        /// A free window of this queue pair.
        window: WindowId,
        /// The memory to expose.
        mem: Lent,
        /// First byte in the buffer.
        offset: usize,
        /// Bytes, not zero.
        len: usize,
        /// The rights of the peer.
        access: Access,
    },
    /// Revokes a bound window. Do not post this for a window that the peer has invalidated.
    LocalInvalidate {
        /// The window.
        window: WindowId,
    },
}

impl WorkRequest {
    /// Bytes to or from the peer.
    pub fn payload(&self) -> usize {
        match self {
            Self::Send { buf, .. } => buf.len(),
            Self::Write { len, .. } | Self::Read { len, .. } => *len,
            Self::Bind { .. } | Self::LocalInvalidate { .. } => 0,
        }
    }

    /// The opcode of its completion.
    pub fn opcode(&self) -> Opcode {
        match self {
            Self::Send { .. } => Opcode::Send,
            Self::Write { .. } => Opcode::Write,
            Self::Read { .. } => Opcode::Read,
            Self::Bind { .. } => Opcode::Bind,
            Self::LocalInvalidate { .. } => Opcode::LocalInvalidate,
        }
    }
}

/// A work request with its completion options.
#[derive(Debug)]
pub struct Posting {
    /// The value that the completion returns.
    pub wr_id: u64,
    /// If false, only a failure of the request produces a completion.
    pub signaled: bool,
    /// The operation.
    pub wr: WorkRequest,
}

impl Posting {
    /// Releases the memory of a request that has succeeded. Most requests are Sends, so these have their own branch.
    // Always inlined, because a call would copy the request.
    #[inline(always)]
    pub(crate) fn finish(self) {
        match self.wr {
            WorkRequest::Send { buf, .. } => drop(buf),
            other => drop(other),
        }
    }

    /// Releases the memory of a request that is flushed, and returns its completion.
    pub(crate) fn flushed(self, qp: QpId) -> Completion {
        Completion::ended(qp, self.wr_id, self.wr.opcode(), Status::Flushed)
    }
}

/// The kind of work that a completion ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Opcode {
    /// [`WorkRequest::Send`].
    Send,
    /// [`WorkRequest::Write`].
    Write,
    /// [`WorkRequest::Read`].
    Read,
    /// [`WorkRequest::Bind`].
    Bind,
    /// [`WorkRequest::LocalInvalidate`].
    LocalInvalidate,
    /// A message arrived.
    Recv,
}

/// The status of a completion. Names follow `ibv_wc_status`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Status {
    /// The request succeeded.
    Success,
    /// A message exceeded its Receive.
    LocalLength,
    /// The queue pair could not execute the request.
    LocalQpOperation,
    /// A local key, bound or right was wrong.
    LocalProtection,
    /// The queue pair went to error before the request completed.
    Flushed,
    /// A window could not be bound.
    WindowBind,
    /// The peer found the message malformed: too long, or an invalid operation.
    RemoteInvalidRequest,
    /// The peer's key, bound or right refused a Read or Write.
    RemoteAccess,
    /// The peer could not execute the request.
    RemoteOperation,
    /// The peer does not answer.
    RetryExceeded,
    /// The local port is down: sending failed, or the peer is unreachable.
    PortDown,
    /// The peer had no Receive posted for longer than its retries allow.
    RnrRetryExceeded,
    /// The device has failed.
    Fatal,
    /// A code that this engine does not know, for the log.
    Other(u32),
}

impl Status {
    /// True for [`Status::Success`].
    pub fn is_ok(self) -> bool {
        self == Self::Success
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Success => "success",
            Self::LocalLength => "local length error: the message exceeds its Receive",
            Self::LocalQpOperation => "local queue pair operation error",
            Self::LocalProtection => "local protection error",
            Self::Flushed => "work request flushed",
            Self::WindowBind => "memory window bind error",
            Self::RemoteInvalidRequest => "remote invalid request error",
            Self::RemoteAccess => "remote access error",
            Self::RemoteOperation => "remote operation error",
            Self::RetryExceeded => "transport retries exceeded: the peer does not acknowledge",
            Self::PortDown => "local port down, or peer unreachable",
            Self::RnrRetryExceeded => "RNR retries exceeded: the peer has no Receive posted",
            Self::Fatal => "device failed",
            Self::Other(code) => return write!(f, "unknown status {code}"),
        })
    }
}

/// The end of one work request.
#[derive(Debug)]
pub struct Completion {
    /// The value given at post; 0 for Receives.
    pub wr_id: u64,
    /// The queue pair of the request. It may be destroyed already.
    pub qp: QpId,
    /// The kind of work.
    pub opcode: Opcode,
    /// The status. On failure only `wr_id`, `qp` and `status` are valid.
    pub status: Status,
    /// For [`Opcode::Recv`]: the message of `buf.len()` bytes. When a Receive has failed or was flushed, the buffer is
    /// present and empty.
    pub buf: Option<ReceivedBuf>,
    /// For [`Opcode::Recv`]: our key that the peer's Send With Invalidate revoked.
    pub invalidated: Option<u32>,
}

impl Completion {
    /// Completion of a posted request.
    pub(crate) fn ended(qp: QpId, wr_id: u64, opcode: Opcode, status: Status) -> Self {
        Self { wr_id, qp, opcode, status, buf: None, invalidated: None }
    }

    /// Moves ready completions to `out`, until `out` holds `end` completions.
    #[cold]
    pub(crate) fn drain_ready(ready: &mut VecDeque<Self>, out: &mut Vec<Self>, end: usize) {
        let n = ready.len().min(end.saturating_sub(out.len()));
        out.extend(ready.drain(..n));
    }
}

with_defaults! {
    /// Parameters that both sides exchange at connect.
    #[derive(Clone, Debug)]
    pub struct ConnectParams {
        /// Opaque to the fabric (RFC 8797 for version 1).
        pub private_data: Vec<u8> = Vec::new(),
        /// Depth of the send queue.
        pub send_queue_depth: u32 = 256,
        /// Depth of a private receive queue; `None` for the shared one.
        pub own_receive_queue: Option<u32> = None,
        /// Windows that may be bound at a time.
        pub windows: u32 = 256,
        /// Retries of the *peer* while we have no Receive posted: 0 to 6, or 7 for unlimited, within the limits of the
        /// peer's fabric. Over TCP the peer's messages wait at this side, for `retry_timeout` at most.
        pub rnr_retry: u8 = 0,
        /// RDMA Reads that we may have outstanding.
        pub initiator_depth: u16 = 16,
        /// RDMA Reads of the peer that we serve concurrently.
        pub responder_resources: u16 = 16,
    }
}

impl ConnectParams {
    /// The [`rnr_retry`](Self::rnr_retry) for unlimited retries.
    pub const UNLIMITED_RNR_RETRY: u8 = 7;
}

/// A connect request that waits for [`Fabric::accept`] or [`Fabric::reject`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RequestId(pub u64);

/// An event of a connection or of the device.
#[derive(Debug)]
pub enum ControlEvent {
    /// A peer requests a connection; accept or reject it.
    ConnectRequest {
        /// The request to accept or reject.
        request: RequestId,
        /// The peer's private data.
        private_data: Vec<u8>,
        /// The peer: address and port, or process and user.
        peer: String,
    },
    /// The connection is established, and both directions may be used.
    Established {
        /// The queue pair.
        qp: QpId,
        /// The acceptor's private data (empty at the acceptor).
        private_data: Vec<u8>,
    },
    /// The peer rejected the connect request.
    Rejected {
        /// The queue pair that was being connected. Destroy it.
        qp: QpId,
        /// The peer's private data.
        private_data: Vec<u8>,
    },
    /// The connection could not be established.
    ConnectFailed {
        /// The queue pair that was being connected. Destroy it.
        qp: QpId,
        /// The cause.
        error: FabricError,
    },
    /// The connection ended, by either side or by failure. Everything posted has been or will now be flushed. Destroy
    /// the queue pair after its last completion.
    Disconnected {
        /// The queue pair.
        qp: QpId,
        /// The side or failure that ended it.
        cause: Disconnect,
        /// The cause in words, for a log.
        reason: String,
    },
    /// An event of the device. Connections that end because of it have their own events.
    Device(DeviceEvent),
}

/// The side or failure that ended a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Disconnect {
    /// The peer has closed the connection, or its process has ended.
    Peer,
    /// This side has closed the connection.
    Local,
    /// The peer violated the fabric's protocol or its access rights.
    Violation,
    /// The peer refused a request without naming it. The peer is at fault if it misstated its memory.
    Refused,
    /// The device, or the path to the peer, has failed.
    Failure,
    /// The device of this side was removed or has failed.
    Device,
    /// The peer did not answer while the local port was down.
    PortDown,
}

/// Why a chain was not posted completely. The rest is still in the caller's vector, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PostError {
    /// The send queue is full; post the rest after a completion.
    QueueFull,
    /// The queue pair is unknown, not connected yet, or destroyed.
    NotConnected,
    /// The first remaining request is invalid: its memory, bounds, or window state.
    Invalid(&'static str),
}

/// Counters that every fabric keeps, since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(default))]
#[non_exhaustive]
pub struct FabricStats {
    /// Work requests taken by [`Fabric::post_send`].
    #[cfg_attr(feature = "serde", serde(rename = "work_requests"))]
    pub posts: u64,
    /// Notifications of new work, to the device or the peer.
    pub doorbells: u64,
    /// Work requests posted with `signaled`.
    #[cfg_attr(feature = "serde", serde(rename = "work_requests_signalled"))]
    pub signaled: u64,
    /// Receives posted.
    #[cfg_attr(feature = "serde", serde(rename = "receives"))]
    pub recv_posts: u64,
    /// Messages without a Receive.
    pub receiver_not_ready: u64,
    /// Reads, Writes and Sends-With-Invalidate that a key, bound or right refused.
    pub access_refused: u64,
    /// Times that a peer broke the fabric's own rules.
    pub peer_violations: u64,
    /// Connect requests that the fabric itself refused: from other users, malformed, or too many at a time.
    #[cfg_attr(feature = "serde", serde(rename = "connect_requests_refused"))]
    pub requests_refused: u64,
    /// System calls that moved bytes of messages; 0 where messages need none.
    pub system_calls: u64,
    /// System calls for bytes of messages that found none.
    pub empty_system_calls: u64,
    /// Times that the device's port went down.
    pub port_downs: u64,
    /// Times that the device was removed or failed.
    pub device_failures: u64,
}

/// One shard's RDMA device. The module documentation has the rules of memory ownership.
///
/// In each turn, call [`poll_cq`](Self::poll_cq), and [`post_send`](Self::post_send) at most once per queue pair. Call
/// [`post_recv`](Self::post_recv) in chains, and [`poll_control`](Self::poll_control) at intervals. To sleep, call
/// [`arm`](Self::arm), then `poll_cq` once more, and [`wait`](Self::wait) if that found nothing.
pub trait Fabric: Sized {
    /// A bound address. Several shards' fabrics may share it. Each connect request then goes to the fabric with the
    /// fewest connections, whichever fabric polls the request first.
    type Listener: Clone + Send + 'static;

    /// The device's capabilities.
    fn capabilities(&self) -> &Capabilities;
    /// Counters.
    fn stats(&self) -> FabricStats;

    /// Makes an arena's memory usable in work requests. Registering it twice is [`FabricErrorKind::Misuse`]. On the
    /// software fabric, [external memory](rpcrdma_mempool::ExternalMemory) is for this side's work requests only: with
    /// remote rights it is [`FabricErrorKind::Unsupported`].
    fn register(&mut self, arena: &Arena, access: Access) -> Result<(), FabricError>;
    /// Undoes [`register`](Self::register).
    fn deregister(&mut self, arena: ArenaId) -> Result<(), FabricError>;

    /// Binds an address.
    fn bind(address: &FabricAddress) -> Result<Self::Listener, FabricError>;
    /// Starts to take connect requests from a bound address.
    fn listen(&mut self, listener: &Self::Listener) -> Result<(), FabricError>;
    /// Stops taking connect requests; established connections stay.
    fn unlisten(&mut self);
    /// Starts to connect; a [`ControlEvent`] reports the outcome. Nothing can be sent before `Established`.
    fn connect(&mut self, address: &FabricAddress, params: &ConnectParams) -> Result<QpId, FabricError>;
    /// Accepts a connect request; `Established` follows, or `Disconnected`.
    fn accept(&mut self, request: RequestId, params: &ConnectParams) -> Result<QpId, FabricError>;
    /// Rejects a connect request.
    fn reject(&mut self, request: RequestId, private_data: &[u8]);
    /// Ends the connection in order. Earlier requests are executed if the peer permits; the rest is flushed.
    fn disconnect(&mut self, qp: QpId);
    /// Flushes posted requests, then destroys the queue pair and returns its memory.
    fn destroy_qp(&mut self, qp: QpId);
    /// Drives connection management and appends its events. Makes system calls, so call it at intervals, not each turn.
    fn poll_control(&mut self, events: &mut Vec<ControlEvent>);

    /// Allocates a free window.
    fn alloc_window(&mut self, qp: QpId) -> Result<WindowId, FabricError>;
    /// The key of this free window's next [`WorkRequest::Bind`].
    fn next_rkey(&self, window: WindowId) -> u32;
    /// The address of byte `offset` of this memory for the peer.
    fn remote_address(&self, mem: &Lent, offset: usize) -> u64;

    /// Posts a chain of Receives to the shared or a private queue. Takes as many from the front of `bufs` as the queue
    /// has room for, and returns their number. Each buffer receives up to its capacity. Stops at unregistered memory.
    fn post_recv(&mut self, qp: Option<QpId>, bufs: &mut Vec<Buf>) -> usize;
    /// Makes the shared queue use present Receives before later ones, so that Receives of another size replace them.
    /// Queues that are used in posting order need nothing.
    fn fence_receives(&mut self) {}
    /// Posts a chain, in order, with one doorbell. Removes posted requests from the front of `chain`.
    fn post_send(&mut self, qp: QpId, chain: &mut Vec<Posting>) -> Result<(), PostError>;
    /// Posts a Send or Write with immediate data, for tests. This protocol does not use immediate data, but a test can
    /// imitate a peer that does. False where the fabric does not support or accept it.
    #[doc(hidden)]
    fn post_immediate(&mut self, qp: QpId, posting: Posting, immediate: u32) -> bool {
        let _ = (qp, posting, immediate);
        false
    }
    /// Whether memory of posted requests may still be in use. Always true for a device that cannot report this. Call it
    /// at intervals, not for each message.
    fn holds_sends(&mut self, _qp: QpId) -> bool {
        true
    }
    /// Byte progress of a queue pair, which distinguishes slow peers from stopped ones. `None` where the device does
    /// not report it. Call it at intervals, not for each message.
    fn flow(&mut self, _qp: QpId) -> Option<Flow> {
        None
    }
    /// Round-trip time to the peer. `None` where the device does not report it. Call it at intervals.
    fn round_trip(&mut self, _qp: QpId) -> Option<Duration> {
        None
    }
    /// Appends up to `max` completions and returns their number. Never blocks. Makes system calls only where nothing
    /// else reports arrivals. Over TCP these are a bounded number per turn, and for idle connections only in every 16th
    /// turn.
    fn poll_cq(&mut self, out: &mut Vec<Completion>, max: usize) -> usize;
    /// Polls as [`poll_cq`](Self::poll_cq) does, but returns a single message instead of appending its completion.
    #[inline]
    fn poll_message(&mut self, out: &mut Vec<Completion>, max: usize) -> Found {
        let count = self.poll_cq(out, max);
        Found::of_last(out, count)
    }

    /// Makes completions and control events wake the next [`wait`](Self::wait).
    fn arm(&mut self);
    /// Sleeps until a completion, a control event, the waker or the time-out. False if there is no control event, so
    /// that [`poll_control`](Self::poll_control) can wait until its interval has passed.
    fn wait(&mut self, timeout: Option<Duration>) -> bool;
    /// Wakes [`wait`](Self::wait) from another thread.
    fn waker(&self) -> Waker;
    /// The descriptor of [`wait`](Self::wait), for an external event loop. While the device is [armed](Self::arm) it is
    /// readable when a wait would return immediately.
    fn descriptor(&self) -> BorrowedFd<'_>;
    /// Longest sleep on the descriptor of an armed device; `None` if unlimited. [`wait`](Self::wait) observes this
    /// limit itself.
    fn longest_wait(&self) -> Option<Duration>;
}

/// Wakes a sleeping fabric from another thread; see [`Fabric::waker`].
#[derive(Clone, Debug)]
pub struct Waker(std::sync::Arc<rustix::fd::OwnedFd>);

impl Waker {
    /// Wraps an eventfd.
    pub fn new(eventfd: std::sync::Arc<rustix::fd::OwnedFd>) -> Self {
        Self(eventfd)
    }

    /// Ends the current or the next wait. Makes a system call.
    pub fn wake(&self) {
        // The write can only fail while the counter of the eventfd is at its maximum, and then the sleeper wakes
        // anyway.
        let _ = rustix::io::write(&*self.0, &1u64.to_ne_bytes());
    }
}

/// Locks a mutex of this crate. Poisoning is ignored, because no code panics halfway through a locked change.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
