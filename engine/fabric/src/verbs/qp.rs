//! One queue pair with its connection.

#![forbid(unsafe_code)]

use std::time::Instant;

use rdma_sys::{ibv_access_flags, ibv_qp_attr_mask, ibv_qp_state};

use super::config::VerbsConfig;
use super::endpoint::Endpoint;
use super::path;
use super::sys::{CmId, ConnectionParameters, QpAttributes};
use crate::seats::Taken;
use crate::{ConnectParams, Disconnect, QpId};

/// Bits that the kernel's connection manager sets for its own use.
const KERNEL_ONLY: u32 = 0xF << 21;

/// Where a connection is in its life.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum State {
    /// We connect: address, route, and the peer's answer are waited for.
    Connecting,
    /// We have accepted: the peer's last word is waited for.
    Accepting,
    /// Both directions may be used.
    Up,
    /// Closing locally: posted requests still go out.
    Closing,
    /// Over: the queue pair is in error.
    Over,
    /// It never came about.
    Failed,
}

/// One queue pair.
pub(super) struct Qp {
    pub(super) id: QpId,
    pub(super) state: State,
    pub(super) endpoint: Endpoint,
    pub(super) cm: CmId,
    pub(super) params: ConnectParams,
    /// The time at which a closing connection ends in any case.
    pub(super) deadline: Option<Instant>,
    /// The cause of its end, from a completion or the device.
    pub(super) failure: Option<(Disconnect, String)>,
    /// The final event, and the empty poll after which to report it. Earlier messages come first.
    pub(super) farewell: Option<(u64, Disconnect, String)>,
    /// A message came before the connection manager's last word.
    pub(super) is_early: bool,
    /// Whether it was ready to receive. Messages may have met Receives of it, or of the shared queue.
    pub(super) was_ready: bool,
    /// It takes no more of the shared Receives.
    pub(super) last_receive_reached: bool,
    /// Counts it at the address that it came by.
    pub(super) taken: Option<Taken>,
}

impl Qp {
    /// Sets its end, unless already set.
    #[cold]
    pub(super) fn fail(&mut self, attention: &mut Vec<u32>, cause: Disconnect, reason: impl FnOnce() -> String) {
        if matches!(self.state, State::Accepting | State::Up | State::Closing) && self.failure.is_none() {
            self.failure = Some((cause, reason()));
            attention.push(self.id.slot);
        }
    }

    /// Requests are taken, if only to be flushed. A side with data from its peer may answer.
    #[inline]
    pub(super) fn takes_requests(&self) -> bool {
        matches!(self.state, State::Up | State::Over) || self.state == State::Accepting && self.is_early
    }

    fn access(&self) -> u32 {
        let read = if self.params.responder_resources > 0 { ibv_access_flags::IBV_ACCESS_REMOTE_READ.0 } else { 0 };
        read | ibv_access_flags::IBV_ACCESS_REMOTE_WRITE.0
    }

    /// Readies the queue pair for Receives, before anything is known of the connection.
    pub(super) fn open(&self, port: u8) -> std::io::Result<()> {
        let mut to = QpAttributes::state(ibv_qp_state::IBV_QPS_INIT);
        to.attr.port_num = port;
        to.attr.qp_access_flags = self.access();
        let mask = ibv_qp_attr_mask::IBV_QP_PKEY_INDEX | ibv_qp_attr_mask::IBV_QP_PORT;
        to.mask |= (mask | ibv_qp_attr_mask::IBV_QP_ACCESS_FLAGS).0;
        self.endpoint.modify(to)
    }

    /// Readies the queue pair for both directions with the negotiated parameters.
    pub(super) fn start(&mut self, config: &VerbsConfig, is_infiniband: bool) -> std::io::Result<()> {
        let attributes = |state| {
            let mut to = self.cm.qp_attributes(state)?;
            if is_infiniband {
                to.mask &= !KERNEL_ONLY;
            }
            Ok::<_, std::io::Error>(to)
        };
        let mut init = attributes(ibv_qp_state::IBV_QPS_INIT)?;
        init.attr.qp_access_flags = self.access();
        self.endpoint.modify(init)?;
        let mut receive = attributes(ibv_qp_state::IBV_QPS_RTR)?;
        receive.attr.max_dest_rd_atomic = depth(self.params.responder_resources);
        receive.attr.min_rnr_timer = config.min_rnr_timer;
        path::mark(&mut receive.attr, &config.path);
        self.endpoint.modify(receive)?;
        self.was_ready = true;
        let mut send = attributes(ibv_qp_state::IBV_QPS_RTS)?;
        send.attr.max_rd_atomic = depth(self.params.initiator_depth);
        bound_patience(&mut send, config);
        self.endpoint.modify(send)
    }

    /// Puts the queue pair into error: all that is posted is flushed.
    pub(super) fn stop(&self) {
        if let Err(error) = self.endpoint.modify(QpAttributes::state(ibv_qp_state::IBV_QPS_ERR)) {
            log::debug!("{:?}: ibv_modify_qp to error: {error}", self.id);
        }
    }

    /// Parameters for the peer.
    pub(super) fn parameters(&self, config: &VerbsConfig) -> ConnectionParameters<'_> {
        ConnectionParameters {
            private_data: &self.params.private_data,
            responder_resources: depth(self.params.responder_resources),
            initiator_depth: depth(self.params.initiator_depth),
            retry_count: config.retries,
            rnr_retry: self.params.rnr_retry.min(7),
            shared_receives: self.endpoint.shares_receives(),
            qp_number: self.endpoint.number(),
        }
    }
}

/// Bounds the retries and waits for the peer. The peer's request or answer sets them, possibly unlimited; the local
/// knobs are the maximum.
fn bound_patience(send: &mut QpAttributes, config: &VerbsConfig) {
    let attr = &mut send.attr;
    attr.rnr_retry = attr.rnr_retry.min(config.rnr_retries);
    attr.retry_cnt = attr.retry_cnt.min(config.retries);
    // 0 means without end.
    attr.timeout = if attr.timeout == 0 { config.ack_timeout } else { attr.timeout.min(config.ack_timeout) };
}

/// The connection manager's byte for it; the highest value means the device's maximum.
pub(super) fn depth(reads: u16) -> u8 {
    reads.min(254) as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_does_not_choose_our_timeouts() {
        let config = VerbsConfig::default();
        let bounded = |rnr_retry, retry_cnt, timeout| {
            let mut send = QpAttributes::state(ibv_qp_state::IBV_QPS_RTS);
            (send.attr.rnr_retry, send.attr.retry_cnt, send.attr.timeout) = (rnr_retry, retry_cnt, timeout);
            bound_patience(&mut send, &config);
            (send.attr.rnr_retry, send.attr.retry_cnt, send.attr.timeout)
        };
        // Without end, each of them.
        assert_eq!(bounded(7, 7, 0), (6, 6, 20));
        assert_eq!(bounded(7, 7, 31), (6, 6, 20));
        // The peer may set less than ours: the Linux kernel asks for no retries where there is no Receive.
        assert_eq!(bounded(0, 3, 14), (0, 3, 14));
    }
}
