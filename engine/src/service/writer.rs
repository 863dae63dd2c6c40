#![expect(unsafe_code, reason = "trusts callers about bytes that devices or system calls wrote")]
//! Writers of results, in the memory that is sent. Only written bytes are sent; the rest is data of other calls.

use std::io;
use std::os::fd::AsFd;

use rustix::io::{Errno, pread};

use crate::proto::{HandlerFailure, Refusal};

/// Writes a result from its start. The written bytes are the result.
///
/// No other byte is sent, and the memory is not cleared in advance.
/// [`ServerCall::result_writer`](super::ServerCall::result_writer) writes a Write chunk,
/// [`reply_writer`](super::ServerCall::reply_writer) inline results.
///
/// [`io::Write::write`] writes as many bytes as there is room for.
#[derive(Debug)]
pub struct ResultWriter<'a> {
    room: &'a mut [u8],
    len: &'a mut usize,
    /// Set by `as_mut_ptr`: from then on, the memory must not be replaced. `None` for memory that is never replaced.
    is_exposed: Option<&'a mut bool>,
    /// Index of the Write chunk, and the maximum bytes that the procedure declares for it.
    chunk: Option<(u32, u32)>,
}

/// A result exceeds its room; none of its bytes were written.
///
/// `?` in a handler makes it [`Refusal::ShortChunk`] where the caller's Write chunk is too short, and
/// [`Refusal::SystemError`] where the result exceeds what the procedure declares; the log then names the lengths.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("result of {needed} bytes exceeds {}", self.limit())]
#[non_exhaustive]
pub struct ResultTooLong {
    pub(super) needed: usize,
    pub(super) room: usize,
    /// Index of the Write chunk, and the maximum bytes that the procedure declares for it.
    pub(super) chunk: Option<(u32, u32)>,
}

impl ResultTooLong {
    /// Bytes of the result, including the refused ones.
    pub fn needed(&self) -> usize {
        self.needed
    }

    /// The limit, and the declaration or chunk that sets it.
    fn limit(&self) -> String {
        match self.chunk {
            None => format!("{} (Procedure::max_reply)", self.room),
            Some((_, declared)) if self.needed > declared as usize => format!("{declared} (Procedure::write_chunks)"),
            Some((index, _)) => format!("{} (Write chunk {index})", self.room),
        }
    }
}

impl From<ResultTooLong> for Refusal {
    fn from(ResultTooLong { needed, room, chunk }: ResultTooLong) -> Self {
        match chunk {
            None => Self::failed(HandlerFailure::Reply, needed, room),
            Some((index, declared)) if needed <= declared as usize => Self::ShortChunk { index, needed: needed as u32 },
            Some((_, declared)) => Self::failed(HandlerFailure::Undeclared, needed, declared as usize),
        }
    }
}

impl<'a> ResultWriter<'a> {
    /// A writer that starts at the beginning of `room`.
    #[inline]
    pub(crate) fn new(room: &'a mut [u8], len: &'a mut usize) -> Self {
        *len = 0;
        Self { room, len, is_exposed: None, chunk: None }
    }

    /// A writer of a Write chunk with this index and declared length. Sets `is_exposed` when the handler
    /// gets the address.
    #[inline]
    pub(super) fn of_chunk(
        room: &'a mut [u8],
        len: &'a mut usize,
        is_exposed: &'a mut bool,
        chunk: (u32, u32),
    ) -> Self {
        Self { is_exposed: Some(is_exposed), chunk: Some(chunk), ..Self::new(room, len) }
    }

    /// Bytes written so far.
    #[inline]
    pub fn written(&self) -> usize {
        *self.len
    }

    /// Bytes of room left.
    #[inline]
    pub fn room(&self) -> usize {
        self.room.len() - *self.len
    }

