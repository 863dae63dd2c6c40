//! The CRC-32C at the end of an FPDU. RFC 5044 §4.4, RFC 3720 §12.1.

/// A running checksum. It covers length, header, payload and pad, in this order and in any number of parts.
#[derive(Clone, Copy, Debug, Default)]
pub struct Crc(u32);

impl Crc {
    /// Over nothing yet.
    #[inline]
    pub const fn new() -> Self {
        Self(0)
    }

    /// Adds these bytes.
    #[inline]
    pub fn update(&mut self, bytes: &[u8]) {
        self.0 = crc32c::crc32c_append(self.0, bytes);
    }

    /// The four bytes as they are sent: least significant byte first.
    #[inline]
    pub const fn finish(self) -> [u8; 4] {
        self.0.to_le_bytes()
    }
}
