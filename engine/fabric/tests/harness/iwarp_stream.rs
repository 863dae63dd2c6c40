//! Reads the outbound bytes of a connection, for tests without a socket.

use super::{SendBuffer, Span, copy};

impl SendBuffer {
    /// Copies the next bytes to send, up to `max`.
    pub(crate) fn bytes(&self, max: usize) -> Vec<u8> {
        let mut all = Vec::new();
        let mut at = self.first;
        for span in &self.spans {
            let start = all.len();
            let room = max - start;
            if room == 0 {
                break;
            }
            match span {
                Span::Staged(len) => {
                    all.extend_from_slice(&self.staged[at..at + len.min(&room)]);
                    at += len;
                }
                Span::Memory { source, offset, len } => {
                    all.resize(start + len.min(&room), 0);
                    copy(source, *offset, &mut all[start..]);
                }
            }
        }
        all
    }
}
