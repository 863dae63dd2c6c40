//! The RDMA Read Request Header (RFC 5040 §4.4).

/// The header of an RDMA Read Request: the payload of its only segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadRequest {
    /// STag of the requester's memory, which the Read Response repeats.
    pub sink_stag: u32,
    /// Tagged offset of the first byte in the requester's memory.
    pub sink_offset: u64,
    /// Bytes to read.
    pub len: u32,
    /// STag of the responder's memory.
    pub source_stag: u32,
    /// Tagged offset of the first byte in the responder's memory.
    pub source_offset: u64,
}

impl ReadRequest {
    /// Length in bytes.
    pub const LEN: usize = 28;

    /// Encodes the request.
    pub fn encode(&self) -> [u8; Self::LEN] {
        let mut out = [0; Self::LEN];
        out[..4].copy_from_slice(&self.sink_stag.to_be_bytes());
        out[4..12].copy_from_slice(&self.sink_offset.to_be_bytes());
        out[12..16].copy_from_slice(&self.len.to_be_bytes());
        out[16..20].copy_from_slice(&self.source_stag.to_be_bytes());
        out[20..].copy_from_slice(&self.source_offset.to_be_bytes());
        out
    }

    /// Decodes a request. Any bytes are valid.
    pub fn decode(bytes: &[u8; Self::LEN]) -> Self {
        let word = |at: usize| bytes[4 * at..].first_chunk().map_or(0, |word| u32::from_be_bytes(*word));
        let long = |at: usize| u64::from(word(at)) << 32 | u64::from(word(at + 1));
        Self { sink_stag: word(0), sink_offset: long(1), len: word(3), source_stag: word(4), source_offset: long(5) }
    }
}
