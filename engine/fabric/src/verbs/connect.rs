//! Connection setup and teardown.

#![forbid(unsafe_code)]

use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdma_sys::ibv_qp_state;

use super::device::Gid;
use super::drain::{Draining, ErrorState, drain};
use super::endpoint::{Endpoint, Parts};
use super::listener::Listening;
use super::opened::SharedObjects;
use super::qp::{Qp, State, depth};
use super::sleep::Source;
use super::sys::{AsyncEvent, CmEvent, CmEventKind, CmId, EventChannel, POLL_BATCH};
use super::{VerbsFabric, explain, path, reaper, sleep, wr_id};
use crate::accept_balancer::{Accepted, ConnectionCount};
use crate::host;
use crate::path::PathConfig;
use crate::{
    Completion, ConnectParams, ControlEvent, DeviceEvent, Disconnect, FabricAddress, FabricError, QpId, RequestId,
};

/// Maximum events of one kind per pass, for fairness.
const MOST_EVENTS: usize = 256;
/// Maximum connect requests handed over by other shards and not yet taken.
const MOST_HANDED_OVER: usize = 256;
/// Marks the number of an identifier that belongs to a request, not to a queue pair.
pub(super) const REQUEST: usize = 1 << (usize::BITS - 1);
/// Number of the identifier that receives the device's removal event.
pub(super) const WATCH: usize = REQUEST - 1;
/// Maximum bytes of private data in a connect request, an accept and a reject.
pub(super) const CONNECT_DATA: usize = 56;
pub(super) const ACCEPT_DATA: usize = 196;
pub(super) const REJECT_DATA: usize = 148;
/// The peer's application refused (`IB_CM_REJ_CONSUMER_DEFINED`).
const REJECTED_BY_CONSUMER: i32 = 28;
/// No listener (`IB_CM_REJ_INVALID_SERVICE_ID`).
const REJECTED_NO_SERVICE: i32 = 8;
/// Pads a reject's private data, which has no length field on the wire.
const PADDING: u8 = 0;

/// An unanswered connect request.
pub(super) struct Request {
    number: u64,
    cm: CmId,
    responder_resources: u16,
    initiator_depth: u16,
    count: ConnectionCount,
}

impl Request {
    pub(super) fn dispose(self) {
        reaper::dispose(self.cm);
    }
}

fn milliseconds(time: Duration) -> i32 {
    time.as_millis().clamp(1, i32::MAX as u128) as i32
}

impl VerbsFabric {
    pub(super) fn start_connect(
        &mut self,
        address: &FabricAddress,
        params: &ConnectParams,
    ) -> Result<QpId, FabricError> {
        let (named, rest) = host::split_device(address)?;
        self.config.check_named(address, named.as_ref(), &self.choice.device)?;
        let to = host::resolve(&rest)?;
        check_data(&params.private_data, CONNECT_DATA)?;
        if reaper::is_behind() {
            let detail = "the kernel is behind with destroying earlier connections (rdma_destroy_id): try again later";
            return Err(FabricError::system("rdma_create_id", detail));
        }
        self.check_present()?;
        let from = self.source();
        if let Some(from) = from.filter(|from| from.is_ipv4() != to.is_ipv4()) {
            let detail = format!("the GID that was chosen is {from}, which is of another family");
            return Err(FabricError::address(&address.0, detail));
        }
        if let Some(mtu) = self.config.path.path_mtu.filter(|_| self.is_infiniband) {
            let why = "on InfiniBand the subnet manager says it, for each partition; only servers bound it";
            return Err(FabricError::misuse(format!("path_mtu = {mtu}: {why}")));
        }
        let channel = Arc::clone(&self.channel);
        let id = self.add(params, State::Connecting, |slot| {
            CmId::new(&channel, slot as usize).map_err(|e| explain::opening("rdma_create_id", &e))
        })?;
        let timeout = milliseconds(self.config.resolve_timeout);
        let result = self.completion.table.get(id).map_or(Ok(()), |qp| {
            qp.open(self.choice.port)?;
            self.config.path.tos.map_or(Ok(()), |tos| qp.cm.set_tos(tos))?;
            qp.cm.resolve_address(from, to, timeout)
        });
        if let Err(error) = result {
            self.destroy(id);
            return Err(self.unreachable(address.0.clone(), format!("rdma_resolve_addr: {error}")));
        }
        Ok(id)
    }

