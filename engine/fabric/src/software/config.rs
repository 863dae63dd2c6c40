//! The knobs of the software fabric.

use std::time::Duration;

use crate::{FabricError, checks};

/// Smallest and largest ring that either side of a connection agrees to, in bytes.
pub(super) const RING_BYTES: std::ops::RangeInclusive<usize> = 4096..=1 << 24;

with_defaults! {
    /// Configuration of a [`SoftwareFabric`](super::SoftwareFabric). Every field has a default that suits a shard of a
    /// few hundred connections.
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub struct SoftwareConfig {
        /// Maximum ring bytes per direction. A power of two, 4 KiB to 16 MiB. The smaller value of both sides is used.
        /// Default 256 KiB. A ring begins with 2 KiB and grows when full. The unused rest is address space, not memory.
        /// A full ring of maximum size makes the sender wait: raise the limit for many outstanding long messages.
        pub ring_bytes: usize = 256 << 10,
        /// Longest message in bytes; the smaller of both sides' values is used. At most half of `ring_bytes`. Default
        /// 64 KiB. The limit takes no memory until used.
        pub max_message: usize = 64 << 10,
        /// Receives that the shared queue holds. Default 4096; the queue takes 32 bytes for each.
        pub shared_receives: usize = 4096,
        /// Whether this fabric ever uses [`arm`](crate::Fabric::arm) and [`wait`](crate::Fabric::wait). Default
        /// true. With `false` its peers save one atomic exchange (2 ns) per message, and `wait` must not be called.
        pub may_sleep: bool = true,
        /// Maximum bytes that a connection may map: its ring, window table and exposed memory. Default 16 GiB.
        /// Costs address space, and page tables for the used part.
        pub max_mapped_per_peer: u64 = 16 << 30,
        /// Memory regions that one connection may expose. Default 128: a client exposes one region, and another for
        /// each exposed arena. Each region takes a mapping. The process reserves half of `vm.max_map_count` for these
        /// mappings; when few are left, a connection's share is smaller.
        pub max_regions_per_peer: usize = 128,
        /// Concurrent handshakes of a fabric. Default 64. Beyond it, the process with the most incomplete handshakes
        /// loses its oldest one. Per turn, at most this many connections, and at most 16, are accepted or refused.
        pub max_handshakes: usize = 64,
        /// Longest connection setup, on either side. Default 5 s.
        pub handshake_timeout: Duration = Duration::from_secs(5),
        /// Longest wait for a peer that takes no messages or does not finish a copy. Then the connection ends with
        /// [`RnrRetryExceeded`](crate::Status::RnrRetryExceeded), as after the retries of a device. Default 30 s.
        /// Waiting requests hold buffers.
        pub retry_timeout: Duration = Duration::from_secs(30),
        /// Longest time for which a closing connection waits until its peer has taken all sent data. Default 1 s.
        pub linger: Duration = Duration::from_secs(1),
        /// Maximum closed connections whose peers have not read everything. Beyond it, the oldest is reset. Default
        /// 1024.
        pub max_closing: usize = 1024,
    }
}

impl SoftwareConfig {
    /// Checks the fields; an error names one out of range.
    pub(super) fn check(&self) -> Result<(), FabricError> {
        let check = |ok, field, got, rule| checks::check_field("software", ok, field, got, rule);
        let ring = self.ring_bytes;
        let is_size = ring.is_power_of_two() && RING_BYTES.contains(&ring);
        check(is_size, "ring_bytes", ring, "expected a power of two from 4 KiB to 16 MiB")?;
        let fits = (1..=ring / 2).contains(&self.max_message);
        check(fits, "max_message", self.max_message, "expected 1 byte to half of ring_bytes")?;
        check(self.max_handshakes != 0, "max_handshakes", 0, "expected at least 1")
    }
}
