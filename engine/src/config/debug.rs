//! Switches of single optimizations, and corner cases of the protocol and of the fabrics.

use std::time::Duration;

use super::{ConfigError, WireConfig, between, check, duration, positive};
use crate::fabric::iwarp::{FpduSize, MAX_READ_DEPTH};
use crate::proto::{CreditMode, MAX_CREDITS};
use crate::wire::Revision;
use crate::wire::properties::ReverseSupport;

knobs! {
    /// Switches of single optimizations, and corner cases of protocol and fabrics.
    ///
    /// The defaults are right for nearly all programs. Change one to measure what an optimization is worth, or for a
    /// peer or a device that needs it. Both ends must agree on [`revision`](Self::revision).
    pub struct DebugConfig, "debug";

    /// Batches work requests: one post per queue pair and turn. Default true.
    #[doc(alias = "doorbell")]
    pub batch: bool = true;
    /// Sends of a queue pair for each signaled one. Default 16. 1 signals each.
    #[doc(alias("completion queue", "signaled"))]
    pub signal_every: u32 = 16, positive;
    /// Fast-path decoding of headers with the usual layout. Default true.
    pub decode_by_layout: bool = true;
    /// Delays pure grants until half the credit limit is used. Default true.
    ///
    /// Otherwise each message is acknowledged at once.
    pub coalesce_grants: bool = true;
    /// Calls for each one timed, on average. Default 64.
    ///
    /// A power of two; 1 for all, 0 for none. Timed calls are in the latency histogram, and in
    /// [`ProcedureStats`](crate::stats::ProcedureStats) of a server. Timing a call reads the clock twice.
    pub sample_latency: u32 = 64, |knob, calls: u32| {
        check(calls == 0 || calls.is_power_of_two(), knob, calls, "0 or a power of two")
    };
    /// Touches the pools' pages when they are made. Default true.
    ///
    /// Otherwise the first use of each page costs a page fault, and a lack of memory shows only then: for tests, which
    /// make many shards and use little of each. RDMA devices pin, and so touch, all registered memory.
    pub prefault: bool = true;
    /// Send With Invalidate: clients offer a handle, servers use it. Default true; false if a device misreports it.
    #[doc(alias = "send with invalidate")]
    pub remote_invalidate: bool = true;
    /// Continues messages up to this length instead of using chunks, bytes.
    ///
    /// Version 2 only. Default 8192, which takes two or three messages; longer ones are cheaper as a chunk.
    #[cfg_attr(feature = "serde", serde(with = "crate::fabric::units::bytes"))]
    #[doc(alias = "message continuation")]
    pub continue_up_to: usize = 8 << 10;
    /// Code points of version 2. Default: draft-ietf-nfsv4-rpcrdma-version-two-00.
    ///
    /// If it differs between the ends, messages of version 2 are malformed to the peer.
    pub revision: Revision = Revision::Ietf00;
    /// Lets either end change its characteristics while connected. Default true.
    ///
    /// Version 2 only. False for a peer that rejects unknown properties.
    pub optional_operations: bool = true;
    /// Upper bound of [`receive_size`](super::WireConfig::receive_size) while connected, bytes. Default 0.
    ///
    /// See [`LocalClient::change_receive_size`](crate::LocalClient::change_receive_size). It also bounds Sends to a
    /// peer with larger receives. 0 counts as `receive_size`, which it must not be less than otherwise.
    #[cfg_attr(feature = "serde", serde(with = "crate::fabric::units::bytes"))]
    pub max_receive_size: usize = 0, |knob, bytes| {
        let possible = bytes <= 1 << 20 && bytes.is_multiple_of(4);
        check(possible, knob, bytes, "0 to 1048576 bytes, a multiple of 4")
    };
    /// Resizes receives when a peer asks for it. Default false.
    ///
    /// Within 4096 and [`max_receive_size`](Self::max_receive_size). For trusted peers: the size is the same for all of
    /// them. Needs `optional_operations`, and a `credit_mode` of version 2.
    pub resize_on_request: bool = false;
    /// Reverse-direction calls that a client with services takes. Default any.
    pub reverse: ReverseSupport = ReverseSupport::General;
    /// Outstanding reverse-direction calls in version 1, 0 to 32767. Default 8.
    ///
    /// Version 1 counts the directions apart: a client with services keeps receives for so many, at least 1, a server
    /// for so many replies.
    pub reverse_credits: u32 = 8, between(0..=MAX_CREDITS);
    /// Length of the FPDUs that the iWARP fabric sends. Default: by the peer.
    pub fpdu_size: FpduSize = FpduSize::default();
    /// RDMA Reads outstanding per side of an iWARP connection, 1 to 16383. Default 16.
    pub read_depth: u16 = 16, between(1..=MAX_READ_DEPTH);
    /// Concurrent handshakes of a listener of the iWARP or the software fabric. Default 64.
    ///
    /// The longest idle one is evicted.
    pub max_handshakes: usize = 64, positive;
    /// Time-out of connection setup over iWARP and shared memory, at either side. Default 5 s.
    #[cfg_attr(feature = "serde", serde(with = "crate::fabric::units::duration"))]
    pub handshake_timeout: Duration = Duration::from_secs(5), duration;
    /// Time for a closing connection to send its data. Default 1 s.
    #[cfg_attr(feature = "serde", serde(with = "crate::fabric::units::duration"))]
    pub linger: Duration = Duration::from_secs(1), duration;
}

impl DebugConfig {
    /// Checks all values, and that none contradicts the wire group.
    pub(super) fn validate(&self, wire: &WireConfig) -> Result<(), ConfigError> {
        self.check_each()?;
        let (most, size) = (self.max_receive_size, wire.receive_size);
        if most != 0 && most < size {
            let wanted = format!("0, or at least wire.receive_size, which is {size}");
            return Err(ConfigError::new("debug.max_receive_size", most, wanted));
        }
        let refuse = |wanted| Err(ConfigError::new("debug.resize_on_request", true, wanted));
        match self.resize_on_request {
            true if !self.optional_operations => {
                refuse("false, or debug.optional_operations true, which is false: a peer asks by such an operation")
            }
            true if wire.credit_mode == CreditMode::V1 => {
                refuse("false, as wire.credit_mode is v1: only a peer of version 2 asks for another size")
            }
            _ => Ok(()),
        }
    }
}
