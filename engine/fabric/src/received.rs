//! Buffers with their received data.

#![forbid(unsafe_code)]

use std::ops::Deref;

use rpcrdma_mempool::{ArenaId, Buf};

/// A buffer with received data. It dereferences to the received bytes and cannot be extended, because the bytes behind
/// them may be data of another peer, from an earlier use of the buffer.
#[derive(Debug)]
pub struct ReceivedBuf(Buf);

impl ReceivedBuf {
    /// A buffer whose first `len` bytes have arrived, limited to its capacity. A flushed Receive has a `len` of 0.
    #[inline]
    pub fn new(mut buf: Buf, len: usize) -> Self {
        buf.set_window(0, len.min(buf.capacity()));
        Self(buf)
    }

    /// Lets `fill` write the first `len` bytes of the buffer. Returns the buffer as an error if it is shorter, or if
    /// `fill` returns false because it has not written all of them. Earlier contents are never exposed.
    #[inline(always)]
    pub fn filled(mut buf: Buf, len: usize, fill: impl FnOnce(&mut [u8]) -> bool) -> Result<Self, Buf> {
        if len > buf.capacity() {
            return Err(buf);
        }
        buf.set_window(0, len);
        if fill(&mut buf) { Ok(Self(buf)) } else { Err(buf) }
    }

    /// A buffer whose whole range was filled, by gathering or RDMA Read.
    #[inline]
    pub fn whole(buf: Buf) -> Self {
        Self(buf)
    }

    /// Bytes of the whole buffer.
    #[inline]
    pub fn capacity(&self) -> usize {
        self.0.capacity()
    }

    /// The arena that the buffer lies in.
    pub fn arena(&self) -> ArenaId {
        self.0.arena()
    }

    /// Releases the buffer for another use, once its data has been read.
    #[inline]
    pub fn into_buf(self) -> Buf {
        self.0
    }
}

impl Deref for ReceivedBuf {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rpcrdma_mempool::{ArenaConfig, Class, PagePolicy, Pool, PoolConfig};

    #[test]
    fn a_reused_buffer_shows_arrived_bytes_only() {
        let arena = ArenaConfig { bytes: 0, pages: PagePolicy::Small, ..ArenaConfig::default() };
        let pool = Pool::new(&PoolConfig { classes: vec![Class { size: 256, count: 1 }], arena });
        let pool = pool.expect("memory");
        let mut used = pool.alloc(256).expect("a buffer");
        used.fill(7);
        let received = ReceivedBuf::new(used, 3);
        assert_eq!((received.len(), received.get(..4), received.capacity()), (3, None, 256));
        let flushed = ReceivedBuf::new(received.into_buf(), 0);
        assert!(flushed.is_empty());
        // A length beyond the buffer is limited to its capacity.
        let all = ReceivedBuf::new(flushed.into_buf(), 1000);
        assert_eq!(all.len(), 256);
        // An unfilled buffer is not a message.
        let buf = ReceivedBuf::filled(all.into_buf(), 257, |_| true).expect_err("the buffer is too short");
        let buf = ReceivedBuf::filled(buf, 200, |_| false).expect_err("nothing arrived");
        let filled = ReceivedBuf::filled(buf, 2, |to| {
            to.copy_from_slice(b"ab");
            true
        });
        assert_eq!(&*filled.expect("all of it arrived"), b"ab");
    }
}
