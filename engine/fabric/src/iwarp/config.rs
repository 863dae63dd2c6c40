//! The knobs of the iWARP fabric.

#![forbid(unsafe_code)]

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use crate::{FabricError, checks};

/// When FPDUs carry a CRC-32C (RFC 5044 §4.4, §7.1).
///
/// TCP's checksum has only 16 bits, and it cannot detect corruption inside a network card, switch or host that has
/// already verified it. The CRC is end to end. Neither protects against deliberate changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[cfg_attr(feature = "units", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "kebab-case"))]
pub enum Crc {
    /// Never. A peer that requires a CRC is refused.
    Never,
    /// If the peer requests it, as the Linux kernel's soft-iWARP does.
    #[default]
    IfAsked,
    /// Always. This side requests it, so the peer must comply (RFC 5044 §7.1.1).
    Always,
}

/// Length of the FPDUs that this side sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[cfg_attr(feature = "units", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "kebab-case"))]
pub enum FpduSize {
    /// [`Longest`](Self::Longest) to peers that run this engine, else [`Segment`](Self::Segment).
    #[default]
    Auto,
    /// At most one TCP segment (the EMSS of RFC 5044 §4.5).
    ///
    /// An adapter can place an FPDU that lies within one TCP segment as soon as it arrives. This fabric does not align
    /// FPDUs to TCP segments, so some FPDUs span two segments, and adapters place those more slowly.
    Segment,
    /// 65464 bytes, nearly the maximum of the format, which saves headers.
    ///
    /// Any stack that reads a byte stream accepts this length, including the Linux kernel's soft-iWARP.
    Longest,
}

/// Implements `FromStr` and `Display` for an enum, with the names that program options use.
macro_rules! named_variants {
    ($Enum:ident, $what:literal: $($text:literal = $Variant:ident),+) => {
        impl FromStr for $Enum {
            type Err = FabricError;

            fn from_str(text: &str) -> Result<Self, FabricError> {
                match text {
                    $($text => Ok(Self::$Variant),)+
                    _ => Err(FabricError::misuse(format_args!(
                        concat!("invalid ", $what, " `{}`: expected {}"),
                        text,
                        [$($text),+].join(", ")
                    ))),
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

named_variants!(Crc, "CRC mode": "never" = Never, "if-asked" = IfAsked, "always" = Always);
named_variants!(FpduSize, "FPDU size": "auto" = Auto, "segment" = Segment, "longest" = Longest);

with_defaults! {
    /// Configuration of the iWARP fabric.
    ///
    /// The defaults suit a shard of a few hundred connections.
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub struct IwarpFabricConfig {
        /// Whether FPDUs carry a CRC-32C. Default: if the peer requests it. A CRC costs about 0.1 ns per byte, and a
        /// copy of received data.
        pub crc: Crc = Crc::default(),
        /// Length of FPDUs. The default depends on the peer.
        pub fpdu_size: FpduSize = FpduSize::default(),
        /// Longest message received or sent, in bytes. Default 64 KiB. The limit takes no memory until used.
        pub max_message: usize = 64 << 10,
        /// Capacity of the shared receive queue. Default 4096 Receives, which take 32 bytes each.
        pub shared_receives: usize = 4096,
        /// Maximum outstanding RDMA Reads per side and connection: IRD and ORD of RFC 6581. Default 16, at most 16383.
        /// Each takes a few dozen bytes.
        pub read_depth: u16 = 16,
        /// `SO_SNDBUF` in bytes. Default: the kernel grows it as needed (`net.ipv4.tcp_wmem`).
        pub send_buffer: Option<usize> = None,
        /// `SO_RCVBUF` in bytes. Default: the kernel grows it as needed (`net.ipv4.tcp_rmem`).
        pub receive_buffer: Option<usize> = None,
        /// Busy-polling time of the kernel on an empty read (`SO_BUSY_POLL`).
        ///
        /// Default: `net.core.busy_read`. Loopback and virtual devices ignore it.
        pub busy_poll: Option<Duration> = None,
        /// Type of service and traffic class (`IP_TOS`, `IPV6_TCLASS`).
        ///
        /// The DSCP is the upper six bits. TCP itself sets the lower two, which are ECN. Default: the kernel's, 0. A
        /// server's SYN-ACK does not have this value yet.
        pub tos: Option<u8> = None,
        /// Time-out of unacknowledged data and incomplete messages. Default 30 s.
        ///
        /// It also applies to an unanswered RDMA Read and to a message that waits for a Receive. The connection then
        /// closes. The fabric sets `TCP_USER_TIMEOUT`, but as soon as it finds unacknowledged data it measures the time
        /// itself, because TCP would also end a connection whose peer acknowledges slowly.
        pub retry_timeout: Duration = Duration::from_secs(30),
        /// Idle time before a TCP keep-alive probe (`TCP_KEEPIDLE`). Default 60 s.
        ///
        /// Two more probes follow, each after a third of this time.
        pub keep_alive: Duration = Duration::from_secs(60),
        /// Maximum concurrent handshakes of a listener. Beyond it, the host with the most incomplete handshakes loses
        /// its oldest one. Default 64.
        pub max_handshakes: usize = 64,
        /// Time-out of connection setup, on either side. Default 5 s.
        pub handshake_timeout: Duration = Duration::from_secs(5),
        /// Time for a closing connection to send its data. Default 1 s.
        pub linger: Duration = Duration::from_secs(1),
        /// Maximum closing connections. Beyond it, the oldest is reset. Default 1024.
        pub max_closing: usize = 1024,
    }
}

/// Maximum read depth: 14 bits (RFC 6581 §9.1).
pub const MAX_READ_DEPTH: u16 = (1 << 14) - 1;

impl IwarpFabricConfig {
    /// Checks the fields. An error names the field that is out of range.
    pub(super) fn check(&self) -> Result<(), FabricError> {
        let check = |ok, field, got, rule| checks::check_field("iWARP", ok, field, got, rule);
        let has_message_length = (1..=1 << 30).contains(&self.max_message);
        check(has_message_length, "max_message", self.max_message, "expected 1 byte to 1 GiB")?;
        let has_read_depth = (1..=MAX_READ_DEPTH).contains(&self.read_depth);
        check(has_read_depth, "read_depth", self.read_depth.into(), "expected 1 to 16383")?;
        check(self.max_handshakes != 0, "max_handshakes", 0, "expected at least 1")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn knob_values_parse_back_and_others_are_refused() {
        for crc in [Crc::Never, Crc::IfAsked, Crc::Always] {
            assert_eq!(crc.to_string().parse::<Crc>().unwrap(), crc);
        }
        for size in [FpduSize::Auto, FpduSize::Segment, FpduSize::Longest] {
            assert_eq!(size.to_string().parse::<FpduSize>().unwrap(), size);
        }
        let error = "yes".parse::<Crc>().unwrap_err().to_string();
        assert!(error.contains("invalid CRC mode `yes`: expected never, if-asked, always"), "{error}");
        let error = "".parse::<FpduSize>().unwrap_err().to_string();
        assert!(error.contains("invalid FPDU size ``: expected auto, segment, longest"), "{error}");
    }
}
