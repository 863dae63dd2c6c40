//! Connection setup and teardown.

#![forbid(unsafe_code)]

use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdma_sys::{ibv_qp_state, rdma_cm_event_type as kinds};

use super::completion::CompletionState;
use super::drain::{ErrorState, drain};
use super::qp::{VerbsQp, VerbsQpState};
use super::sys::{self, AsyncEvent, CmEvent, CmId, EventChannel, POLL_BATCH};
use super::work_queues::WorkQueues;
use super::{VerbsFabric, errors, path, reaper, wr_id};
use crate::accept_balancer::{Accepted, ConnectionCount};
use crate::{ConnectParams, ControlEvent, DeviceEvent, Disconnect, FabricError, QpId, RequestId};

/// Maximum events of one kind per pass, for fairness.
const MAX_EVENTS: usize = 256;
/// Maximum connect requests that other shards have handed over and this shard has not yet taken.
const MAX_HANDED_OVER: usize = 256;
/// Flag in the number of an identifier that belongs to a request, not to a queue pair.
pub(super) const REQUEST_FLAG: usize = 1 << (usize::BITS - 1);
/// Number of the identifier that receives the device's removal event.
pub(super) const WATCH: usize = REQUEST_FLAG - 1;
/// Maximum bytes of private data in a connect request, an accept and a reject.
pub(super) const CONNECT_DATA: usize = 56;
pub(super) const ACCEPT_DATA: usize = 196;
pub(super) const REJECT_DATA: usize = 148;
/// The peer's application refused (`IB_CM_REJ_CONSUMER_DEFINED`).
const REJECTED_BY_CONSUMER: i32 = 28;
/// No listener (`IB_CM_REJ_INVALID_SERVICE_ID`).
const REJECTED_NO_SERVICE: i32 = 8;

pub(super) fn milliseconds(time: Duration) -> i32 {
    time.as_millis().clamp(1, i32::MAX as u128) as i32
}

