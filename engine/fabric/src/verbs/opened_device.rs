//! The fabric's device: its shared objects while it is open, and its properties.

#![forbid(unsafe_code)]

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::sync::Arc;

use rustix::event::epoll::EventFlags;

use super::config::{FeatureMode, VerbsConfig};
use super::connect::{self, WATCH};
use super::device::{self, Choice, DevicePort, Gid};
use super::qp::read_depth;
use super::quirks::Quirks;
use super::receives::SharedReceives;
use super::sys::{
    CmId, CompletionChannel, CompletionQueue, DeviceContext, EventChannel, ProtectionDomain, QueuePair,
    SharedReceiveQueue,
};
use super::{COMPLETIONS, DEVICE_EVENTS, VerbsFabric, errors, path, probe, reaper};
use crate::epoll_set::EpollSet;
use crate::host;
use crate::{Capabilities, FabricError};

/// Completion entries reserved for queue pairs that are destroyed while completions are outstanding.
const SPARE_COMPLETIONS: u32 = 32;

/// Device objects that connections share.
pub(super) struct SharedObjects {
    // The fields are in drop order.
    pub(super) cq: Rc<CompletionQueue>,
    pub(super) pd: Rc<ProtectionDomain>,
    pub(super) context: Rc<DeviceContext>,
    /// Identifier that receives the device's removal event, even without connections. `None` if no GID is an IP
    /// address.
    pub(super) watch: Option<CmId>,
}

/// The device of a fabric.
pub(super) struct OpenedDevice {
    /// `None` while the device is absent.
    pub(super) objects: Option<SharedObjects>,
    /// Event channel of the identifiers. It stays when the device is reopened.
    pub(super) channel: Arc<EventChannel>,
    pub(super) choice: Choice,
    pub(super) quirks: Quirks,
    pub(super) capabilities: Capabilities,
    /// The port's count of receiver-not-ready events when the device was opened. The maximum value ends the count.
    pub(super) initial_receiver_not_ready: u64,
}

impl OpenedDevice {
    /// Opens the configured device. Creates an event channel if `channel` is `None`.
    ///
    /// Returns the device with its shared receive queue and the free entries of its completion queue.
    ///
    /// # Errors
    /// The errors are those of [`VerbsFabric::new`].
    pub(super) fn open(
        config: &VerbsConfig,
        channel: Option<&Arc<EventChannel>>,
    ) -> Result<(Self, SharedReceives, usize), FabricError> {
        let choice = choose(&device::ports(), config)?;
        let context = DeviceContext::open(&choice.device)
            .map_err(|e| errors::open_error(format!("ibv_open_device {}", choice.device), &e))?;
        let attributes = context.attributes().map_err(|e| FabricError::system("ibv_query_device", e))?;
        let port = context.port(choice.port).map_err(|e| FabricError::system("ibv_query_port", e))?;
        let mtu = path::mtu_bytes(port.active_mtu);
        path::check_port(&config.path, &choice.device, choice.port, mtu)?;
        let mut quirks = Quirks::detect(&choice.device, &attributes);
        if quirks.has_windows
            && let Some(found) = probe::probe_once(&context, &choice, &port, &quirks)
        {
            quirks.remote_invalidate &= found.remote_invalidate;
            quirks.checks_window_bounds &= found.checks_window_bounds;
        }
        let channel = channel.map_or_else(EventChannel::new, |channel| Ok(Arc::clone(channel)));
        let channel = channel.map_err(|e| errors::open_error("rdma_create_event_channel", &e))?;
        let pd = ProtectionDomain::new(&context).map_err(|e| errors::pin_error("ibv_alloc_pd", &e))?;
        let completions =
            CompletionChannel::new(&context).map_err(|e| errors::pin_error("ibv_create_comp_channel", &e))?;
        let receives = config.shared_receives;
        let limit = |value: i32| value.max(0) as u32;
        let (max_cqe, max_srq_wr) = (limit(attributes.max_cqe), limit(attributes.max_srq_wr));
        let entries = config.completions.saturating_add(receives).min(max_cqe);
        if receives > max_srq_wr || receives > entries / 2 {
            let max_receives = max_srq_wr.min(max_cqe / 2);
            return Err(FabricError::system(
                format!("ibv_create_srq of {receives} Receives"),
                format!(
                    "exceeds limit {max_receives} of {}: lower `memory.receives`, or use more shards",
                    choice.device
                ),
            ));
        }
        let cq = CompletionQueue::new(&context, completions, entries)
            .map_err(|e| errors::pin_error(format!("ibv_create_cq of {entries} entries"), &e))?;
        let srq = SharedReceiveQueue::new(&pd, receives)
            .map_err(|e| errors::pin_error(format!("ibv_create_srq of {receives} Receives"), &e))?;
        let max_inline_data = max_inline_data(&pd, &cq, &srq, config.max_inline_data)?;
        let remote_invalidate = match config.remote_invalidate {
            FeatureMode::Auto => quirks.remote_invalidate,
            FeatureMode::On => true,
            FeatureMode::Off => false,
        };
        // Maximum concurrent RDMA Reads that a queue pair both serves and posts.
        let reads = limit(attributes.max_qp_rd_atom.min(attributes.max_qp_init_rd_atom)).min(u16::MAX.into());
        let capabilities = Capabilities {
            scheme: VerbsFabric::SCHEME,
            device: describe(&choice, config.path.path_mtu.unwrap_or(mtu), &quirks),
            max_send_wr: limit(attributes.max_qp_wr).saturating_sub(1).min(entries / 2),
            max_recv_wr: limit(attributes.max_qp_wr).min(max_srq_wr).min(entries / 2),
            max_inline_data,
            max_message: port.max_msg_sz,
            max_connect_private_data: connect::CONNECT_DATA,
            max_accept_private_data: connect::REJECT_DATA,
            max_read_depth: read_depth(reads as u16).into(),
            remote_invalidate,
            exposure_needs_own_arena: !quirks.checks_window_bounds,
            checks_window_bounds: quirks.checks_window_bounds,
            ..Capabilities::default()
        };
        let room = cq.capacity().min(entries).saturating_sub(SPARE_COMPLETIONS) as usize;
        let device = Self {
            initial_receiver_not_ready: device::receiver_not_ready(&choice.device, choice.port),
            objects: Some(SharedObjects { cq, pd, context, watch: watch_removal(choice.gid.as_ref(), &channel) }),
            channel,
            choice,
            quirks,
            capabilities,
        };
        Ok((device, SharedReceives::new(srq, receives), room))
    }

