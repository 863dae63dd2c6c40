//! A bound address.

#![forbid(unsafe_code)]

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex};

use rustix::io::Errno;

use super::connect::REQUEST;
use super::sys::{CmEvent, CmId, EventChannel};
use super::{device, explain};
use crate::host;
use crate::seats::{Seat, Seats};
use crate::{FabricAddress, FabricError, Waker};

/// Connect requests that wait for an answer at a listener.
const BACKLOG: i32 = 512;

/// A bound address, shared by the shards that serve it: each connect request goes to the one with the fewest
/// connections.
#[derive(Clone, Debug)]
pub struct VerbsListener(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    /// Unbound with the last clone. Nobody uses it meanwhile; the lock lets threads share it.
    _id: Mutex<CmId>,
    channel: Arc<EventChannel>,
    address: IpAddr,
    seats: Arc<Seats<CmEvent>>,
}

impl VerbsListener {
    pub(super) fn bind(address: &FabricAddress) -> Result<Self, FabricError> {
        let at = host::resolve(address)?;
        let channel = EventChannel::new().map_err(|e| explain::opening("rdma_create_event_channel", &e))?;
        // What becomes of requests that nobody has adopted yet is told by its number.
        let id = CmId::new(&channel, REQUEST).map_err(|e| explain::opening("rdma_create_id", &e))?;
        id.bind(at).and_then(|()| id.listen(BACKLOG)).map_err(|e| refused(address, at, &e))?;
        Ok(Self(Arc::new(Inner { _id: Mutex::new(id), channel, address: at.ip(), seats: Arc::default() })))
    }

    pub(super) fn channel(&self) -> &Arc<EventChannel> {
        &self.0.channel
    }

    /// A place among the fabrics that share it.
    pub(super) fn seat(&self, waker: Waker) -> Seat<CmEvent> {
        Seat::new(&self.0.seats, waker)
    }

    /// Where it listens; unspecified: at all addresses.
    pub(super) fn address(&self) -> IpAddr {
        self.0.address
    }
}

fn refused(address: &FabricAddress, at: SocketAddr, error: &io::Error) -> FabricError {
    let text = address.0.clone();
    match error.raw_os_error().map(Errno::from_raw_os_error) {
        Some(Errno::ADDRINUSE) => FabricError::AddressInUse {
            address: text,
            detail: format!(
                "port {} is taken, perhaps by the kernel's NFS server: `rdma resource show cm_id` tells by whom; take \
                             another port",
                at.port()
            ),
        },
        Some(Errno::ADDRNOTAVAIL | Errno::NODEV) => FabricError::Address {
            address: text,
            detail: format!(
                "{error}: {} is not on an interface of an RDMA device; there are: {}",
                at.ip(),
                device::alternatives(&device::ports())
            ),
        },
        Some(Errno::ACCESS | Errno::PERM) => FabricError::Address {
            address: text,
            detail: format!(
                "{error}: ports below 1024 need CAP_NET_BIND_SERVICE; take a higher one, such as {}",
                host::DEFAULT_PORT
            ),
        },
        _ => explain::calling(format!("listening at {text}"), error),
    }
}