impl VerbsFabric {
    /// Creates a queue pair with its identifier. `max_data` bounds the private data.
    pub(super) fn create_qp(
        &mut self,
        params: &ConnectParams,
        max_data: usize,
        state: VerbsQpState,
        mut cm: CmId,
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
                return Err(FabricError::misuse(format!("{what}: {value} exceeds the device's limit {limit}")));
            }
        }
        let objects = self.objects()?;
        let (pd, cq) = (Rc::clone(&objects.pd), Rc::clone(&objects.cq));
        let reports_last_receive = self.device.quirks.reports_last_receive && params.own_receive_queue.is_none();
        let CompletionState { table, shared, by_number, .. } = &mut self.completion;
        table.try_insert(|id| {
            if id.slot >= wr_id::MAX_QPS - 1 {
                return Err(FabricError::misuse(format!(
                    "all {} queue pairs of the fabric are in use",
                    wr_id::MAX_QPS - 1
                )));
            }
            cm.set_cookie(id.slot as usize);
            let queues = WorkQueues::new(id, &pd, &cq, shared.queue(), params, max_inline_data).map_err(|e| {
                errors::pin_error(format!("ibv_create_qp with {sends} sends, {receives} own Receives"), &e)
            })?;
            by_number.insert(queues.number(), id.slot);
            Ok(VerbsQp {
                id,
                state,
                queues,
                cm,
                params: params.clone(),
                deadline: None,
                end: None,
                ended_at: 0,
                received_early: false,
                error_state: ErrorState { reports_last_receive, ..ErrorState::default() },
                count: None,
            })
        })
    }

    /// Checks that the connection manager chose the opened device.
    pub(super) fn check_device(&self, cm: &CmId) -> Result<(), FabricError> {
        let (found, opened) = (cm.device(), &self.device.choice.device);
        if found.as_ref() == Some(opened) {
            return Ok(());
        }
        let found = found.as_deref().unwrap_or("none");
        let detail = format!(
            "the connection uses device {found}, but this fabric has opened {opened}: name the device, by `device` or \
             in the address"
        );
        Err(FabricError::system("using a connection", detail))
    }

    /// Refuses a request whose path MTU exceeds the local one. The path MTU applies to both directions.
    pub(super) fn check_mtu(&self, cm: &CmId) -> Result<(), FabricError> {
        let Some(limit) = self.config.path.path_mtu else { return Ok(()) };
        let attributes = cm.qp_attributes(ibv_qp_state::IBV_QPS_RTR);
        let attributes = attributes.map_err(|e| FabricError::system("rdma_init_qp_attr", e))?;
        let theirs = path::mtu_bytes(attributes.attr.path_mtu);
        if theirs <= limit {
            return Ok(());
        }
        reject(cm, format!("path MTU {theirs} exceeds `path_mtu` {limit} of this side").as_bytes());
        Err(FabricError::peer_violation(format!(
            "path MTU {theirs} exceeds `path_mtu` {limit} of this side: set `path_mtu` on both sides"
        )))
    }

    /// Returns the error for an unreachable address. The text names this fabric's device.
    pub(super) fn unreachable(&self, address: &str, why: &str) -> FabricError {
        let detail = format!("{why}; this fabric uses {}", self.device.capabilities.device);
        FabricError::unreachable(address, detail)
    }

    /// Processes pending events of the connection manager.
    pub(super) fn process_channel_events(&mut self, channel: &Arc<EventChannel>) {
        for _ in 0..MAX_EVENTS {
            match channel.next() {
                Ok(Some(event)) => self.process_connection_event(event),
                Ok(None) => return,
                Err(error) => {
                    let line = format_args!("rdma_get_cm_event: {error}");
                    return self.context.log.warn("failures of rdma_get_cm_event", line);
                }
            }
        }
    }

    fn process_connection_event(&mut self, event: CmEvent) {
        if event.kind == kinds::RDMA_CM_EVENT_CONNECT_REQUEST {
            let member = self.listener.as_ref().and_then(|listening| listening.member.as_ref());
            let accepted = member.and_then(|member| member.assign(event, MAX_HANDED_OVER));
            return accepted.into_iter().for_each(|request| self.add_request(request));
        }
        match event.cookie {
            reaper::NO_OWNER => return,
            WATCH if event.kind == kinds::RDMA_CM_EVENT_DEVICE_REMOVAL => {
                return self.handle_device_loss(DeviceEvent::Removed);
            }
            WATCH => return,
            // The peer gave up before the answer.
            cookie if cookie & REQUEST_FLAG != 0 => {
                let request = self.take_request((cookie & !REQUEST_FLAG) as u64);
                return request.into_iter().for_each(|(_, cm, _)| reaper::dispose(cm));
            }
            _ => {}
        }
        let Some(qp) = self.completion.table.get_by_slot_mut(event.cookie as u32) else { return };
        let id = qp.id;
        log::trace!("{id:?}: {} {}", event.name(), event.status);
        match (event.kind, qp.state) {
            (kinds::RDMA_CM_EVENT_ADDR_RESOLVED, VerbsQpState::Connecting) => {
                let config = &self.config.path;
                // With a configured MTU, the path is set directly instead of resolved.
                let resolved = match (config.path_mtu, qp.cm.own_address(), qp.cm.peer_address()) {
                    (Some(mtu), Some(from), Some(to)) => {
                        let code = path::mtu_code(mtu) as u8;
                        qp.cm.set_path(sys::path_record(from.ip(), to.ip(), code, config))
                    }
                    _ => qp.cm.resolve_route(milliseconds(self.config.resolve_timeout)),
                };
                if let Some(Err(error)) = self.completion.table.get(id).map(|qp| self.check_device(&qp.cm)) {
                    self.fail_connect(id, error);
                } else if let Err(error) = resolved {
                    self.fail_unreachable(id, &format!("rdma_resolve_route: {error}"));
                }
            }
            (kinds::RDMA_CM_EVENT_ROUTE_RESOLVED, VerbsQpState::Connecting) => {
                if let Err(error) = qp.cm.connect(&qp.params.private_data, qp.parameters(&self.config)) {
                    self.fail_unreachable(id, &format!("rdma_connect: {error}"));
                }
            }
            (kinds::RDMA_CM_EVENT_CONNECT_RESPONSE, VerbsQpState::Connecting) => {
                let started = qp.enter_ready(&self.config, self.device.choice.is_infiniband);
                match started.and_then(|()| qp.cm.establish()) {
                    Ok(()) => self.report_established(id, event.private_data),
                    Err(error) => self.fail_connect(id, FabricError::system("starting the queue pair", error)),
                }
            }
            // This side has given up in the meantime. The reject informs the acceptor.
            (kinds::RDMA_CM_EVENT_CONNECT_RESPONSE, VerbsQpState::Failed) => reject(&qp.cm, &[]),
            (kinds::RDMA_CM_EVENT_ESTABLISHED, VerbsQpState::Accepting) => self.report_established(id, Vec::new()),
            (kinds::RDMA_CM_EVENT_REJECTED, VerbsQpState::Connecting) => self.report_rejected(id, event),
            // This identifier belongs to the opened device. Removals of other devices do not matter.
            (
                kinds::RDMA_CM_EVENT_DEVICE_REMOVAL,
                VerbsQpState::Accepting | VerbsQpState::Up | VerbsQpState::Closing,
            ) => {
                self.handle_device_loss(DeviceEvent::Removed);
            }
            (kinds::RDMA_CM_EVENT_DISCONNECTED, VerbsQpState::Closing) => {
                self.end_connection(id, Disconnect::Local, "both sides closed the connection");
            }
            (kinds::RDMA_CM_EVENT_DISCONNECTED, VerbsQpState::Accepting | VerbsQpState::Up) => {
                self.end_connection(id, Disconnect::Peer, "the peer closed the connection");
            }
            (
                kinds::RDMA_CM_EVENT_ADDR_ERROR
                | kinds::RDMA_CM_EVENT_ROUTE_ERROR
                | kinds::RDMA_CM_EVENT_CONNECT_ERROR
                | kinds::RDMA_CM_EVENT_UNREACHABLE
                | kinds::RDMA_CM_EVENT_REJECTED
                | kinds::RDMA_CM_EVENT_DISCONNECTED
                | kinds::RDMA_CM_EVENT_DEVICE_REMOVAL,
                state,
            ) => {
                let (name, error) = (event.name(), io::Error::from_raw_os_error(event.status.abs()));
                match state {
                    VerbsQpState::Connecting => self.fail_unreachable(id, &format!("{name} ({error})")),
                    VerbsQpState::Accepting | VerbsQpState::Up => {
                        let reason = format!("connection manager event {name} ({})", event.status);
                        self.end_connection(id, Disconnect::Failure, reason);
                    }
                    VerbsQpState::Closing | VerbsQpState::Ended | VerbsQpState::Failed => {}
                }
            }
            _ => {}
        }
    }

    pub(super) fn add_request(&mut self, mut accepted: Accepted<CmEvent>) {
        let CmEvent { request: Some(cm), private_data, .. } = &mut accepted.request else { return };
        self.next_request += 1;
        let number = self.next_request;
        if let Err(error) = cm.move_to(&self.device.channel, REQUEST_FLAG | number as usize) {
            let line = format_args!("connect request lost: rdma_migrate_id: {error}");
            return self.context.log.warn("connect requests lost", line);
        }
        let peer = cm.peer_address().map_or_else(|| "an unknown address".to_owned(), |address| address.to_string());
        let (request, private_data) = (RequestId(number), std::mem::take(private_data));
        self.requests.insert(number, accepted);
        self.events.push(ControlEvent::ConnectRequest { request, private_data, peer });
    }

    /// Forgets an unanswered connect request. Returns its parameters, its identifier, and its count at the listener.
    pub(super) fn take_request(&mut self, number: u64) -> Option<(CmEvent, CmId, ConnectionCount)> {
        let Accepted { request: mut event, count } = self.requests.remove(&number)?;
        let cm = event.request.take()?;
        Some((event, cm, count))
    }

    fn report_established(&mut self, id: QpId, private_data: Vec<u8>) {
        if let Some(qp) = self.completion.table.get_mut(id) {
            qp.state = VerbsQpState::Up;
            self.events.push(ControlEvent::Established { qp: id, private_data });
        }
    }

    fn report_rejected(&mut self, id: QpId, event: CmEvent) {
        let refused = io::Error::from(io::ErrorKind::ConnectionRefused).raw_os_error();
        if event.status == REJECTED_BY_CONSUMER || event.status < 0 && !event.private_data.is_empty() {
            let mut private_data = event.private_data;
            // Private data has no length on the wire. It is padded with zeroes, which are removed here.
            private_data.truncate(private_data.iter().rposition(|&byte| byte != 0).map_or(0, |last| last + 1));
            self.fail_attempt(id, ControlEvent::Rejected { qp: id, private_data });
        } else if event.status == REJECTED_NO_SERVICE || event.status.checked_neg() == refused {
            self.fail_unreachable(id, "the host answers, but has no listener at this port");
        } else {
            self.fail_unreachable(id, &format!("the peer's connection manager refused with code {}", event.status));
        }
    }

    fn fail_unreachable(&mut self, id: QpId, why: &str) {
        let peer = self.completion.table.get(id).and_then(|qp| qp.cm.peer_address());
        let error = self.unreachable(&peer.map_or_else(String::new, |address| address.to_string()), why);
        self.fail_connect(id, error);
    }

    pub(super) fn fail_connect(&mut self, id: QpId, error: FabricError) {
        self.fail_attempt(id, ControlEvent::ConnectFailed { qp: id, error });
    }

    /// Ends a connection attempt, and reports this with `event`.
    fn fail_attempt(&mut self, id: QpId, event: ControlEvent) {
        let Some(qp) = self.completion.table.get_mut(id).filter(|qp| qp.state == VerbsQpState::Connecting) else {
            return;
        };
        qp.state = VerbsQpState::Failed;
        qp.enter_error();
        self.events.push(event);
    }

    /// Ends the connection and flushes posted requests.
    pub(super) fn end_connection(&mut self, id: QpId, cause: Disconnect, reason: impl Into<String>) {
        let Some(qp) = self.completion.table.get_mut(id) else { return };
        if matches!(qp.state, VerbsQpState::Connecting | VerbsQpState::Failed | VerbsQpState::Ended) {
            return;
        }
        qp.state = VerbsQpState::Ended;
        // This sends or answers a disconnect. An error means that both sides have already closed.
        if let Err(error) = qp.cm.disconnect() {
            log::trace!("{id:?}: rdma_disconnect: {error}");
        }
        qp.enter_error();
        let reason = reason.into();
        log::debug!("{id:?}: {reason}");
        (qp.end, qp.ended_at) = (Some((cause, reason)), self.completion.empty_polls);
        self.completion.attention.push(id.slot);
    }

    /// Processes the slots in `attention`.
    pub(super) fn process_attention(&mut self) {
        for slot in std::mem::take(&mut self.completion.attention) {
            let Some(qp) = self.completion.table.get_by_slot_mut(slot) else { continue };
            let id = qp.id;
            if qp.state == VerbsQpState::Ended {
                if qp.ended_at == self.completion.empty_polls {
                    self.completion.attention.push(slot);
                } else if let Some((cause, reason)) = qp.end.take() {
                    self.events.push(ControlEvent::Disconnected { qp: id, cause, reason });
                }
            } else if let Some((cause, reason)) = qp.end.take() {
                self.end_connection(id, cause, reason);
            } else if qp.state == VerbsQpState::Closing {
                if qp.queues.in_flight() == 0 || qp.deadline.is_some_and(|deadline| deadline <= Instant::now()) {
                    self.end_connection(id, Disconnect::Local, "this side closed the connection");
                } else {
                    self.completion.attention.push(slot);
                }
            } else if qp.state == VerbsQpState::Accepting && qp.received_early {
                // The connection manager needs no `rdma_notify`, because it detects the early message itself. After
                // `rdma_notify` and an immediate close, Linux 6.1 repeats its answer and holds the identifier for 40 s.
                self.report_established(id, Vec::new());
            }
        }
    }

    /// Processes the device's asynchronous events.
    pub(super) fn process_device_events(&mut self) {
        for _ in 0..MAX_EVENTS {
            let Some(objects) = &self.device.objects else { return };
            let Some(event) = objects.context.next_async() else { return };
            let port = u32::from(self.device.choice.port);
            match event.code {
                AsyncEvent::CQ_ERROR | AsyncEvent::DEVICE_FATAL | AsyncEvent::SRQ_ERROR => {
                    log::debug!("{}: {event:?}", self.device.choice.device);
                    self.handle_device_loss(DeviceEvent::Failed);
                }
                AsyncEvent::PORT_ERROR | AsyncEvent::PORT_ACTIVE if event.subject == port as usize => {
                    let is_down = event.code == AsyncEvent::PORT_ERROR;
                    self.completion.is_port_down = is_down;
                    self.completion.stats.port_downs += u64::from(is_down);
                    let event = if is_down { DeviceEvent::PortDown { port } } else { DeviceEvent::PortUp { port } };
                    self.events.push(ControlEvent::Device(event));
                }
                1..=7 | AsyncEvent::LAST_RECEIVE_REACHED => {
                    self.process_queue_pair_event(event.subject as u32, event.code);
                }
                _ => log::info!("{}: {event:?}", self.device.choice.device),
            }
        }
    }

    fn process_queue_pair_event(&mut self, slot: u32, code: u32) {
        let Some(qp) = self.completion.table.get_by_slot_mut(slot) else { return };
        match code {
            AsyncEvent::LAST_RECEIVE_REACHED => qp.error_state.last_receive_reached = true,
            AsyncEvent::ESTABLISHED => {
                qp.received_early = true;
                self.completion.attention.push(slot);
            }
            // The codes mean a fatal error, an invalid request, or refused access. Other codes concern path migration.
            1..=3 => qp.fail(&mut self.completion.attention, Disconnect::Failure, || {
                format!("device event {code} of the queue pair")
            }),
            _ => log::debug!("{:?}: event {code} of the queue pair", qp.id),
        }
    }

    /// Waits a bounded time for the last completions of a queue pair in error.
    pub(super) fn drain_completions(&mut self, id: QpId) {
        self.completion.post_marker(id, &mut self.context);
        let within = self.config.drain;
        let limit = Instant::now() + within;
        let capacity = self.device.objects.as_ref().map_or(0, |objects| objects.cq.capacity() as usize);
        let mut done = Vec::new();
        let take_batch = |fabric: &mut Self| {
            let taken = fabric.poll_device(&mut done, POLL_BATCH);
            fabric.completion.ready.extend(done.drain(..));
            taken
        };
        let is_quiescent = |fabric: &mut Self| {
            let qp = fabric.completion.table.get(id);
            qp.is_none_or(|qp| qp.error_state.is_quiescent(qp.queues.outstanding()))
        };
        let wait = |fabric: &mut Self| {
            fabric.process_device_events();
            std::thread::yield_now();
            Instant::now() < limit
        };
        if !drain(self, capacity, take_batch, is_quiescent, wait) {
            let line = format_args!("{id:?}: the last completions did not arrive within {within:?}");
            self.context.log.warn("queue pairs without their last completions", line);
        }
    }
}

/// Refuses a connect request. If the call fails, the peer only sees the end of its connection.
pub(super) fn reject(cm: &CmId, private_data: &[u8]) {
    if let Err(error) = cm.reject(private_data) {
        log::debug!("rdma_reject: {error}");
    }
}