    pub(super) fn accept_request(&mut self, request: RequestId, params: &ConnectParams) -> Result<QpId, FabricError> {
        let gone = || FabricError::misuse(format!("{request:?} is unknown, or the peer has given it up"));
        let request = self.take_request(request.0).ok_or_else(gone)?;
        let Request { mut cm, responder_resources, initiator_depth, count, .. } = request;
        let mut params = params.clone();
        params.responder_resources = params.responder_resources.min(responder_resources);
        params.initiator_depth = params.initiator_depth.min(initiator_depth);
        let possible = check_data(&params.private_data, ACCEPT_DATA)
            .and_then(|()| self.check_present())
            .and_then(|()| self.check_device(&cm))
            .and_then(|()| self.check_mtu(&cm));
        if let Err(error) = possible {
            reaper::dispose(cm);
            return Err(error);
        }
        let id = self.add(&params, State::Accepting, |slot| {
            cm.set_cookie(slot as usize);
            Ok(cm)
        })?;
        let result = self.completion.table.get(id).map_or(Ok(()), |qp| {
            qp.count = Some(count);
            qp.start(&self.config, self.is_infiniband)?;
            qp.cm.accept(&qp.parameters(&self.config))
        });
        if let Err(error) = result {
            self.destroy(id);
            return Err(explain::calling("rdma_accept", &error));
        }
        Ok(id)
    }

    pub(super) fn reject_request(&mut self, request: RequestId, private_data: &[u8]) {
        let Some(Request { cm, .. }) = self.take_request(request.0) else { return };
        reject(&cm, &private_data[..private_data.len().min(REJECT_DATA)]);
        reaper::dispose(cm);
    }

    fn take_request(&mut self, number: u64) -> Option<Request> {
        let at = self.requests.iter().position(|request| request.number == number)?;
        Some(self.requests.swap_remove(at))
    }

    /// Creates a queue pair. `identify` creates the identifier for its slot.
    fn add(
        &mut self,
        params: &ConnectParams,
        state: State,
        identify: impl FnOnce(u32) -> Result<CmId, FabricError>,
    ) -> Result<QpId, FabricError> {
        let capabilities = &self.capabilities;
        let bounded = |what: &str, asked: u32, most: u32| {
            let detail = format!("{what} {asked}: the device takes {most}");
            if asked <= most { Ok(()) } else { Err(FabricError::misuse(detail)) }
        };
        bounded("send_queue_depth", params.send_queue_depth, capabilities.max_send_wr)?;
        bounded("own_receive_queue", params.own_receive_queue.unwrap_or(0), capabilities.max_recv_wr)?;
        bounded("initiator_depth", params.initiator_depth.into(), capabilities.max_read_depth.into())?;
        bounded("responder_resources", params.responder_resources.into(), capabilities.max_read_depth.into())?;
        let Some(SharedObjects { pd, cq, .. }) = &self.device else { return Err(self.absent()) };
        let srq = self.completion.shared.queue();
        let id = self.completion.table.try_insert(|id| {
            if id.slot >= wr_id::MAX_QPS - 1 {
                return Err(FabricError::misuse(format!("a fabric has at most {} queue pairs", wr_id::MAX_QPS - 1)));
            }
            let parts = Parts {
                id,
                pd,
                cq,
                srq,
                send_depth: params.send_queue_depth,
                own_receives: params.own_receive_queue,
                max_inline_data: capabilities.max_inline_data,
                windows: params.windows,
            };
            let cm = identify(id.slot)?;
            let endpoint = Endpoint::new(&parts).map_err(|e| {
                let (sends, receives) = (parts.send_depth, parts.own_receives.unwrap_or(0));
                explain::pinning(format!("ibv_create_qp with {sends} sends, {receives} own Receives"), &e)
            })?;
            Ok(Qp {
                id,
                state,
                endpoint,
                cm,
                params: params.clone(),
                deadline: None,
                failure: None,
                end_report: None,
                is_early: false,
                was_ready: false,
                last_receive_reached: false,
                count: None,
            })
        })?;
        if let Some(qp) = self.completion.table.peek(id) {
            let number = qp.endpoint.number();
            self.completion.add_number(number, id.slot);
        }
        Ok(id)
    }

