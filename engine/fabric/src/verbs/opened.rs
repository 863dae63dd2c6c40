//! An open device: its shared objects and capabilities.

#![forbid(unsafe_code)]

use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;

use super::config::{FeatureMode, VerbsConfig};
use super::connect::{self, WATCH};
use super::device::{self, Choice, Gid, Port};
use super::quirks::Quirks;
use super::sleep::Source;
use super::sys::{
    CmId, CompletionChannel, CompletionQueue, Context, EventChannel, ProtectionDomain, QpCapacity, QueuePair,
    SharedReceiveQueue,
};
use super::{VerbsFabric, explain, path, probe, reaper};
use crate::host;
use crate::sleeper::Sleeper;
use crate::{Capabilities, FabricError};

/// Spare completion entries, for a queue pair destroyed while completions are outstanding.
const SPARE_COMPLETIONS: u32 = 32;

/// Device objects that connections share.
pub(super) struct SharedObjects {
    // In drop order.
    pub(super) cq: Rc<CompletionQueue>,
    pub(super) pd: Rc<ProtectionDomain>,
    pub(super) context: Rc<Context>,
    /// Receives removal events, with or without connections. `None` for addresses other than IP.
    pub(super) watch: Option<CmId>,
}

/// Results of opening a device.
pub(super) struct OpenedDevice {
    pub(super) opened: SharedObjects,
    /// Event channel of the identifiers.
    pub(super) channel: Arc<EventChannel>,
    pub(super) srq: Rc<SharedReceiveQueue>,
    pub(super) choice: Choice,
    pub(super) is_infiniband: bool,
    pub(super) quirks: Quirks,
    pub(super) capabilities: Capabilities,
    /// Free entries of the completion queue.
    pub(super) room: usize,
    /// The port's initial count of messages without a Receive.
    pub(super) not_ready: u64,
}

impl OpenedDevice {
    /// Opens the configured device, and creates a `channel` unless given.
    ///
    /// # Errors
    /// As [`VerbsFabric::new`].
    pub(super) fn open(config: &VerbsConfig, channel: Option<&Arc<EventChannel>>) -> Result<Self, FabricError> {
        let ports = device::ports();
        let choice = choose(&ports, config)?;
        let context = Context::open(&choice.device)
            .map_err(|e| explain::opening(format!("ibv_open_device {}", choice.device), &e))?;
        let attributes = context.attributes().map_err(|e| explain::calling("ibv_query_device", &e))?;
        let port = context.port(choice.port).map_err(|e| explain::calling("ibv_query_port", &e))?;
        path::check_port(&config.path, &choice.device, choice.port, port.mtu)?;
        let mut quirks = Quirks::of(&choice.device, &attributes);
        if quirks.has_windows
            && let Some(found) = probe::findings(&context, &choice, &port, &quirks)
        {
            quirks.remote_invalidate &= found.remote_invalidate;
            quirks.checks_window_bounds &= found.checks_window_bounds;
        }
        let channel = channel.map_or_else(EventChannel::new, |channel| Ok(Arc::clone(channel)));
        let channel = channel.map_err(|e| explain::opening("rdma_create_event_channel", &e))?;
        let pd = ProtectionDomain::new(&context).map_err(|e| explain::pinning("ibv_alloc_pd", &e))?;
        let completions =
            CompletionChannel::new(&context).map_err(|e| explain::pinning("ibv_create_comp_channel", &e))?;
        let receives = config.shared_receives;
        let entries = config.completions.saturating_add(receives).min(attributes.max_cqe);
        if receives > attributes.max_srq_wr || receives > entries / 2 {
            let most = attributes.max_srq_wr.min(attributes.max_cqe / 2);
            return Err(FabricError::system(
                format!("ibv_create_srq of {receives} Receives"),
                format!("{} takes at most {most} of them: lower `receives`, or use more shards", choice.device),
            ));
        }
        let cq = CompletionQueue::new(&context, &completions, entries)
            .map_err(|e| explain::pinning(format!("ibv_create_cq of {entries} entries"), &e))?;
        let srq = SharedReceiveQueue::new(&pd, receives)
            .map_err(|e| explain::pinning(format!("ibv_create_srq of {receives} Receives"), &e))?;
        let max_inline_data = most_inline_data(&pd, &cq, &srq, config.max_inline_data)?;
        let switch = |auto| match config.remote_invalidate {
            FeatureMode::Auto => auto,
            FeatureMode::On => true,
            FeatureMode::Off => false,
        };
        let capabilities = Capabilities {
            scheme: VerbsFabric::SCHEME,
            device: describe(&choice, config.path.path_mtu.unwrap_or(port.mtu), &quirks),
            max_send_wr: attributes.max_qp_wr.saturating_sub(1).min(entries / 2),
            max_recv_wr: attributes.max_qp_wr.min(attributes.max_srq_wr).min(entries / 2),
            max_inline_data,
            max_message: port.max_message,
            max_connect_private_data: connect::CONNECT_DATA,
            max_accept_private_data: connect::REJECT_DATA,
            max_read_depth: connect::read_depth(attributes.max_qp_rd_atom, attributes.max_qp_init_rd_atom),
            remote_invalidate: switch(quirks.remote_invalidate),
            exposure_needs_own_arena: !quirks.checks_window_bounds,
            checks_window_bounds: quirks.checks_window_bounds,
            ..Capabilities::default()
        };
        let watch = watch(choice.gid.as_ref(), &channel);
        Ok(Self {
            is_infiniband: ports
                .iter()
                .any(|p| (&p.device, p.number) == (&choice.device, choice.port) && p.link_layer == "InfiniBand"),
            room: cq.capacity().min(entries).saturating_sub(SPARE_COMPLETIONS) as usize,
            not_ready: device::receiver_not_ready(&choice.device, choice.port),
            opened: SharedObjects { cq, pd, context, watch },
            channel,
            srq,
            choice,
            quirks,
            capabilities,
        })
    }
}

