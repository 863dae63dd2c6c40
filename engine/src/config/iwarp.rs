//! The iWARP fabric: sockets, CRCs and time-outs.

use std::time::Duration;

use super::{ConfigError, Crc, check, duration};

knobs! {
    /// Sockets, CRCs and time-outs of the iWARP fabric; others ignore them.
    ///
    /// | wrong | effect |
    /// |---|---|
    /// | `crc` [`Never`](Crc::Never) | peers that require CRCs are refused |
    /// | `send_buffer`, `receive_buffer` too small | less throughput over long paths |
    /// | `retry_timeout` too long | a peer that stops holds buffers for so long |
    pub struct IwarpConfig, "iwarp";

    /// Whether FPDUs carry a CRC-32C. Default: if the peer wants it.
    ///
    /// It costs about 0.1 ns per byte, and a copy of received data.
    pub crc: Crc = Crc::IfAsked;
    /// `SO_SNDBUF` in bytes. Default: the kernel grows it as needed (`net.ipv4.tcp_wmem`).
    #[cfg_attr(feature = "serde", serde(with = "crate::fabric::units::some_bytes"))]
    pub send_buffer: Option<usize> = None, buffer;
    /// `SO_RCVBUF` in bytes. Default: the kernel grows it as needed (`net.ipv4.tcp_rmem`).
    #[cfg_attr(feature = "serde", serde(with = "crate::fabric::units::some_bytes"))]
    pub receive_buffer: Option<usize> = None, buffer;
    /// `SO_BUSY_POLL`: time that the kernel polls for an empty read.
    ///
    /// Default: `net.core.busy_read`. Loopback and virtual devices ignore it.
    #[cfg_attr(feature = "serde", serde(with = "crate::fabric::units::some_duration"))]
    pub busy_poll: Option<Duration> = None;
    /// Time-out of unacknowledged data (`TCP_USER_TIMEOUT`) and half messages. Default 30 s.
    ///
    /// 1 ms to 24 h. Also of a message that waits for a receive. Then the connection closes. This side counts while a
    /// full socket is not empty.
    #[cfg_attr(feature = "serde", serde(with = "crate::fabric::units::duration"))]
    pub retry_timeout: Duration = Duration::from_secs(30), |knob, wait: Duration| {
        check(wait.as_millis() > 0, knob, format_args!("{wait:?}"), "1 ms to 24 h")?;
        duration(knob, wait)
    };
    /// Idle time before a TCP keep-alive probe (`TCP_KEEPIDLE`). Default 60 s.
    ///
    /// 1 s to 32767 s. Two more probes follow, a third of this apart.
    #[cfg_attr(feature = "serde", serde(with = "crate::fabric::units::duration"))]
    pub keep_alive: Duration = Duration::from_secs(60), |knob, wait: Duration| {
        check((1..=32767).contains(&wait.as_secs()), knob, format_args!("{wait:?}"), "1 s to 32767 s")
    };
}

/// Checks the size of a socket's buffer.
fn buffer(knob: &'static str, bytes: Option<usize>) -> Result<(), ConfigError> {
    bytes.map_or(Ok(()), |bytes| super::between(1..=i32::MAX as usize)(knob, bytes))
}
