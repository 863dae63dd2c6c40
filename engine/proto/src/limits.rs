//! Limits on chunks and segments of a call.
//!
//! Peers' calls must respect these limits, which are announced to them. The room for headers follows from them, too.

use crate::wire::ChunkLimits;

/// Maximum chunks per direction, besides Position Zero Read and Reply chunks.
pub const MAX_CHUNKS: usize = 4;
/// Maximum segments of a chunk of any kind (RFC 8267 §6.4.2).
pub const MAX_SEGMENTS: usize = 16;

/// Limits on the chunk lists of a call, for [`View::check_limits`](crate::wire::View::check_limits).
pub const CHUNK_LIMITS: ChunkLimits =
    ChunkLimits { read_chunks: MAX_CHUNKS as u32, write_chunks: MAX_CHUNKS as u32, segments: MAX_SEGMENTS as u32 };

/// Segments of the longest Read list.
pub const MAX_READ_SEGMENTS: usize = CHUNK_LIMITS.call().reads;
/// Segments of the longest Write list.
pub const MAX_WRITE_SEGMENTS: usize = CHUNK_LIMITS.call().write_segments;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{
        Body, Chunks, ErrorBody, Flags, Header, ReadSegment, Revision, Segment, Version, View, WriteList, msg_len,
    };

    /// The header of a call with `segments` segments in each chunk.
    fn header(segments: usize, version: Version) -> Vec<u8> {
        let segment = Segment { handle: 1, length: 8, offset: 0 };
        // The segments of a chunk are not adjacent.
        let positions = (0..segments).flat_map(|_| (0..=MAX_CHUNKS as u32).rev());
        let reads: Vec<_> = positions.map(|position| ReadSegment { position: 8 * position, target: segment }).collect();
        let writes = vec![segment; MAX_CHUNKS * segments];
        let counts = [segments as u32; MAX_CHUNKS];
        let chunks = Chunks {
            inv_handle: 1,
            reads: &reads,
            writes: WriteList { counts: &counts, segments: &writes },
            reply: Some(&writes[..segments]),
        };
        let received = (version == Version::V2).then_some(1);
        let header = Header { xid: 1, credit: 1, received, flags: Flags::NONE, body: Body::Nomsg(chunks) };
        let mut bytes = vec![0; 4096];
        let len = header.emit(&mut bytes, version, Revision::Ietf00).expect("it fits a Receive of version 2");
        bytes.truncate(len);
        bytes
    }

    #[test]
    fn the_longest_header_has_exactly_the_length_of_the_limits() {
        for version in [Version::V1, Version::V2] {
            let longest = header(MAX_SEGMENTS, version);
            let view = View::check(&longest, Revision::Ietf00).expect("valid");
            assert_eq!(view.check_limits(&CHUNK_LIMITS), Ok(()));
            assert_eq!(view.reads().count(), MAX_READ_SEGMENTS);
            assert_eq!(view.writes().map(|chunk| chunk.len()).sum::<usize>(), MAX_WRITE_SEGMENTS);
            assert_eq!(longest.len(), msg_len(version, true) + CHUNK_LIMITS.call().encoded_len());
            let longer = header(MAX_SEGMENTS + 1, version);
            let view = View::check(&longer, Revision::Ietf00).expect("valid");
            assert_eq!(view.check_limits(&CHUNK_LIMITS), Err(ErrorBody::Segments { max: 16 }));
        }
    }
}