impl SharedObjects {
    /// Registers the device's descriptors with the sleeper.
    ///
    /// # Errors
    /// A failure of `epoll_ctl`.
    pub(super) fn wake(&self, sleeper: &Sleeper) -> Result<(), FabricError> {
        Source::Completions.watch(sleeper, self.cq.channel().fd())?;
        Source::Device.watch(sleeper, self.context.async_fd())
    }

    /// Closes a device. librdmacm also releases a `removed` one.
    pub(super) fn close(mut self, sleeper: &Sleeper, removed: bool) {
        sleeper.remove(self.cq.channel().fd());
        sleeper.remove(self.context.async_fd());
        if let Some(watch) = self.watch.take() {
            if removed && let Err(error) = watch.let_go_of_device() {
                log::warn!("librdmacm keeps a device open that was removed: {error}");
            }
            reaper::dispose(watch);
        }
    }
}

/// An identifier bound to the device only to receive its removal event.
fn watch(gid: Option<&Gid>, channel: &Arc<EventChannel>) -> Option<CmId> {
    let address = gid.filter(|gid| gid.is_routable_roce())?.ip();
    let bound = |id: CmId| id.bind(SocketAddr::new(address, 0)).map(|()| id);
    let watch = CmId::new(channel, WATCH).and_then(bound);
    watch.inspect_err(|error| log::debug!("the device at {address} is not watched: rdma_bind_addr: {error}")).ok()
}

pub(super) fn choose(ports: &[Port], config: &VerbsConfig) -> Result<Choice, FabricError> {
    let local = match &config.address {
        None => None,
        Some(address) => {
            let to = host::resolve(address)?;
            // The listen address belongs to the named device, whatever the route.
            let is_own = config.device.as_deref().is_some_and(|name| device::has(ports, name, to.ip()));
            let found = if is_own { Ok(to.ip()) } else { host::local_address(to) };
            let unreachable = |e: io::Error| {
                FabricError::unreachable(
                    &address.0,
                    format!("the routing tables have no way there: {e}; see `ip route get {}`", to.ip()),
                )
            };
            // An unspecified address names no device.
            (!to.ip().is_unspecified()).then(|| found.map_err(unreachable)).transpose()?
        }
    };
    device::choose(ports, config.device.as_deref(), local, config.gid_index)
}

/// Finds the longest inline Send that the device supports, up to `wanted`. Fails if queue pairs cannot be created.
fn most_inline_data(
    pd: &Rc<ProtectionDomain>,
    cq: &Rc<CompletionQueue>,
    srq: &Rc<SharedReceiveQueue>,
    wanted: u32,
) -> Result<u32, FabricError> {
    let mut max_inline_data = wanted;
    loop {
        let mut capacity = QpCapacity { send: 16, receive: 0, max_inline_data };
        match QueuePair::new(pd, cq, Some(srq), &mut capacity, 0) {
            Ok(_) => return Ok(max_inline_data.min(capacity.max_inline_data)),
            // Some devices fail instead of returning a smaller value.
            Err(_) if max_inline_data > 0 => max_inline_data /= 2,
            Err(error) => return Err(explain::pinning("ibv_create_qp", &error)),
        }
    }
}

/// Describes the device for messages.
fn describe(choice: &Choice, mtu: u32, quirks: &Quirks) -> String {
    let family = if quirks.family.is_empty() { String::new() } else { format!(" ({})", quirks.family) };
    let gid = choice.gid.as_ref().map_or_else(String::new, |gid| format!(", {gid}"));
    format!("{}{family} port {}{gid}, MTU {mtu}", choice.device, choice.port)
}