    /// Checks that the connection manager chose the opened device.
    fn check_device(&self, cm: &CmId) -> Result<(), FabricError> {
        match cm.device() {
            Some(device) if device == self.choice.device => Ok(()),
            other => Err(FabricError::system(
                "using a connection",
                format!(
                    "it goes by device {}, this fabric has opened {}: name the device, by `device` or in the address",
                    other.as_deref().unwrap_or("none"),
                    self.choice.device
                ),
            )),
        }
    }

    /// Refuses a request whose path MTU, valid in both directions, exceeds the local one.
    fn check_mtu(&self, cm: &CmId) -> Result<(), FabricError> {
        let Some(most) = self.config.path.path_mtu else { return Ok(()) };
        let way = cm.qp_attributes(ibv_qp_state::IBV_QPS_RTR).map_err(|e| explain::calling("rdma_init_qp_attr", &e))?;
        let theirs = path::mtu_of(way.attr.path_mtu);
        if theirs <= most {
            return Ok(());
        }
        reject(cm, format!("path_mtu here is {most}, asked for were {theirs}").as_bytes());
        Err(FabricError::peer(format!(
            "it asks for a path MTU of {theirs}, and path_mtu here is {most}: set it there, too"
        )))
    }

    /// Source address of connections, if a GID was chosen.
    pub(super) fn source(&self) -> Option<IpAddr> {
        self.config.gid_index.and(self.choice.gid.as_ref()).map(Gid::ip)
    }

    /// Error for an unreachable address. Names the device.
    fn unreachable(&self, address: String, why: String) -> FabricError {
        let detail = format!("{why}; this fabric is on {}", self.capabilities.device);
        FabricError::unreachable(&address, detail)
    }

    /// Processes events of the connection manager and the device.
    pub(super) fn pump(&mut self) {
        self.scratch.log.sum_up();
        let happened = sleep::wait(&self.sleeper, Some(Duration::ZERO));
        if happened[Source::Device as usize] {
            self.device_events();
        }
        // Excess requests wait in the kernel, whose queue is also bounded.
        if !reaper::is_behind()
            && let Some((channel, accepted)) = self.listener.as_ref().and_then(Listening::take_handed_over)
        {
            accepted.into_iter().for_each(|request| self.requested(request));
            if happened[Source::Listener as usize] {
                self.channel_events(&channel);
            }
        }
        if happened[Source::Connections as usize] {
            let channel = Arc::clone(&self.channel);
            self.channel_events(&channel);
        }
        if !self.completion.attention.is_empty() {
            self.tend();
        }
        if self.lost.is_some() {
            self.tend_lost();
        }
    }

    fn channel_events(&mut self, channel: &Arc<EventChannel>) {
        for _ in 0..MOST_EVENTS {
            match channel.next() {
                Ok(Some(event)) => self.connection_event(event),
                Ok(None) => return,
                Err(error) => {
                    return self
                        .scratch
                        .log
                        .warn("failures of rdma_get_cm_event", format_args!("rdma_get_cm_event: {error}"));
                }
            }
        }
    }

