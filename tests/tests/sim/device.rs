//! The device of every shard: a fabric below `Chaos` and `Probe`.

use std::rc::Rc;
use std::time::Duration;

use rustix::fd::BorrowedFd;

use rpcrdma::fabric::iwarp::memory::{MemoryFabric, MemoryListener};
use rpcrdma::fabric::iwarp::{Crc, FpduSize, IwarpFabricConfig};
use rpcrdma::fabric::software::{SoftwareConfig, SoftwareFabric, SoftwareListener};
use rpcrdma::fabric::testing::chaos::{Chaos, ChaosConfig};
use rpcrdma::fabric::{
    Access, Capabilities, Completion, ConnectParams, ControlEvent, Fabric, FabricAddress, FabricError, FabricStats,
    Flow, PostError, Posting, QpId, RequestId, Waker, WindowId,
};
use rpcrdma::{Address, Config};
use rpcrdma_mempool::{Arena, ArenaId, Buf, Lent};

use crate::caller::Addresses;
use crate::journal::Journal;
use crate::probe::Probe;
use crate::sizes::SmallestReceive;

pub(crate) type Device = Probe<Chaos<Medium>>;

/// Disables a time limit of a fabric, which does not use simulated time. Longer than any run.
pub(crate) const HOUR: Duration = Duration::from_secs(3600);

/// The fabric of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FabricKind {
    Software,
    /// iWARP connections without sockets.
    ///
    /// A message without a Receive waits for one, because every end lets its peer retry without limit. Chaos, above the
    /// fabric, fails requests also in ways in which no iWARP device does, for example by refusing a Write. The engine
    /// must tolerate them.
    Endpoint(Crc, FpduSize),
}

impl FabricKind {
    /// Chooses endpoints for one of every four seeds. Uses the seed itself, not a number drawn from it.
    pub(crate) fn from_seed(seed: u64) -> Self {
        let crc = if seed & 4 == 0 { Crc::Never } else { Crc::Always };
        let size = if seed & 8 == 0 { FpduSize::Segment } else { FpduSize::Longest };
        if seed & 3 == 3 { Self::Endpoint(crc, size) } else { Self::Software }
    }

    /// Address prefix, without the colon.
    pub(crate) fn scheme(self) -> &'static str {
        match self {
            Self::Software => "soft",
            Self::Endpoint(..) => "iwarp",
        }
    }

    /// Name of the fabric in the tally.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Software => "runs over the software fabric",
            Self::Endpoint(..) => "runs over iWARP endpoints",
        }
    }

    /// Opens a device without chaos. All time limits of the device except `linger` are disabled.
    pub(crate) fn open_without_chaos(self, linger: Duration, iwarp: IwarpFabricConfig, seed: u64) -> Medium {
        let (handshake_timeout, retry_timeout) = (HOUR, HOUR);
        let config = SoftwareConfig { linger, handshake_timeout, retry_timeout, ..SoftwareConfig::default() };
        self.open(&config, iwarp, seed)
    }

    fn open(self, software: &SoftwareConfig, iwarp: IwarpFabricConfig, seed: u64) -> Medium {
        match self {
            Self::Software => Medium::Software(SoftwareFabric::new(software.clone()).expect("a device")),
            Self::Endpoint(crc, fpdu_size) => {
                let config = IwarpFabricConfig { crc, fpdu_size, ..iwarp };
                Medium::Endpoint(MemoryFabric::new(config, seed).expect("a device"))
            }
        }
    }
}

/// Opens a probed device. `serves`: its shard accepts calls. `has_hostile_clients`: hostile peers may connect.
pub(crate) fn device(
    kind: FabricKind,
    (config, software): (&Config, &SoftwareConfig),
    chaos: ChaosConfig,
    journal: &Journal,
    addresses: Option<&Rc<Addresses>>,
    (serves, has_hostile_clients): (bool, bool),
) -> Device {
    // Inverts the seed, because the medium must not draw the same numbers as chaos.
    let medium = kind.open(software, config.iwarp(), !chaos.seed);
    Probe::new(
        Chaos::new(medium, chaos),
        journal.clone(),
        config,
        addresses.map(|all| &**all),
        (serves, has_hostile_clients),
    )
}

pub(crate) fn listener(address: &Address) -> MediumListener {
    Medium::bind(&FabricAddress(address.to_string())).expect("a free address")
}

/// Either fabric.
#[expect(clippy::large_enum_variant, reason = "a run has a few of them, and moves none")]
pub(crate) enum Medium {
    Software(SoftwareFabric),
    Endpoint(MemoryFabric),
}

/// A bound address of either fabric.
#[derive(Clone, Debug)]
pub(crate) enum MediumListener {
    Software(SoftwareListener),
    Endpoint(MemoryListener),
}

/// Evaluates an expression with the fabric of either variant.
macro_rules! with_fabric {
    ($self:expr, $fabric:ident => $expression:expr) => {
        match $self {
            Self::Software($fabric) => $expression,
            Self::Endpoint($fabric) => $expression,
        }
    };
}

