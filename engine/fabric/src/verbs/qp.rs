//! One queue pair with its connection.

#![forbid(unsafe_code)]

use std::time::Instant;

use rdma_sys::{ibv_access_flags, ibv_qp_state, rdma_conn_param};

use super::config::VerbsConfig;
use super::drain::ErrorState;
use super::path;
use super::sys::{CmId, QpAttributes};
use super::work_queues::{WorkQueues, flag};
use crate::accept_balancer::ConnectionCount;
use crate::{ConnectParams, Disconnect, QpId};

/// Attribute bits for the kernel's connection manager only.
const KERNEL_ONLY: u32 = 0xF << 21;

/// State of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum VerbsQpState {
    /// This side connects, and waits for address, route and the peer's answer.
    Connecting,
    /// This side has accepted, and waits for the peer's final message.
    Accepting,
    /// Established in both directions.
    Up,
    /// Closed by this side. Posted requests are still sent.
    Closing,
    /// The connection has ended, and the queue pair is in error.
    Ended,
    /// The connection was never established.
    Failed,
}

pub(super) struct VerbsQp {
    pub(super) id: QpId,
    pub(super) state: VerbsQpState,
    pub(super) queues: WorkQueues,
    pub(super) cm: CmId,
    pub(super) params: ConnectParams,
    /// Time limit of a local close, even with requests in flight.
    pub(super) deadline: Option<Instant>,
    /// Cause of the end, until it is reported. The connection ends only when connection management finds this cause.
    pub(super) end: Option<(Disconnect, String)>,
    /// The count of empty polls when the connection ended. The fabric reports the end after a later empty poll, so that
    /// earlier messages are delivered first.
    pub(super) ended_at: u64,
    /// Whether a message arrived before the connection manager reported the connection.
    pub(super) received_early: bool,
    /// The device's reports about the queue pair in error.
    pub(super) error_state: ErrorState,
    /// Counts the connection at its listener.
    pub(super) count: Option<ConnectionCount>,
}

impl VerbsQp {
    /// Records the cause of the connection's end, unless a cause is already recorded.
    #[cold]
    pub(super) fn fail(&mut self, attention: &mut Vec<u32>, cause: Disconnect, reason: impl FnOnce() -> String) {
        if matches!(self.state, VerbsQpState::Accepting | VerbsQpState::Up | VerbsQpState::Closing)
            && self.end.is_none()
        {
            self.end = Some((cause, reason()));
            attention.push(self.id.slot);
        }
    }

    /// Whether requests can be posted, even if only to be flushed. An accepting side may send once data from the peer
    /// has arrived.
    #[inline]
    pub(super) fn accepts_posts(&self) -> bool {
        matches!(self.state, VerbsQpState::Up | VerbsQpState::Ended)
            || self.state == VerbsQpState::Accepting && self.received_early
    }

    fn access(&self) -> u32 {
        flag(self.params.responder_resources > 0, ibv_access_flags::IBV_ACCESS_REMOTE_READ.0)
            | ibv_access_flags::IBV_ACCESS_REMOTE_WRITE.0
    }

    /// Moves the queue pair to state INIT, in which Receives can be posted. Needs no connection parameters.
    pub(super) fn enter_init(&self, port: u8) -> std::io::Result<()> {
        self.queues.modify(QpAttributes::init(port, self.access()))
    }

    /// Moves the queue pair to states RTR and RTS with the negotiated parameters.
    pub(super) fn enter_ready(&mut self, config: &VerbsConfig, is_infiniband: bool) -> std::io::Result<()> {
        let attributes = |state| {
            let mut to = self.cm.qp_attributes(state)?;
            if is_infiniband {
                to.mask &= !KERNEL_ONLY;
            }
            Ok::<_, std::io::Error>(to)
        };
        let mut init = attributes(ibv_qp_state::IBV_QPS_INIT)?;
        init.attr.qp_access_flags = self.access();
        self.queues.modify(init)?;
        let mut receive = attributes(ibv_qp_state::IBV_QPS_RTR)?;
        receive.attr.max_dest_rd_atomic = read_depth(self.params.responder_resources);
        receive.attr.min_rnr_timer = config.min_rnr_timer;
        path::apply_options(&mut receive.attr, &config.path);
        self.queues.modify(receive)?;
        self.error_state.was_ready = true;
        let mut send = attributes(ibv_qp_state::IBV_QPS_RTS)?;
        send.attr.max_rd_atomic = read_depth(self.params.initiator_depth);
        bound_retries(&mut send, config);
        self.queues.modify(send)
    }

    /// Moves the queue pair to the error state, which flushes all posted requests.
    pub(super) fn enter_error(&self) {
        if let Err(error) = self.queues.modify(QpAttributes::state(ibv_qp_state::IBV_QPS_ERR)) {
            log::debug!("{:?}: ibv_modify_qp to error: {error}", self.id);
        }
    }

    /// Connection parameters for the peer, without the private data.
    pub(super) fn parameters(&self, config: &VerbsConfig) -> rdma_conn_param {
        rdma_conn_param {
            private_data: std::ptr::null(),
            private_data_len: 0,
            responder_resources: read_depth(self.params.responder_resources),
            initiator_depth: read_depth(self.params.initiator_depth),
            flow_control: 0,
            retry_count: config.retries,
            rnr_retry_count: self.params.rnr_retry.min(ConnectParams::UNLIMITED_RNR_RETRY),
            srq: self.queues.shares_receives().into(),
            qp_num: self.queues.number(),
        }
    }
}

/// Bounds retries and time-outs by the local knobs, because the peer's request or answer may set them without limit.
fn bound_retries(send: &mut QpAttributes, config: &VerbsConfig) {
    let attr = &mut send.attr;
    attr.rnr_retry = attr.rnr_retry.min(config.rnr_retries);
    attr.retry_cnt = attr.retry_cnt.min(config.retries);
    // 0 means unlimited.
    attr.timeout = if attr.timeout == 0 { config.ack_timeout } else { attr.timeout.min(config.ack_timeout) };
}

/// The connection manager's value for a read depth. 255 would mean the device's maximum.
pub(super) fn read_depth(reads: u16) -> u8 {
    reads.min(254) as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn local_knobs_bound_the_retries_and_timeouts_of_peers() {
        let config = VerbsConfig::default();
        let bounded = |rnr_retry, retry_cnt, timeout| {
            let mut send = QpAttributes::state(ibv_qp_state::IBV_QPS_RTS);
            (send.attr.rnr_retry, send.attr.retry_cnt, send.attr.timeout) = (rnr_retry, retry_cnt, timeout);
            bound_retries(&mut send, &config);
            (send.attr.rnr_retry, send.attr.retry_cnt, send.attr.timeout)
        };
        // The peer asks for unlimited retries and time-outs.
        assert_eq!(bounded(7, 7, 0), (6, 6, 20));
        assert_eq!(bounded(7, 7, 31), (6, 6, 20));
        // The peer may set lower values. The Linux kernel requests no retries of messages without a Receive.
        assert_eq!(bounded(0, 3, 14), (0, 3, 14));
    }
}