    fn connection_event(&mut self, event: CmEvent) {
        if event.kind == CmEventKind::ConnectRequest {
            let accepted = self.listener.as_ref().and_then(|listening| listening.assign(event, MOST_HANDED_OVER));
            return accepted.into_iter().for_each(|request| self.requested(request));
        }
        if event.cookie == reaper::NOBODY {
            return;
        }
        if event.cookie == WATCH {
            if event.kind == CmEventKind::DeviceRemoval {
                self.device_lost(DeviceEvent::Removed);
            }
            return;
        }
        if event.cookie & REQUEST != 0 {
            // The peer gave up before the answer.
            let gone = self.take_request((event.cookie & !REQUEST) as u64);
            return gone.into_iter().for_each(Request::dispose);
        }
        let Some(qp) = self.completion.table.at(event.cookie as u32) else { return };
        let id = qp.id;
        log::trace!("{id:?}: {:?} {}", event.kind, event.status);
        match (event.kind, qp.state) {
            (CmEventKind::AddressResolved, State::Connecting) => {
                let timeout = milliseconds(self.config.resolve_timeout);
                let resolved = find_path(&qp.cm, &self.config.path, timeout);
                if let Some(Err(error)) = self.completion.table.peek(id).map(|qp| self.check_device(&qp.cm)) {
                    self.connect_failed(id, error);
                } else if let Err(error) = resolved {
                    self.not_reached(id, format!("rdma_resolve_route: {error}"));
                }
            }
            (CmEventKind::RouteResolved, State::Connecting) => {
                if let Err(error) = qp.cm.connect(&qp.parameters(&self.config)) {
                    self.not_reached(id, format!("rdma_connect: {error}"));
                }
            }
            (CmEventKind::ConnectResponse, State::Connecting) => {
                let started = qp.start(&self.config, self.is_infiniband);
                match started.and_then(|()| qp.cm.establish()) {
                    Ok(()) => self.established(id, event.private_data),
                    Err(error) => self.connect_failed(id, explain::calling("starting the queue pair", &error)),
                }
            }
            // The client gave up meanwhile. The reject informs the acceptor.
            (CmEventKind::ConnectResponse, State::Failed) => reject(&qp.cm, &[]),
            (CmEventKind::Established, State::Accepting) => self.established(id, Vec::new()),
            (CmEventKind::Rejected, State::Connecting) => self.rejected(id, event),
            (kind, State::Connecting) if ends(kind) => {
                self.not_reached(id, format!("{kind:?} ({})", io::Error::from_raw_os_error(event.status.abs())));
            }
            // This identifier's device is known to be the opened one. Other devices come and go.
            (CmEventKind::DeviceRemoval, State::Accepting | State::Up | State::Closing) => {
                self.device_lost(DeviceEvent::Removed);
            }
            (CmEventKind::Disconnected, State::Closing) => {
                self.finish(id, Disconnect::Local, "both sides have closed it".to_owned())
            }
            (CmEventKind::Disconnected, _) => self.finish(id, Disconnect::Peer, "the peer has closed it".to_owned()),
            (kind, State::Accepting | State::Up) if ends(kind) => {
                self.finish(
                    id,
                    Disconnect::Failure,
                    format!("the connection manager says {kind:?} ({})", event.status),
                );
            }
            _ => {}
        }
    }

    fn requested(&mut self, Accepted { request: event, count }: Accepted<CmEvent>) {
        let Some(mut cm) = event.request else { return };
        self.next_request += 1;
        let number = self.next_request;
        if let Err(error) = cm.adopt(&self.channel, REQUEST | number as usize) {
            return self
                .scratch
                .log
                .warn("connect requests lost", format_args!("a connect request is lost: rdma_migrate_id: {error}"));
        }
        let peer = cm.peer_address().map_or_else(|| "an unknown address".to_owned(), |address| address.to_string());
        self.requests.push(Request {
            number,
            cm,
            responder_resources: event.responder_resources.into(),
            initiator_depth: event.initiator_depth.into(),
            count,
        });
        let (request, private_data) = (RequestId(number), event.private_data);
        self.events.push(ControlEvent::ConnectRequest { request, private_data, peer });
    }