    /// Registers the device's descriptors with the sleeper.
    ///
    /// # Errors
    /// A failure of `epoll_ctl`.
    pub(super) fn watch_events(&self, sleeper: &EpollSet) -> Result<(), FabricError> {
        let Some(objects) = &self.objects else { return Ok(()) };
        sleeper.add(objects.cq.parents().fd(), COMPLETIONS, EventFlags::IN)?;
        sleeper.add(objects.context.async_fd(), DEVICE_EVENTS, EventFlags::IN)
    }

    /// Closes the device. If the device was removed, makes librdmacm release it too.
    pub(super) fn close(&mut self, sleeper: &EpollSet, was_removed: bool) {
        let Some(mut objects) = self.objects.take() else { return };
        sleeper.remove(objects.cq.parents().fd());
        sleeper.remove(objects.context.async_fd());
        if let Some(watch) = objects.watch.take() {
            if was_removed && let Err(error) = watch.release_device() {
                log::warn!("{}: librdmacm keeps the removed device open: {error}", self.choice.device);
            }
            reaper::dispose(watch);
        }
    }

    /// Receiver-not-ready events of the port since the device was opened.
    pub(super) fn receiver_not_ready(&self) -> u64 {
        device::receiver_not_ready(&self.choice.device, self.choice.port)
            .saturating_sub(self.initial_receiver_not_ready)
    }

    /// Source address of connections, if the configuration chooses a GID.
    pub(super) fn source(&self, config: &VerbsConfig) -> Option<IpAddr> {
        config.gid_index.and(self.choice.gid.as_ref()).map(Gid::ip)
    }
}

/// Creates an identifier that is bound to the device only to receive its removal event.
fn watch_removal(gid: Option<&Gid>, channel: &Arc<EventChannel>) -> Option<CmId> {
    let address = gid.filter(|gid| gid.is_routable_roce())?.ip();
    let bound = |id: CmId| id.bind(SocketAddr::new(address, 0)).map(|()| id);
    let watch = CmId::new(channel, WATCH).and_then(bound);
    watch
        .inspect_err(|error| log::debug!("removal of the device at {address} is not watched: rdma_bind_addr: {error}"))
        .ok()
}

/// Chooses the configured device, or the device of the route to the configured address.
pub(super) fn choose(ports: &[DevicePort], config: &VerbsConfig) -> Result<Choice, FabricError> {
    let local = match &config.address {
        None => None,
        Some(address) => {
            let to = host::resolve(address)?;
            // The named device's own address, at which a server listens, needs no route.
            let is_own = config.device.as_deref().is_some_and(|name| device::has_address(ports, name, to.ip()));
            let found = if is_own { Ok(to.ip()) } else { host::local_address(to) };
            let unreachable = |e: io::Error| {
                let detail = format!("no route: {e}; see `ip route get {}`", to.ip());
                FabricError::unreachable(&address.0, detail)
            };
            // An unspecified address names no device.
            (!to.ip().is_unspecified()).then(|| found.map_err(unreachable)).transpose()?
        }
    };
    device::choose(ports, config.device.as_deref(), local, config.gid_index)
}

/// Finds the longest inline Send that the device supports, up to `requested`.
///
/// # Errors
/// The device cannot create queue pairs.
fn max_inline_data(
    pd: &Rc<ProtectionDomain>,
    cq: &Rc<CompletionQueue>,
    srq: &Rc<SharedReceiveQueue>,
    requested: u32,
) -> Result<u32, FabricError> {
    let mut max_inline_data = requested;
    loop {
        match QueuePair::new(pd, cq, Some(srq), (16, 0), max_inline_data, 0) {
            Ok((_, supported)) => return Ok(max_inline_data.min(supported)),
            // Some devices fail instead of returning a smaller limit.
            Err(_) if max_inline_data > 0 => max_inline_data /= 2,
            Err(error) => return Err(errors::pin_error("ibv_create_qp", &error)),
        }
    }
}

/// Describes the device, for error texts.
fn describe(choice: &Choice, mtu: u32, quirks: &Quirks) -> String {
    let family = if quirks.family.is_empty() { String::new() } else { format!(" ({})", quirks.family) };
    let gid = choice.gid.as_ref().map_or_else(String::new, |gid| format!(", {gid}"));
    format!("{}{family} port {}{gid}, MTU {mtu}", choice.device, choice.port)
}