impl SmallestReceive for Chaos<Medium> {
    fn smallest_receive(&mut self) -> Option<usize> {
        match self.inner() {
            Medium::Software(fabric) => fabric.smallest_receive(),
            Medium::Endpoint(fabric) => fabric.smallest_receive(),
        }
    }
}

impl Fabric for Medium {
    type Listener = MediumListener;

    fn capabilities(&self) -> &Capabilities {
        with_fabric!(self, fabric => fabric.capabilities())
    }

    fn stats(&self) -> FabricStats {
        with_fabric!(self, fabric => fabric.stats())
    }

    fn register(&mut self, arena: &Arena, access: Access) -> Result<(), FabricError> {
        with_fabric!(self, fabric => fabric.register(arena, access))
    }

    fn deregister(&mut self, arena: ArenaId) -> Result<(), FabricError> {
        with_fabric!(self, fabric => fabric.deregister(arena))
    }

    /// Binds an address that starts with its fabric's scheme.
    fn bind(address: &FabricAddress) -> Result<MediumListener, FabricError> {
        match address.0.parse() {
            Ok(Address::Soft(name)) => SoftwareFabric::bind(&name).map(MediumListener::Software),
            Ok(Address::Iwarp(name)) => MemoryFabric::bind(&name).map(MediumListener::Endpoint),
            other => panic!("unexpected address: {other:?}"),
        }
    }

    fn listen(&mut self, listener: &MediumListener) -> Result<(), FabricError> {
        match (self, listener) {
            (Self::Software(fabric), MediumListener::Software(listener)) => fabric.listen(listener),
            (Self::Endpoint(fabric), MediumListener::Endpoint(listener)) => fabric.listen(listener),
            (_, other) => panic!("listener of another fabric: {other:?}"),
        }
    }

    fn unlisten(&mut self) {
        with_fabric!(self, fabric => fabric.unlisten())
    }

    fn connect(&mut self, address: &FabricAddress, params: &ConnectParams) -> Result<QpId, FabricError> {
        with_fabric!(self, fabric => fabric.connect(address, params))
    }

    fn accept(&mut self, request: RequestId, params: &ConnectParams) -> Result<QpId, FabricError> {
        with_fabric!(self, fabric => fabric.accept(request, params))
    }

    fn reject(&mut self, request: RequestId, private_data: &[u8]) {
        with_fabric!(self, fabric => fabric.reject(request, private_data))
    }

    fn disconnect(&mut self, qp: QpId) {
        with_fabric!(self, fabric => fabric.disconnect(qp))
    }

    fn holds_sends(&mut self, qp: QpId) -> bool {
        with_fabric!(self, fabric => fabric.holds_sends(qp))
    }

    fn flow(&mut self, qp: QpId) -> Option<Flow> {
        with_fabric!(self, fabric => fabric.flow(qp))
    }

    fn destroy_qp(&mut self, qp: QpId) {
        with_fabric!(self, fabric => fabric.destroy_qp(qp))
    }

    fn poll_control(&mut self, events: &mut Vec<ControlEvent>) {
        with_fabric!(self, fabric => fabric.poll_control(events))
    }

    fn alloc_window(&mut self, qp: QpId) -> Result<WindowId, FabricError> {
        with_fabric!(self, fabric => fabric.alloc_window(qp))
    }

    fn next_rkey(&self, window: WindowId) -> u32 {
        with_fabric!(self, fabric => fabric.next_rkey(window))
    }

    fn remote_address(&self, mem: &Lent, offset: usize) -> u64 {
        with_fabric!(self, fabric => fabric.remote_address(mem, offset))
    }

    fn post_recv(&mut self, qp: Option<QpId>, bufs: &mut Vec<Buf>) -> usize {
        with_fabric!(self, fabric => fabric.post_recv(qp, bufs))
    }

    fn fence_receives(&mut self) {
        with_fabric!(self, fabric => fabric.fence_receives())
    }

    fn post_send(&mut self, qp: QpId, chain: &mut Vec<Posting>) -> Result<(), PostError> {
        with_fabric!(self, fabric => fabric.post_send(qp, chain))
    }

    fn poll_cq(&mut self, out: &mut Vec<Completion>, max: usize) -> usize {
        with_fabric!(self, fabric => fabric.poll_cq(out, max))
    }

    fn arm(&mut self) {
        with_fabric!(self, fabric => fabric.arm())
    }

    fn wait(&mut self, timeout: Option<Duration>) -> bool {
        with_fabric!(self, fabric => fabric.wait(timeout))
    }

    fn waker(&self) -> Waker {
        with_fabric!(self, fabric => fabric.waker())
    }

    fn descriptor(&self) -> BorrowedFd<'_> {
        with_fabric!(self, fabric => fabric.descriptor())
    }

    fn longest_wait(&self) -> Option<Duration> {
        with_fabric!(self, fabric => fabric.longest_wait())
    }
}