    fn established(&mut self, id: QpId, private_data: Vec<u8>) {
        if let Some(qp) = self.completion.table.get(id) {
            qp.state = State::Up;
            self.events.push(ControlEvent::Established { qp: id, private_data });
        }
    }

    fn rejected(&mut self, id: QpId, event: CmEvent) {
        let refused = io::Error::from(io::ErrorKind::ConnectionRefused).raw_os_error();
        if event.status == REJECTED_BY_CONSUMER || event.status < 0 && !event.private_data.is_empty() {
            self.fail(id);
            let mut private_data = event.private_data;
            private_data.truncate(private_data.iter().rposition(|&byte| byte != PADDING).map_or(0, |last| last + 1));
            self.events.push(ControlEvent::Rejected { qp: id, private_data });
        } else if event.status == REJECTED_NO_SERVICE || event.status.checked_neg() == refused {
            self.not_reached(id, "the host is there, but nobody listens at this port".to_owned());
        } else {
            self.not_reached(id, format!("its connection manager has refused, code {}", event.status));
        }
    }

    fn not_reached(&mut self, id: QpId, why: String) {
        let peer = self.completion.table.peek(id).and_then(|qp| qp.cm.peer_address());
        let error = self.unreachable(peer.map_or_else(String::new, |address| address.to_string()), why);
        self.connect_failed(id, error);
    }

    fn connect_failed(&mut self, id: QpId, error: FabricError) {
        if self.fail(id) {
            self.events.push(ControlEvent::ConnectFailed { qp: id, error });
        }
    }

    /// Marks a connection attempt as failed. Returns false if the connection is not `Connecting`.
    fn fail(&mut self, id: QpId) -> bool {
        let Some(qp) = self.completion.table.get(id).filter(|qp| qp.state == State::Connecting) else {
            return false;
        };
        qp.state = State::Failed;
        qp.stop();
        true
    }

    /// Ends the connection and flushes posted requests.
    pub(super) fn finish(&mut self, id: QpId, cause: Disconnect, reason: String) {
        let Some(qp) = self.completion.table.get(id) else { return };
        if matches!(qp.state, State::Connecting | State::Failed | State::Over) {
            return;
        }
        qp.state = State::Over;
        // Sends or answers a disconnect. An error means that both sides have closed already.
        if let Err(error) = qp.cm.disconnect() {
            log::trace!("{id:?}: rdma_disconnect: {error}");
        }
        qp.stop();
        log::debug!("{id:?}: {reason}");
        qp.end_report = Some((self.completion.empty_polls, cause, reason));
        self.completion.attention.push(id.slot);
    }

    /// Starts a local close. Posted requests still leave.
    pub(super) fn start_disconnect(&mut self, id: QpId) {
        let Some(qp) = self.completion.table.get(id) else { return };
        match qp.state {
            State::Up => {
                qp.state = State::Closing;
                qp.deadline = Some(Instant::now() + self.config.linger);
                if qp.endpoint.post_marker(&mut self.scratch) {
                    self.completion.room = self.completion.room.saturating_sub(1);
                }
                self.completion.attention.push(id.slot);
            }
            State::Connecting => {
                self.connect_failed(id, FabricError::misuse("given up by this side"));
            }
            State::Accepting => self.finish(id, Disconnect::Local, "given up by this side".to_owned()),
            State::Closing | State::Over | State::Failed => {}
        }
    }

