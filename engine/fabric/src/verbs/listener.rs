//! A bound address.

#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex};

use rustix::event::epoll::EventFlags;
use rustix::io::Errno;

use super::connect::REQUEST;
use super::sys::{CmEvent, CmId, EventChannel};
use super::{REQUESTS, VerbsConfig, device, explain, reaper};
use crate::accept_balancer::{AcceptBalancer, Accepted, BalancerMember};
use crate::host::{self, NamedDevice};
use crate::sleeper::Sleeper;
use crate::{FabricAddress, FabricError, lock};

/// Backlog of unanswered connect requests.
const BACKLOG: i32 = 512;

/// A bound address that shards share. Each connect request goes to the shard with the fewest connections.
#[derive(Clone, Debug)]
pub struct VerbsListener(Arc<SharedListener>);

#[derive(Debug)]
struct SharedListener {
    bound: Mutex<Binding>,
    channel: Arc<EventChannel>,
    /// As configured.
    text: FabricAddress,
    named: Option<NamedDevice>,
    address: SocketAddr,
    balancer: Arc<AcceptBalancer<CmEvent>>,
}

/// The connection manager's binding. The last clone of the listener releases it.
#[derive(Debug)]
struct Binding {
    /// `None` after the removal of its device, which also removes the address.
    id: Option<CmId>,
    /// Number of removals. Fabrics that share the address learn of a removal at different times.
    removals: u64,
}

impl VerbsListener {
    pub(super) fn bind(address: &FabricAddress) -> Result<Self, FabricError> {
        let (named, rest) = host::split_device(address)?;
        let at = host::resolve(&rest)?;
        let channel = EventChannel::new().map_err(|e| explain::open_error("rdma_create_event_channel", &e))?;
        let id = bind(&channel, at).map_err(|e| refused(&address.0, at, &e))?;
        let bound = Mutex::new(Binding { id: Some(id), removals: 0 });
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
                "listening at {at} with the GID of {from}: choose another GID, or none"
            ))),
            None => Ok(()),
        }
    }
}

fn bind(channel: &Arc<EventChannel>, at: SocketAddr) -> io::Result<CmId> {
    // The number marks events of requests that no fabric has adopted yet.
    let id = CmId::new(channel, REQUEST)?;
    id.bind(at)?;
    id.listen(BACKLOG)?;
    Ok(id)
}

/// One fabric's share of a listener.
pub(super) struct Listening {
    listener: VerbsListener,
    /// Its membership among the fabrics that share the address. `None` without a device.
    pub(super) member: Option<BalancerMember<CmEvent>>,
    /// Removals that it has processed.
    removals: u64,
}

impl Listening {
    /// Takes no requests before `join`.
    pub(super) fn new(listener: &VerbsListener) -> Self {
        let removals = lock(&listener.0.bound).removals;
        Self { listener: listener.clone(), member: None, removals }
    }

    /// Starts taking requests.
    ///
    /// # Errors
    /// A failure of `epoll_ctl`.
    pub(super) fn join(&mut self, sleeper: &Sleeper) -> Result<(), FabricError> {
        sleeper.add(self.listener.0.channel.fd(), REQUESTS, EventFlags::IN)?;
        self.member = Some(BalancerMember::new(&self.listener.0.balancer, sleeper.waker()));
        Ok(())
    }

    /// Stops taking requests. Requests handed to it go to other fabrics.
    pub(super) fn leave(&mut self, sleeper: &Sleeper) {
        if self.member.take().is_some() {
            sleeper.remove(self.listener.0.channel.fd());
        }
    }

    /// The event channel for requests, and the requests that other fabrics handed over.
    pub(super) fn take_handed_over(&self) -> Option<(Arc<EventChannel>, VecDeque<Accepted<CmEvent>>)> {
        let member = self.member.as_ref()?;
        Some((Arc::clone(&self.listener.0.channel), member.take_handed_over()))
    }

    /// Processes the removal of the fabric's device. An address of that device is removed with it. A listener for all
    /// addresses stays.
    pub(super) fn device_removed(&mut self, device: &str) {
        let mut bound = lock(&self.listener.0.bound);
        let of_it = bound.id.as_ref().and_then(CmId::device).is_some_and(|of| of == device);
        if of_it && bound.removals == self.removals {
            bound.removals += 1;
            bound.id.take().into_iter().for_each(reaper::dispose);
        }
        self.removals = bound.removals;
    }

    /// Binds the address again on a returned device. Only the first of the sharing fabrics does so.
    ///
    /// # Errors
    /// The errors are those of [`VerbsListener::bind`].
    pub(super) fn bind_again(&mut self) -> Result<(), FabricError> {
        let SharedListener { channel, address, .. } = &*self.listener.0;
        let mut bound = lock(&self.listener.0.bound);
        if bound.id.is_none() {
            let id = bind(channel, *address).map_err(|e| refused(&address.to_string(), *address, &e))?;
            bound.id = Some(id);
        }
        self.removals = bound.removals;
        Ok(())
    }
}

fn refused(address: &str, at: SocketAddr, error: &io::Error) -> FabricError {
    match Errno::from_io_error(error) {
        Some(Errno::ADDRINUSE) => {
            let port = at.port();
            let detail = format!(
                "port {port} is taken, perhaps by the kernel's NFS server: `rdma resource show cm_id` tells by whom; \
                 take another port"
            );
            FabricError::in_use(address, detail)
        }
        Some(Errno::ADDRNOTAVAIL | Errno::NODEV) => {
            let (ip, there) = (at.ip(), device::alternatives(&device::ports()));
            let detail = format!("{error}: {ip} is not on an interface of an RDMA device; there are: {there}");
            FabricError::address(address, detail)
        }
        Some(Errno::ACCESS | Errno::PERM) => host::privileged_port(address, error),
        _ => FabricError::system(format!("listening at {address}"), error),
    }
}
