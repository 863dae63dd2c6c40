//! The knobs of the iWARP fabric.

#![forbid(unsafe_code)]

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use crate::{FabricError, checks};

/// When FPDUs carry a CRC-32C (RFC 5044 §4.4, §7.1). TCP's checksum has 16 bits. It does not cover corruption by
/// network cards, switches and hosts after they have checked it; the CRC is end to end. Neither protects against
/// deliberate changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[cfg_attr(feature = "units", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "kebab-case"))]
pub enum Crc {
    /// Never; a peer that wants it is refused.
    Never,
    /// If the peer wants it, as the kernel's soft-iWARP.
    #[default]
    IfAsked,
    /// Always: this side requests it, so the peer must comply. See RFC 5044 §7.1.1.
    Always,
}

/// Length of the FPDUs that this side sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[cfg_attr(feature = "units", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "kebab-case"))]
pub enum FpduSize {
    /// As [`Longest`](Self::Longest) to a peer that is this engine, else as [`Segment`](Self::Segment).
    #[default]
    Auto,
    /// At most one TCP segment (the EMSS of RFC 5044 §4.5). An adapter can place such an FPDU on arrival, in any order.
    /// FPDUs are bounded by the segment, not packed to it. A TCP segment may hold the end of one and the start of the
    /// next, which is only slower.
    Segment,
    /// Nearly the format's maximum, 65464 bytes: fewer headers. Any stack that reads a byte stream accepts it, the
    /// kernel's soft-iWARP included.
    Longest,
}

/// Words for the variants of an enum, as options of programs have them.
macro_rules! words {
    ($Enum:ident: $($text:literal = $Variant:ident),+) => {
        impl FromStr for $Enum {
            type Err = FabricError;

            fn from_str(text: &str) -> Result<Self, FabricError> {
                match text {
                    $($text => Ok(Self::$Variant),)+
                    _ => Err(FabricError::misuse(format_args!("{text:?} is none of {}", [$($text),+].join(", ")))),
                }
            }
        }

        impl fmt::Display for $Enum {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(match self { $(Self::$Variant => $text),+ })
            }
        }
    };
}

words!(Crc: "never" = Never, "if-asked" = IfAsked, "always" = Always);
words!(FpduSize: "auto" = Auto, "segment" = Segment, "longest" = Longest);

with_defaults! {
    /// Configuration of the iWARP fabric.
    ///
    /// The defaults suit a shard of some hundred connections.
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub struct IwarpConfig {
        /// Whether FPDUs carry a CRC-32C. Default: if the peer wants it. Costs about 0.1 ns per byte, and a copy of
        /// received data.
        pub crc: Crc = Crc::default(),
        /// Length of FPDUs. Default: by the peer.
        pub fpdu_size: FpduSize = FpduSize::default(),
        /// Longest message taken or sent, in bytes. Default 64 KiB. It costs nothing until used.
        pub max_message: usize = 64 << 10,
        /// Receives that the shared queue holds. Default 4096; 32 bytes each are set aside.
        pub shared_receives: usize = 4096,
        /// Most outstanding RDMA Reads per side and connection. They are IRD and ORD of RFC 6581. Default 16, at most
        /// 16383. A few dozen bytes each.
        pub read_depth: u16 = 16,
        /// `SO_SNDBUF` in bytes. Default: the kernel grows it as needed (`net.ipv4.tcp_wmem`).
        pub send_buffer: Option<usize> = None,
        /// `SO_RCVBUF` in bytes. Default: the kernel grows it as needed (`net.ipv4.tcp_rmem`).
        pub receive_buffer: Option<usize> = None,
        /// `SO_BUSY_POLL`: time that the kernel polls for an empty read.
        ///
        /// Default: `net.core.busy_read`. Loopback and virtual devices ignore it.
        pub busy_poll: Option<Duration> = None,
        /// Type of service and traffic class (`IP_TOS`, `IPV6_TCLASS`).
        ///
        /// The DSCP is the upper six bits; TCP keeps the lower two, ECN, to itself. Default: the kernel's, 0. The
        /// packet that answers a client's first one does not have it yet.
        pub tos: Option<u8> = None,
        /// Time-out of unacknowledged data (`TCP_USER_TIMEOUT`) and half messages. Default 30 s.
        ///
        /// Also of an unanswered RDMA Read, and of a message that waits for a receive. Then the connection closes. This
        /// side counts while a full socket is not empty.
        pub retry_timeout: Duration = Duration::from_secs(30),
        /// Idle time before a TCP keep-alive probe (`TCP_KEEPIDLE`). Default 60 s.
        ///
        /// Two more probes follow, a third of this apart.
        pub keep_alive: Duration = Duration::from_secs(60),
        /// Concurrent handshakes of a listener; the longest idle is evicted. Default 64.
        pub max_handshakes: usize = 64,
        /// Time-out of connection setup, at either side. Default 5 s.
        pub handshake_timeout: Duration = Duration::from_secs(5),
        /// Time for a closing connection to send its data. Default 1 s.
        pub linger: Duration = Duration::from_secs(1),
    }
}

/// Longest read depth: 14 bits (RFC 6581 §9.1).
pub const MAX_READ_DEPTH: u16 = (1 << 14) - 1;

impl IwarpConfig {
    /// Checks the fields; an error names one out of range.
    pub(super) fn check(&self) -> Result<(), FabricError> {
        let check = |ok, field, got, rule| checks::field("iWARP", ok, field, got, rule);
        let is_message = (1..=1 << 30).contains(&self.max_message);
        check(is_message, "max_message", self.max_message, "must be from 1 to 1 GiB")?;
        let is_depth = (1..=MAX_READ_DEPTH).contains(&self.read_depth);
        check(is_depth, "read_depth", self.read_depth.into(), "must be from 1 to 16383")?;
        check(self.max_handshakes != 0, "max_handshakes", 0, "must be at least 1")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn knobs_have_words_that_are_read_back_and_no_others() {
        for crc in [Crc::Never, Crc::IfAsked, Crc::Always] {
            assert_eq!(crc.to_string().parse::<Crc>().unwrap(), crc);
        }
        for size in [FpduSize::Auto, FpduSize::Segment, FpduSize::Longest] {
            assert_eq!(size.to_string().parse::<FpduSize>().unwrap(), size);
        }
        let error = "yes".parse::<Crc>().unwrap_err().to_string();
        assert!(error.contains("\"yes\" is none of never, if-asked, always"), "{error}");
        let error = "".parse::<FpduSize>().unwrap_err().to_string();
        assert!(error.contains("\"\" is none of auto, segment, longest"), "{error}");
    }
}