    /// Processes the slots in `attention`.
    fn tend(&mut self) {
        for slot in std::mem::take(&mut self.completion.attention) {
            let Some(qp) = self.completion.table.at(slot) else { continue };
            let id = qp.id;
            if let Some((since, ..)) = qp.end_report {
                if self.completion.empty_polls == since {
                    self.completion.attention.push(slot);
                } else if let Some((_, cause, reason)) = qp.end_report.take() {
                    self.events.push(ControlEvent::Disconnected { qp: id, cause, reason });
                }
            } else if let Some((cause, reason)) = qp.failure.take() {
                self.finish(id, cause, reason);
            } else if qp.state == State::Closing {
                if qp.endpoint.in_flight() == 0 || qp.deadline.is_some_and(|deadline| deadline <= Instant::now()) {
                    self.finish(id, Disconnect::Local, "closed by this side".to_owned());
                } else {
                    self.completion.attention.push(slot);
                }
            } else if qp.state == State::Accepting && qp.is_early {
                // The connection manager detects this by itself. With `rdma_notify` and an immediate close, Linux 6.1
                // keeps repeating its answer. It then holds the identifier for 40 s, until it gives up.
                self.established(id, Vec::new());
            }
        }
    }

    /// Processes the device's asynchronous events.
    pub(super) fn device_events(&mut self) {
        for _ in 0..MOST_EVENTS {
            let Some(event) = self.device.as_ref().and_then(|device| device.context.next_async()) else { return };
            match event {
                AsyncEvent::QueuePair { cookie, code } => self.queue_pair_event(cookie as u32, code),
                AsyncEvent::Device {
                    code: AsyncEvent::CQ_ERROR | AsyncEvent::DEVICE_FATAL | AsyncEvent::SRQ_ERROR,
                } => {
                    log::debug!("{}: {event:?}", self.choice.device);
                    self.device_lost(DeviceEvent::Failed);
                }
                AsyncEvent::Port { port, code: AsyncEvent::PORT_ERROR } if port == u32::from(self.choice.port) => {
                    self.completion.is_port_down = true;
                    self.completion.stats.port_downs += 1;
                    self.events.push(ControlEvent::Device(DeviceEvent::PortDown { port }));
                }
                AsyncEvent::Port { port, code: AsyncEvent::PORT_ACTIVE } if port == u32::from(self.choice.port) => {
                    self.completion.is_port_down = false;
                    self.events.push(ControlEvent::Device(DeviceEvent::PortUp { port }));
                }
                other => log::info!("{}: {other:?}", self.choice.device),
            }
        }
    }

    fn queue_pair_event(&mut self, slot: u32, code: u32) {
        let Some(qp) = self.completion.table.at(slot) else { return };
        match code {
            AsyncEvent::LAST_RECEIVE_REACHED => qp.last_receive_reached = true,
            AsyncEvent::ESTABLISHED => {
                qp.is_early = true;
                self.completion.attention.push(slot);
            }
            // Fatal error, invalid request, or refused access. Other codes concern path migration.
            1..=3 => qp.fail(&mut self.completion.attention, Disconnect::Failure, || {
                format!("the device says: event {code} of the queue pair")
            }),
            _ => log::debug!("{:?}: event {code} of the queue pair", qp.id),
        }
    }

    /// Destroys a queue pair and returns all its memory.
    pub(super) fn destroy(&mut self, id: QpId) {
        let Some(qp) = self.completion.table.get(id) else { return };
        let was_connected = !matches!(qp.state, State::Connecting | State::Failed);
        if was_connected && qp.state != State::Over {
            // An error means that both sides have closed already.
            let _ = qp.cm.disconnect();
        }
        qp.state = State::Over;
        qp.stop();
        if qp.was_ready {
            self.drain(id);
        }
        let Some(gone) = self.completion.table.remove(id) else { return };
        let Qp { mut endpoint, cm, .. } = *gone;
        self.completion.remove_number(endpoint.number());
        let held = endpoint.destroy(&mut self.completion.ready);
        self.completion.room += held.count;
        reaper::dispose(cm);
        self.completion.attention.retain(|&slot| slot != id.slot);
        // The caller of `destroy` needs no `Disconnected` event.
        self.events.retain(|e| !matches!(e, ControlEvent::Disconnected { qp, .. } if *qp == id));
    }