    /// The next `len` bytes of room, uninitialized.
    #[inline]
    fn next(&mut self, len: usize) -> Result<&mut [u8], ResultTooLong> {
        let (needed, room, chunk) = (self.len.saturating_add(len), self.room.len(), self.chunk);
        let next = self.room.get_mut(*self.len..).and_then(|unwritten| unwritten.get_mut(..len));
        next.ok_or(ResultTooLong { needed, room, chunk })
    }

    /// Writes these bytes.
    ///
    /// # Errors
    /// There is no room for all of them; none is written.
    #[inline]
    pub fn put(&mut self, bytes: &[u8]) -> Result<(), ResultTooLong> {
        self.next(bytes.len())?.copy_from_slice(bytes);
        *self.len += bytes.len();
        Ok(())
    }

    /// Writes zeroes, such as an XDR round-up.
    ///
    /// # Errors
    /// There is no room for all of them; none is written.
    pub fn put_zeroes(&mut self, len: usize) -> Result<(), ResultTooLong> {
        self.next(len)?.fill(0);
        *self.len += len;
        Ok(())
    }

    /// Address of the next byte, for a device or system call.
    ///
    /// The device or system call writes up to [`room`](Self::room) bytes there, and [`advance`](Self::advance) counts
    /// them. The memory is uninitialized. It stays in place until the call is answered or dropped, even while a
    /// [`DeferredCall`](super::DeferredCall) waits, and even if [other memory](super::ServerCall::set_result) is sent
    /// in its place. No device or system call may write there while the application uses a slice of these bytes that a
    /// method of the call returns.
    #[inline]
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        if let Some(is_exposed) = &mut self.is_exposed {
            **is_exposed = true;
        }
        self.room.get_mut(*self.len..).unwrap_or_default().as_mut_ptr()
    }

    /// Counts `len` bytes as written, through [`as_mut_ptr`](Self::as_mut_ptr).
    ///
    /// # Safety
    /// All of the next `len` bytes were written for this call, and no write to them is outstanding: otherwise data of
    /// other calls is sent to the caller.
    ///
    /// # Panics
    /// If `len` exceeds the room.
    #[inline]
    pub unsafe fn advance(&mut self, len: usize) {
        assert!(len <= self.room(), "{len} bytes exceed the room of {} bytes", self.room());
        *self.len += len;
    }

    /// Reads from a file into the result, and returns the length.
    ///
    /// Reads from byte `offset` until `max_len` bytes are read, the room is full, or the file ends.
    ///
    /// # Errors
    /// `pread` failed; nothing is written.
    pub fn read_from(&mut self, file: impl AsFd, offset: u64, max_len: usize) -> io::Result<usize> {
        // The kernel refuses a range that exceeds the largest file, although no file has bytes there.
        let before_limit = usize::try_from((i64::MAX as u64).saturating_sub(offset)).unwrap_or(usize::MAX);
        let target_len = max_len.min(self.room()).min(before_limit);
        let room = self.next(target_len).map_err(io::Error::other)?;
        let mut len = 0;
        while len < target_len {
            match pread(&file, &mut room[len..target_len], offset + len as u64) {
                Ok(0) => break,
                Ok(more) => len += more,
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        *self.len += len;
        Ok(len)
    }
}

impl io::Write for ResultWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let len = bytes.len().min(self.room());
        self.put(&bytes[..len]).map_err(io::Error::other)?;
        Ok(len)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn only_written_bytes_count() {
        let (mut room, mut len) = ([0xAA; 16], 9);
        let mut writer = ResultWriter::new(&mut room, &mut len);
        assert_eq!((writer.written(), writer.room()), (0, 16));
        writer.put(b"abc").unwrap();
        writer.put_zeroes(1).unwrap();
        assert_eq!(writer.put(&[1; 13]), Err(ResultTooLong { needed: 17, room: 16, chunk: None }));
        assert_eq!(writer.put_zeroes(usize::MAX), Err(ResultTooLong { needed: usize::MAX, room: 16, chunk: None }));
        assert_eq!(writer.write(&[7; 20]).unwrap(), 12);
        assert_eq!(writer.write(b"more").unwrap(), 0);
        assert_eq!((writer.written(), writer.room()), (16, 0));
        assert_eq!((&room, len), (b"abc\0\x07\x07\x07\x07\x07\x07\x07\x07\x07\x07\x07\x07", 16));
    }

    #[test]
    fn bytes_written_through_the_pointer_count_after_advance() {
        let (mut room, mut len) = ([0xAA; 16], 0);
        let at = room.as_ptr();
        let mut writer = ResultWriter::new(&mut room, &mut len);
        writer.put(b"abc").unwrap();
        assert_eq!(writer.as_mut_ptr().cast_const(), at.wrapping_add(3));
        writer.next(2).unwrap().fill(7);
        // SAFETY: the two bytes were just written.
        unsafe { writer.advance(2) };
        assert_eq!((writer.written(), writer.room()), (5, 11));
    }

    #[test]
    fn a_result_is_refused_by_the_bound_that_it_exceeds() {
        let refused = |declared, len| {
            let (mut room, mut is_exposed, mut written) = ([0; 16], false, 0);
            let mut writer = ResultWriter::of_chunk(&mut room, &mut written, &mut is_exposed, (2, declared));
            writer.put(&[0; 10]).unwrap();
            Refusal::from(writer.put_zeroes(len).unwrap_err())
        };
        assert_eq!(refused(64, 10), Refusal::ShortChunk { index: 2, needed: 20 });
        assert_eq!(refused(64, 54), Refusal::ShortChunk { index: 2, needed: 64 });
        let beyond = refused(64, 55);
        assert_eq!(beyond, Refusal::failed(HandlerFailure::Undeclared, 65, 64));
        assert_eq!(beyond.cause(), "result of 65 bytes exceeds 64 (Procedure::write_chunks, or its bound)");
        let undeclared = Refusal::failed(HandlerFailure::NoChunk, 1, 0);
        assert_eq!(undeclared.cause(), "result in undeclared Write chunk 1 (Procedure::write_chunks)");
        // Here the caller's chunk has room for the declared length.
        assert_eq!(refused(16, 7), Refusal::failed(HandlerFailure::Undeclared, 17, 16));
        let (mut room, mut len) = ([0; 16], 0);
        let inline = ResultWriter::new(&mut room, &mut len).put(&[0; 17]).unwrap_err();
        assert_eq!(inline.to_string(), "result of 17 bytes exceeds 16 (Procedure::max_reply)");
        let cause = Refusal::from(inline).cause();
        assert_eq!(
            cause,
            "inline results of at least 17 bytes exceed 16 (Procedure::max_reply, or max_reply and max_inline_result \
                    in the placement file; or the caller offers a Write chunk)"
        );
    }

    #[test]
    fn a_file_is_read_up_to_its_end() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"0123456789").unwrap();
        let (mut room, mut len) = ([0xAA; 16], 0);
        let mut writer = ResultWriter::new(&mut room, &mut len);
        assert_eq!(writer.read_from(&file, 2, 3).unwrap(), 3);
        assert_eq!(writer.read_from(&file, 7, 100).unwrap(), 3, "the read ends with the file");
        for offset in [i64::MAX as u64 - 1, i64::MAX as u64, i64::MAX as u64 + 1, u64::MAX - 1] {
            assert_eq!(writer.read_from(&file, offset, 4).unwrap(), 0, "the file does not reach {offset}");
        }
        assert_eq!(writer.read_from(&file, 0, 100).unwrap(), 10, "the read is limited by the room");
        assert_eq!((&room, len), (b"2347890123456789", 16));
        let (write_only, mut len) = (std::fs::File::options().write(true).open("/dev/null").unwrap(), 0);
        let mut writer = ResultWriter::new(&mut room, &mut len);
        writer.put(b"kept").unwrap();
        assert!(writer.read_from(&write_only, 0, 4).is_err());
        assert_eq!(writer.written(), 4);
    }
}
