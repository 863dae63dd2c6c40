//! A bound address.

#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex};

use rustix::event::epoll::EventFlags;
use rustix::io::Errno;

use super::connect::REQUEST_FLAG;
use super::sys::{CmEvent, CmId, EventChannel};
use super::{REQUESTS, VerbsConfig, device, errors, reaper};
use crate::accept_balancer::{AcceptBalancer, Accepted, BalancerMember};
use crate::epoll_set::EpollSet;
use crate::host::{self, NamedDevice};
use crate::{FabricAddress, FabricError, lock};

/// Maximum unanswered connect requests in the kernel.
const BACKLOG: i32 = 512;

/// A bound address that shards share. Each connect request goes to the shard with the fewest connections.
#[derive(Clone, Debug)]
pub struct VerbsListener(Arc<SharedListener>);

#[derive(Debug)]
struct SharedListener {
    bound: Mutex<CmBinding>,
    channel: Arc<EventChannel>,
    /// The address as configured.
    text: FabricAddress,
    named: Option<NamedDevice>,
    address: SocketAddr,
    balancer: Arc<AcceptBalancer<CmEvent>>,
}

/// The bound identifier of the connection manager. Dropping the last clone of the listener releases the identifier.
#[derive(Debug)]
struct CmBinding {
    /// `None` after the removal of its device, which also removes the address.
    id: Option<CmId>,
    /// Number of removals. Fabrics that share the address notice a removal at different times.
    removals: u64,
}

impl VerbsListener {
    pub(super) fn bind(address: &FabricAddress) -> Result<Self, FabricError> {
        let (named, rest) = host::split_device(address)?;
        let at = host::resolve(&rest)?;
        let channel = EventChannel::new().map_err(|e| errors::open_error("rdma_create_event_channel", &e))?;
        let id = bind(&channel, at).map_err(|e| bind_error(&address.0, at, &e))?;
        let bound = Mutex::new(CmBinding { id: Some(id), removals: 0 });
        let text = address.clone();
        Ok(Self(Arc::new(SharedListener { bound, channel, text, named, address: at, balancer: Arc::default() })))
    }

    /// Checks that a fabric on this device, with connections from `source`, may listen here.
    ///
    /// # Errors
    /// The address names another device, or is not the source address.
    pub(super) fn check(&self, config: &VerbsConfig, device: &str, source: Option<IpAddr>) -> Result<(), FabricError> {
        let SharedListener { text, named, address, .. } = &*self.0;
        config.check_named(text, named.as_ref(), device)?;
        let at = address.ip();
        match source.filter(|from| !at.is_unspecified() && at != *from) {
            Some(from) => Err(FabricError::misuse(format!(
                "listen address {at} differs from the address {from} of the GID: choose another GID, or none"
            ))),
            None => Ok(()),
        }
    }
}

fn bind(channel: &Arc<EventChannel>, at: SocketAddr) -> io::Result<CmId> {
    // This number marks the events of requests that no fabric has adopted yet.
    let id = CmId::new(channel, REQUEST_FLAG)?;
    id.bind(at)?;
    id.listen(BACKLOG)?;
    Ok(id)
}

/// One fabric's use of a listener.
pub(super) struct Listening {
    listener: VerbsListener,
    /// The fabric's membership among those that share the address. `None` without a device.
    pub(super) member: Option<BalancerMember<CmEvent>>,
    /// Number of removals that this fabric has processed.
    removals: u64,
}

impl Listening {
    /// Prepares listening. Call `join` to start taking requests.
    pub(super) fn new(listener: &VerbsListener) -> Self {
        let removals = lock(&listener.0.bound).removals;
        Self { listener: listener.clone(), member: None, removals }
    }

    /// Starts taking requests.
    ///
    /// # Errors
    /// A failure of `epoll_ctl`.
    pub(super) fn join(&mut self, sleeper: &EpollSet) -> Result<(), FabricError> {
        sleeper.add(self.listener.0.channel.fd(), REQUESTS, EventFlags::IN)?;
        self.member = Some(BalancerMember::new(&self.listener.0.balancer, sleeper.waker()));
        Ok(())
    }

    /// Stops taking requests. Those already handed over to this fabric go to other fabrics.
    pub(super) fn leave(&mut self, sleeper: &EpollSet) {
        if self.member.take().is_some() {
            sleeper.remove(self.listener.0.channel.fd());
        }
    }

    /// The event channel for requests, and the requests that other fabrics have handed over.
    pub(super) fn take_handed_over(&self) -> Option<(Arc<EventChannel>, VecDeque<Accepted<CmEvent>>)> {
        let member = self.member.as_ref()?;
        Some((Arc::clone(&self.listener.0.channel), member.take_handed_over()))
    }

    /// Handles the removal of the fabric's device. The kernel removes an address of that device, but a listener for all
    /// addresses stays.
    pub(super) fn handle_device_removal(&mut self, device: &str) {
        let mut bound = lock(&self.listener.0.bound);
        let is_on_device = bound.id.as_ref().and_then(CmId::device).is_some_and(|name| name == device);
        if is_on_device && bound.removals == self.removals {
            bound.removals += 1;
            bound.id.take().into_iter().for_each(reaper::dispose);
        }
        self.removals = bound.removals;
    }

    /// Binds the address again after the device has returned, unless another fabric of the address has already done so.
    ///
    /// # Errors
    /// The errors are those of [`VerbsListener::bind`].
    pub(super) fn bind_again(&mut self) -> Result<(), FabricError> {
        let SharedListener { channel, address, .. } = &*self.listener.0;
        let mut bound = lock(&self.listener.0.bound);
        if bound.id.is_none() {
            let id = bind(channel, *address).map_err(|e| bind_error(&address.to_string(), *address, &e))?;
            bound.id = Some(id);
        }
        self.removals = bound.removals;
        Ok(())
    }
}

fn bind_error(address: &str, at: SocketAddr, error: &io::Error) -> FabricError {
    match Errno::from_io_error(error) {
        Some(Errno::ADDRINUSE) => {
            let port = at.port();
            let detail = format!(
                "port {port} is in use, perhaps by the kernel's NFS server: `rdma resource show cm_id` shows the \
                 owner; choose another port"
            );
            FabricError::in_use(address, detail)
        }
        Some(Errno::ADDRNOTAVAIL | Errno::NODEV) => {
            let (ip, ports) = (at.ip(), device::describe_ports(&device::ports()));
            let detail = format!("{error}: no interface of an RDMA device has {ip}; available: {ports}");
            FabricError::address(address, detail)
        }
        Some(Errno::ACCESS | Errno::PERM) => host::privileged_port(address, error),
        _ => FabricError::system(format!("listening at {address}"), error),
    }
}
