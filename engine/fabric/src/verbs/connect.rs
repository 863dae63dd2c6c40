//! Connection setup and teardown.

#![forbid(unsafe_code)]

use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdma_sys::ibv_qp_state;

use super::complete::CompletionState;
use super::drain::{Draining, ErrorState, drain};
use super::listener::Listening;
use super::qp::{QpState, VerbsQp};
use super::sleep::EventSource;
use super::sys::{AsyncEvent, CmEvent, CmEventKind, CmId, EventChannel, POLL_BATCH};
use super::work_queues::WorkQueues;
use super::{VerbsFabric, explain, path, reaper, sleep, wr_id};
use crate::accept_balancer::{Accepted, ConnectionCount};
use crate::host;
use crate::{
    Completion, ConnectParams, ControlEvent, DeviceEvent, Disconnect, FabricAddress, FabricError, QpId, RequestId,
};

/// Maximum events of one kind per pass, for fairness.
const MAX_EVENTS: usize = 256;
/// Maximum connect requests handed over by other shards and not yet taken.
const MAX_HANDED_OVER: usize = 256;
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

/// An unanswered connect request.
pub(super) struct PendingRequest {
    number: u64,
    pub(super) cm: CmId,
    responder_resources: u16,
    initiator_depth: u16,
    count: ConnectionCount,
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
        self.config.check_named(address, named.as_ref(), &self.device.choice.device)?;
        let to = host::resolve(&rest)?;
        if reaper::is_behind() {
            let detail = "the kernel is behind with destroying earlier connections (rdma_destroy_id): try again later";
            return Err(FabricError::system("rdma_create_id", detail));
        }
        self.objects()?;
        let from = self.device.source(&self.config);
        if let Some(from) = from.filter(|from| from.is_ipv4() != to.is_ipv4()) {
            let detail = format!("the GID that was chosen is {from}, which is of another family");
            return Err(FabricError::address(&address.0, detail));
        }
        if let Some(mtu) = self.config.path.path_mtu.filter(|_| self.device.is_infiniband) {
            let why = "on InfiniBand the subnet manager says it, for each partition; only servers bound it";
            return Err(FabricError::misuse(format!("path_mtu = {mtu}: {why}")));
        }
        let channel = Arc::clone(&self.device.channel);
        let id = self.create_qp(params, CONNECT_DATA, QpState::Connecting, |slot| {
            CmId::new(&channel, slot as usize).map_err(|e| explain::open_error("rdma_create_id", &e))
        })?;
        let timeout = milliseconds(self.config.resolve_timeout);
        let result = self.completion.table.get(id).map_or(Ok(()), |qp| {
            qp.open(self.device.choice.port)?;
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
        let PendingRequest { mut cm, responder_resources, initiator_depth, count, .. } = request;
        let mut params = params.clone();
        params.responder_resources = params.responder_resources.min(responder_resources);
        params.initiator_depth = params.initiator_depth.min(initiator_depth);
        let possible = self.objects().and_then(|_| self.check_device(&cm)).and_then(|()| self.check_mtu(&cm));
        if let Err(error) = possible {
            reaper::dispose(cm);
            return Err(error);
        }
        let id = self.create_qp(&params, ACCEPT_DATA, QpState::Accepting, |slot| {
            cm.set_cookie(slot as usize);
            Ok(cm)
        })?;
        let result = self.completion.table.get(id).map_or(Ok(()), |qp| {
            qp.count = Some(count);
            qp.start(&self.config, self.device.is_infiniband)?;
            qp.cm.accept(&qp.parameters(&self.config))
        });
        if let Err(error) = result {
            self.destroy(id);
            return Err(FabricError::system("rdma_accept", error));
        }
        Ok(id)
    }

    pub(super) fn reject_request(&mut self, request: RequestId, private_data: &[u8]) {
        let Some(PendingRequest { cm, .. }) = self.take_request(request.0) else { return };
        reject(&cm, &private_data[..private_data.len().min(REJECT_DATA)]);
        reaper::dispose(cm);
    }

    fn take_request(&mut self, number: u64) -> Option<PendingRequest> {
        let at = self.requests.iter().position(|request| request.number == number)?;
        Some(self.requests.swap_remove(at))
    }

    /// Creates a queue pair. `max_data` bounds the private data. `identify` creates the identifier for its slot.
    fn create_qp(
        &mut self,
        params: &ConnectParams,
        max_data: usize,
        state: QpState,
        identify: impl FnOnce(u32) -> Result<CmId, FabricError>,
    ) -> Result<QpId, FabricError> {
        let limits = &self.device.capabilities;
        let (max_inline_data, reads) = (limits.max_inline_data, u32::from(limits.max_read_depth));
        let (sends, receives) = (params.send_queue_depth, params.own_receive_queue.unwrap_or(0));
        for (what, value, limit) in [
            ("bytes of private data", params.private_data.len() as u32, max_data as u32),
            ("send_queue_depth", sends, limits.max_send_wr),
            ("own_receive_queue", receives, limits.max_recv_wr),
            ("initiator_depth", params.initiator_depth.into(), reads),
            ("responder_resources", params.responder_resources.into(), reads),
        ] {
            if value > limit {
                return Err(FabricError::misuse(format!("{what} {value}: the device takes {limit}")));
            }
        }
        let objects = self.objects()?;
        let (pd, cq) = (Rc::clone(&objects.pd), Rc::clone(&objects.cq));
        let CompletionState { table, shared, by_number, .. } = &mut self.completion;
        table.try_insert(|id| {
            if id.slot >= wr_id::MAX_QPS - 1 {
                return Err(FabricError::misuse(format!("a fabric has at most {} queue pairs", wr_id::MAX_QPS - 1)));
            }
            let cm = identify(id.slot)?;
            let queues = WorkQueues::new(id, &pd, &cq, shared.queue(), params, max_inline_data).map_err(|e| {
                explain::pin_error(format!("ibv_create_qp with {sends} sends, {receives} own Receives"), &e)
            })?;
            by_number.insert(queues.number(), id.slot);
            Ok(VerbsQp {
                id,
                state,
                queues,
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
        })
    }

    /// Checks that the connection manager chose the opened device.
    fn check_device(&self, cm: &CmId) -> Result<(), FabricError> {
        let (found, opened) = (cm.device(), &self.device.choice.device);
        if found.as_ref() == Some(opened) {
            return Ok(());
        }
        let found = found.as_deref().unwrap_or("none");
        let detail = format!(
            "it goes by device {found}, this fabric has opened {opened}: name the device, by `device` or in the address"
        );
        Err(FabricError::system("using a connection", detail))
    }

    /// Refuses a request whose path MTU, valid in both directions, exceeds the local one.
    fn check_mtu(&self, cm: &CmId) -> Result<(), FabricError> {
        let Some(most) = self.config.path.path_mtu else { return Ok(()) };
        let attributes = cm.qp_attributes(ibv_qp_state::IBV_QPS_RTR);
        let attributes = attributes.map_err(|e| FabricError::system("rdma_init_qp_attr", e))?;
        let theirs = path::mtu_of(attributes.attr.path_mtu);
        if theirs <= most {
            return Ok(());
        }
        reject(cm, format!("path_mtu here is {most}, asked for were {theirs}").as_bytes());
        Err(FabricError::peer(format!(
            "it asks for a path MTU of {theirs}, and path_mtu here is {most}: set it there, too"
        )))
    }

    /// Error for an unreachable address. Names the device.
    fn unreachable(&self, address: String, why: String) -> FabricError {
        let detail = format!("{why}; this fabric is on {}", self.device.capabilities.device);
        FabricError::unreachable(&address, detail)
    }

    /// Processes events of the connection manager and the device.
    pub(super) fn poll_events(&mut self) {
        self.scratch.log.sum_up();
        let happened = sleep::wait(&self.sleeper, Some(Duration::ZERO));
        if happened[EventSource::Device as usize] {
            self.device_events();
        }
        // Excess requests wait in the kernel, whose queue is also bounded.
        if !reaper::is_behind()
            && let Some((channel, accepted)) = self.listener.as_ref().and_then(Listening::take_handed_over)
        {
            accepted.into_iter().for_each(|request| self.add_request(request));
            if happened[EventSource::Listener as usize] {
                self.channel_events(&channel);
            }
        }
        if happened[EventSource::Connections as usize] {
            let channel = Arc::clone(&self.device.channel);
            self.channel_events(&channel);
        }
        if !self.completion.attention.is_empty() {
            self.process_attention();
        }
        self.recover();
    }

    fn channel_events(&mut self, channel: &Arc<EventChannel>) {
        for _ in 0..MAX_EVENTS {
            match channel.next() {
                Ok(Some(event)) => self.connection_event(event),
                Ok(None) => return,
                Err(error) => {
                    let line = format_args!("rdma_get_cm_event: {error}");
                    return self.scratch.log.warn("failures of rdma_get_cm_event", line);
                }
            }
        }
    }

    fn connection_event(&mut self, event: CmEvent) {
        if event.kind == CmEventKind::ConnectRequest {
            let member = self.listener.as_ref().and_then(|listening| listening.member.as_ref());
            let accepted = member.and_then(|member| member.assign(event, MAX_HANDED_OVER));
            return accepted.into_iter().for_each(|request| self.add_request(request));
        }
        match event.cookie {
            reaper::NOBODY => return,
            WATCH if event.kind == CmEventKind::DeviceRemoval => return self.device_lost(DeviceEvent::Removed),
            WATCH => return,
            // The peer gave up before the answer.
            cookie if cookie & REQUEST != 0 => {
                let gone = self.take_request((cookie & !REQUEST) as u64);
                return gone.into_iter().for_each(|request| reaper::dispose(request.cm));
            }
            _ => {}
        }
        let Some(qp) = self.completion.table.at(event.cookie as u32) else { return };
        let id = qp.id;
        log::trace!("{id:?}: {:?} {}", event.kind, event.status);
        match (event.kind, qp.state) {
            (CmEventKind::AddressResolved, QpState::Connecting) => {
                let path = &self.config.path;
                // A configured path needs no resolution.
                let resolved = match (path.path_mtu, qp.cm.own_address(), qp.cm.peer_address()) {
                    (Some(mtu), Some(from), Some(to)) => qp.cm.set_path(&path::record(from.ip(), to.ip(), mtu, path)),
                    _ => qp.cm.resolve_route(milliseconds(self.config.resolve_timeout)),
                };
                if let Some(Err(error)) = self.completion.table.peek(id).map(|qp| self.check_device(&qp.cm)) {
                    self.fail_connect(id, error);
                } else if let Err(error) = resolved {
                    self.fail_unreachable(id, format!("rdma_resolve_route: {error}"));
                }
            }
            (CmEventKind::RouteResolved, QpState::Connecting) => {
                if let Err(error) = qp.cm.connect(&qp.parameters(&self.config)) {
                    self.fail_unreachable(id, format!("rdma_connect: {error}"));
                }
            }
            (CmEventKind::ConnectResponse, QpState::Connecting) => {
                let started = qp.start(&self.config, self.device.is_infiniband);
                match started.and_then(|()| qp.cm.establish()) {
                    Ok(()) => self.report_established(id, event.private_data),
                    Err(error) => self.fail_connect(id, FabricError::system("starting the queue pair", error)),
                }
            }
            // The client gave up meanwhile. The reject informs the acceptor.
            (CmEventKind::ConnectResponse, QpState::Failed) => reject(&qp.cm, &[]),
            (CmEventKind::Established, QpState::Accepting) => self.report_established(id, Vec::new()),
            (CmEventKind::Rejected, QpState::Connecting) => self.report_rejected(id, event),
            (kind, QpState::Connecting) if is_final(kind) => {
                self.fail_unreachable(id, format!("{kind:?} ({})", io::Error::from_raw_os_error(event.status.abs())));
            }
            // This identifier's device is known to be the opened one. Other devices come and go.
            (CmEventKind::DeviceRemoval, QpState::Accepting | QpState::Up | QpState::Closing) => {
                self.device_lost(DeviceEvent::Removed);
            }
            (CmEventKind::Disconnected, QpState::Closing) => {
                self.end_connection(id, Disconnect::Local, "both sides have closed it")
            }
            (CmEventKind::Disconnected, _) => self.end_connection(id, Disconnect::Peer, "the peer has closed it"),
            (kind, QpState::Accepting | QpState::Up) if is_final(kind) => {
                let reason = format!("the connection manager says {kind:?} ({})", event.status);
                self.end_connection(id, Disconnect::Failure, reason);
            }
            _ => {}
        }
    }

    fn add_request(&mut self, Accepted { request: event, count }: Accepted<CmEvent>) {
        let Some(mut cm) = event.request else { return };
        self.next_request += 1;
        let number = self.next_request;
        if let Err(error) = cm.adopt(&self.device.channel, REQUEST | number as usize) {
            let line = format_args!("a connect request is lost: rdma_migrate_id: {error}");
            return self.scratch.log.warn("connect requests lost", line);
        }
        let peer = cm.peer_address().map_or_else(|| "an unknown address".to_owned(), |address| address.to_string());
        self.requests.push(PendingRequest {
            number,
            cm,
            responder_resources: event.responder_resources.into(),
            initiator_depth: event.initiator_depth.into(),
            count,
        });
        let (request, private_data) = (RequestId(number), event.private_data);
        self.events.push(ControlEvent::ConnectRequest { request, private_data, peer });
    }

    fn report_established(&mut self, id: QpId, private_data: Vec<u8>) {
        if let Some(qp) = self.completion.table.get(id) {
            qp.state = QpState::Up;
            self.events.push(ControlEvent::Established { qp: id, private_data });
        }
    }

    fn report_rejected(&mut self, id: QpId, event: CmEvent) {
        let refused = io::Error::from(io::ErrorKind::ConnectionRefused).raw_os_error();
        if event.status == REJECTED_BY_CONSUMER || event.status < 0 && !event.private_data.is_empty() {
            let mut private_data = event.private_data;
            // Zeroes pad it, because it has no length on the wire.
            private_data.truncate(private_data.iter().rposition(|&byte| byte != 0).map_or(0, |last| last + 1));
            self.fail_attempt(id, ControlEvent::Rejected { qp: id, private_data });
        } else if event.status == REJECTED_NO_SERVICE || event.status.checked_neg() == refused {
            self.fail_unreachable(id, "the host is there, but nobody listens at this port".to_owned());
        } else {
            self.fail_unreachable(id, format!("its connection manager has refused, code {}", event.status));
        }
    }

    fn fail_unreachable(&mut self, id: QpId, why: String) {
        let peer = self.completion.table.peek(id).and_then(|qp| qp.cm.peer_address());
        let error = self.unreachable(peer.map_or_else(String::new, |address| address.to_string()), why);
        self.fail_connect(id, error);
    }

    fn fail_connect(&mut self, id: QpId, error: FabricError) {
        self.fail_attempt(id, ControlEvent::ConnectFailed { qp: id, error });
    }

    /// Ends a connection attempt, and reports it by `event`.
    fn fail_attempt(&mut self, id: QpId, event: ControlEvent) {
        let Some(qp) = self.completion.table.get(id).filter(|qp| qp.state == QpState::Connecting) else { return };
        qp.state = QpState::Failed;
        qp.stop();
        self.events.push(event);
    }

    /// Ends the connection and flushes posted requests.
    pub(super) fn end_connection(&mut self, id: QpId, cause: Disconnect, reason: impl Into<String>) {
        let Some(qp) = self.completion.table.get(id) else { return };
        if matches!(qp.state, QpState::Connecting | QpState::Failed | QpState::Ended) {
            return;
        }
        qp.state = QpState::Ended;
        // Sends or answers a disconnect. An error means that both sides have closed already.
        if let Err(error) = qp.cm.disconnect() {
            log::trace!("{id:?}: rdma_disconnect: {error}");
        }
        qp.stop();
        let reason = reason.into();
        log::debug!("{id:?}: {reason}");
        qp.end_report = Some((self.completion.empty_polls, cause, reason));
        self.completion.attention.push(id.slot);
    }

    /// Starts a local close. Posted requests still leave.
    pub(super) fn start_disconnect(&mut self, id: QpId) {
        let Some(qp) = self.completion.table.get(id) else { return };
        match qp.state {
            QpState::Up => {
                qp.state = QpState::Closing;
                qp.deadline = Some(Instant::now() + self.config.linger);
                self.completion.post_marker(id, &mut self.scratch);
                self.completion.attention.push(id.slot);
            }
            QpState::Connecting => self.fail_connect(id, FabricError::misuse("given up by this side")),
            QpState::Accepting => self.end_connection(id, Disconnect::Local, "given up by this side"),
            QpState::Closing | QpState::Ended | QpState::Failed => {}
        }
    }

    /// Processes the slots in `attention`.
    fn process_attention(&mut self) {
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
                self.end_connection(id, cause, reason);
            } else if qp.state == QpState::Closing {
                if qp.queues.in_flight() == 0 || qp.deadline.is_some_and(|deadline| deadline <= Instant::now()) {
                    self.end_connection(id, Disconnect::Local, "closed by this side");
                } else {
                    self.completion.attention.push(slot);
                }
            } else if qp.state == QpState::Accepting && qp.is_early {
                // The connection manager detects this by itself. With `rdma_notify` and an immediate close, Linux 6.1
                // keeps repeating its answer. It then holds the identifier for 40 s, until it gives up.
                self.report_established(id, Vec::new());
            }
        }
    }

    /// Processes the device's asynchronous events.
    pub(super) fn device_events(&mut self) {
        for _ in 0..MAX_EVENTS {
            let Some(objects) = &self.device.objects else { return };
            let Some(event) = objects.context.next_async() else { return };
            let own_port = u32::from(self.device.choice.port);
            match event {
                AsyncEvent::QueuePair { cookie, code } => self.queue_pair_event(cookie as u32, code),
                AsyncEvent::Device {
                    code: AsyncEvent::CQ_ERROR | AsyncEvent::DEVICE_FATAL | AsyncEvent::SRQ_ERROR,
                } => {
                    log::debug!("{}: {event:?}", self.device.choice.device);
                    self.device_lost(DeviceEvent::Failed);
                }
                AsyncEvent::Port { port, code: code @ (AsyncEvent::PORT_ERROR | AsyncEvent::PORT_ACTIVE) }
                    if port == own_port =>
                {
                    let is_down = code == AsyncEvent::PORT_ERROR;
                    self.completion.is_port_down = is_down;
                    self.completion.stats.port_downs += u64::from(is_down);
                    let event = if is_down { DeviceEvent::PortDown { port } } else { DeviceEvent::PortUp { port } };
                    self.events.push(ControlEvent::Device(event));
                }
                other => log::info!("{}: {other:?}", self.device.choice.device),
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
        if !matches!(qp.state, QpState::Connecting | QpState::Failed | QpState::Ended) {
            // An error means that both sides have closed already.
            let _ = qp.cm.disconnect();
        }
        qp.state = QpState::Ended;
        qp.stop();
        if qp.was_ready {
            self.drain_completions(id);
        }
        let Some(gone) = self.completion.remove(id) else { return };
        let VerbsQp { mut queues, cm, .. } = *gone;
        self.completion.room += queues.destroy(&mut self.completion.ready);
        reaper::dispose(cm);
        self.completion.attention.retain(|&slot| slot != id.slot);
        // The caller of `destroy` needs no `Disconnected` event.
        self.events.retain(|e| !matches!(e, ControlEvent::Disconnected { qp, .. } if *qp == id));
    }

    /// Waits a bounded time for the last completions of a queue pair in error.
    fn drain_completions(&mut self, id: QpId) {
        self.completion.post_marker(id, &mut self.scratch);
        let within = self.config.drain;
        let limit = Instant::now() + within;
        if !drain(&mut DrainingQp { fabric: self, id, limit, done: Vec::new() }) {
            let line = format_args!("{id:?}: its last completions did not come within {within:?}");
            self.scratch.log.warn("queue pairs whose last completions did not come", line);
        }
    }
}

/// A queue pair before its destruction, with its fabric.
struct DrainingQp<'a> {
    fabric: &'a mut VerbsFabric,
    id: QpId,
    limit: Instant,
    done: Vec<Completion>,
}

impl Draining for DrainingQp<'_> {
    fn take(&mut self) -> (usize, bool) {
        let Self { fabric, done, .. } = self;
        let taken = fabric.poll_device(done, POLL_BATCH);
        fabric.completion.ready.extend(done.drain(..));
        (taken, taken == POLL_BATCH)
    }

    fn is_silent(&mut self) -> bool {
        let Some(qp) = self.fabric.completion.table.peek(self.id) else { return true };
        let state = ErrorState {
            was_ready: qp.was_ready,
            shares_receives: qp.queues.shares_receives(),
            reports_last_receive: self.fabric.device.quirks.reports_last_receive,
            last_receive_reached: qp.last_receive_reached,
            outstanding: qp.queues.outstanding(),
        };
        state.is_silent()
    }

    fn capacity(&self) -> usize {
        self.fabric.device.objects.as_ref().map_or(0, |objects| objects.cq.capacity() as usize)
    }

    fn wait(&mut self) -> bool {
        self.fabric.device_events();
        std::thread::yield_now();
        Instant::now() < self.limit
    }
}

/// Informs the peer of a refusal. If that fails, the end of its connection does.
fn reject(cm: &CmId, private_data: &[u8]) {
    if let Err(error) = cm.reject(private_data) {
        log::debug!("rdma_reject: {error}");
    }
}

/// Whether the event ends a connection or an attempt.
fn is_final(kind: CmEventKind) -> bool {
    use CmEventKind::{AddressError, ConnectError, DeviceRemoval, Disconnected, Rejected, RouteError, Unreachable};
    matches!(kind, AddressError | RouteError | ConnectError | Unreachable | Rejected | Disconnected | DeviceRemoval)
}