    /// Waits a bounded time for the last completions of a queue pair in error.
    fn drain(&mut self, id: QpId) {
        if let Some(qp) = self.completion.table.get(id)
            && qp.endpoint.post_marker(&mut self.scratch)
        {
            self.completion.room = self.completion.room.saturating_sub(1);
        }
        let within = self.config.drain;
        let mut closing = ClosingQp { fabric: self, id, limit: None, done: Vec::new() };
        if !drain(&mut closing) {
            let line = format_args!("{id:?}: its last completions did not come within {within:?}");
            self.scratch.log.warn("queue pairs whose last completions did not come", line);
        }
    }
}

/// A queue pair before its destruction, with its fabric.
struct ClosingQp<'a> {
    fabric: &'a mut VerbsFabric,
    id: QpId,
    limit: Option<Instant>,
    done: Vec<Completion>,
}

impl Draining for ClosingQp<'_> {
    fn take(&mut self) -> (usize, bool) {
        let Self { fabric, done, .. } = self;
        let taken = fabric.poll_device(done, POLL_BATCH);
        fabric.completion.ready.extend(done.drain(..));
        (taken, taken == POLL_BATCH)
    }

    fn is_silent(&mut self) -> bool {
        let VerbsFabric { completion, quirks, .. } = self.fabric;
        completion.table.peek(self.id).is_none_or(|qp| {
            let known = ErrorState {
                was_ready: qp.was_ready,
                shares_receives: qp.endpoint.shares_receives(),
                reports_last_receive: quirks.reports_last_receive,
                last_receive_reached: qp.last_receive_reached,
                outstanding: qp.endpoint.in_flight() + qp.endpoint.own_receives(),
            };
            known.is_silent()
        })
    }

    fn capacity(&self) -> usize {
        self.fabric.device.as_ref().map_or(0, |device| device.cq.capacity() as usize)
    }

    fn wait(&mut self) -> bool {
        self.fabric.device_events();
        let within = self.fabric.config.drain;
        let limit = *self.limit.get_or_insert_with(|| Instant::now() + within);
        std::thread::yield_now();
        Instant::now() < limit
    }
}

/// Informs the peer of a refusal. If that fails, the end of its connection does.
fn reject(cm: &CmId, private_data: &[u8]) {
    if let Err(error) = cm.reject(private_data) {
        log::debug!("rdma_reject: {error}");
    }
}

/// Starts path resolution, or sets the configured path.
fn find_path(cm: &CmId, path: &PathConfig, timeout: i32) -> io::Result<()> {
    match (path.path_mtu, cm.own_address(), cm.peer_address()) {
        (Some(mtu), Some(from), Some(to)) => cm.set_path(&path::record(from.ip(), to.ip(), mtu, path)),
        _ => cm.resolve_route(timeout),
    }
}

/// Whether the event ends a connection or an attempt.
fn ends(kind: CmEventKind) -> bool {
    use CmEventKind::{AddressError, ConnectError, DeviceRemoval, Disconnected, Rejected, RouteError, Unreachable};
    matches!(kind, AddressError | RouteError | ConnectError | Unreachable | Rejected | Disconnected | DeviceRemoval)
}

fn check_data(data: &[u8], most: usize) -> Result<(), FabricError> {
    if data.len() <= most {
        return Ok(());
    }
    Err(FabricError::misuse(format!("{} bytes of private data: at most {most} travel", data.len())))
}

/// Read depth of both directions, from the capabilities.
pub(super) fn read_depth(serves: u32, begins: u32) -> u16 {
    u16::from(depth(serves.min(begins).min(u32::from(u16::MAX)) as u16))
}
