//! Private data of a version 1 connection (RFC 8797), eight bytes.

use super::word::word;
use super::xdr::{EncodeError, Encoder};

/// Bytes of the message.
pub const LEN: usize = 8;
/// The format identifier of the message, `0xf6ab0e18`.
pub const FORMAT: u32 = 0xf6ab_0e18;
/// Smallest inline threshold of the encoding, and the default, in bytes.
pub const MIN_INLINE_THRESHOLD: u32 = 1024;
/// Largest inline threshold of the encoding, in bytes.
pub const MAX_INLINE_THRESHOLD: u32 = 256 * 1024;

const VERSION: u8 = 1;
const REMOTE_INVALIDATION: u8 = 1;

/// A peer's parameters in its connect or accept message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrivateData {
    /// Replies may use Send With Invalidate. Both ends must agree.
    pub remote_invalidation: bool,
    /// Longest message that the peer sends, in bytes.
    pub send_size: u32,
    /// Longest message that the peer can receive, in bytes.
    pub receive_size: u32,
}

/// The parameters of a peer without private data.
impl Default for PrivateData {
    fn default() -> Self {
        PrivateData { remote_invalidation: false, send_size: MIN_INLINE_THRESHOLD, receive_size: MIN_INLINE_THRESHOLD }
    }
}

impl PrivateData {
    /// Finds the message in `bytes`, among other layers' data and padding. `None` if absent or of another version. The
    /// defaults then apply.
    pub fn parse(bytes: &[u8]) -> Option<PrivateData> {
        let message: &[u8] = bytes.windows(LEN).find(|window| word(window, 0) == FORMAT)?;
        let &[_, _, _, _, VERSION, flags, send, receive] = message else { return None };
        Some(PrivateData {
            remote_invalidation: flags & REMOTE_INVALIDATION != 0,
            send_size: decode_size(send),
            receive_size: decode_size(receive),
        })
    }

    /// Writes the message to the start of `out`. Sizes are rounded down to multiples of 1024, within
    /// [`MIN_INLINE_THRESHOLD`]`..=`[`MAX_INLINE_THRESHOLD`].
    pub fn emit(&self, out: &mut [u8]) -> Result<usize, EncodeError> {
        let flags = if self.remote_invalidation { REMOTE_INVALIDATION } else { 0 };
        let mut writer = Encoder::new(out);
        let tail = [VERSION, flags, encode_size(self.send_size), encode_size(self.receive_size)];
        writer.u32(FORMAT)?;
        writer.bytes(&tail)?;
        Ok(writer.len())
    }
}

const fn decode_size(code: u8) -> u32 {
    (code as u32 + 1) * 1024
}

fn encode_size(bytes: u32) -> u8 {
    (bytes.clamp(MIN_INLINE_THRESHOLD, MAX_INLINE_THRESHOLD) / 1024 - 1) as u8
}
