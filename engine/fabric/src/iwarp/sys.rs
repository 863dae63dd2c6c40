//! Vectored socket I/O on pool memory. Only this file of the fabric passes addresses to the system.
//!
//! `rustix` and `std` need slices, which lent memory never is. Clones of a [`Lent`] may be copied from and to at any
//! time on this thread. The system copies before the call returns, so the address must be valid only during the call.

#![expect(unsafe_code, reason = "memory of the pools, which is lent, is no slice: the system is given addresses")]

use std::marker::PhantomData;
use std::mem::{MaybeUninit, zeroed};
use std::time::Duration;

use rpcrdma_mempool::Lent;
use rustix::fd::{AsRawFd, BorrowedFd};
use rustix::io::Errno;

/// Elements of one call: a turn's worth of headers and payloads.
const MAX_SLICES: usize = 64;

/// Memory to send from, in order; valid while its sources are borrowed.
pub(super) struct Slices<'a> {
    of: [MaybeUninit<libc::iovec>; MAX_SLICES],
    len: usize,
    bytes: usize,
    _borrows: PhantomData<&'a [u8]>,
}

impl<'a> Slices<'a> {
    pub(super) fn new() -> Self {
        Self { of: [const { MaybeUninit::uninit() }; MAX_SLICES], len: 0, bytes: 0, _borrows: PhantomData }
    }

    /// Bytes of all of them.
    pub(super) fn total(&self) -> usize {
        self.bytes
    }

    fn push(&mut self, base: *mut libc::c_void, len: usize) -> bool {
        let Some(place) = self.of.get_mut(self.len) else { return false };
        place.write(libc::iovec { iov_base: base, iov_len: len });
        self.len += 1;
        self.bytes += len;
        true
    }

    /// One more, ordinary bytes. False if there are too many.
    #[inline]
    pub(super) fn bytes(&mut self, bytes: &'a [u8]) -> bool {
        self.push(bytes.as_ptr().cast_mut().cast(), bytes.len())
    }

    /// Adds `len` bytes of lent memory from `offset` on, within its bounds. False if there are too many.
    #[inline]
    pub(super) fn lent(&mut self, lent: &'a Lent, offset: usize, len: usize) -> bool {
        self.push(address(lent, offset, len), len)
    }

    /// Sends them, or a part, without waiting; how many bytes.
    #[inline]
    pub(super) fn send(&mut self, socket: BorrowedFd<'_>) -> Result<usize, Errno> {
        // SAFETY: a `msghdr` of zeroes is a valid one: no name, no data, no control.
        let mut message: libc::msghdr = unsafe { zeroed() };
        message.msg_iov = self.of.as_mut_ptr().cast();
        message.msg_iovlen = self.len as _;
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        // SAFETY: the first `len` elements are written, and their memory is valid while `'a` lasts; the call only
        // reads it, and keeps nothing.
        let sent = unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, flags) };
        result(sent)
    }
}

/// Address of `len` bytes of lent memory, from `offset` on.
///
/// # Panics
/// If they are not all in it.
#[inline]
fn address(lent: &Lent, offset: usize, len: usize) -> *mut libc::c_void {
    assert!(offset <= lent.len() && len <= lent.len() - offset, "{len} bytes at {offset} of {}", lent.len());
    (lent.address() + offset) as *mut libc::c_void
}

/// Memory to receive into.
pub(super) enum ReceiveTarget<'a> {
    /// Ordinary bytes.
    Bytes(&'a mut [u8]),
    /// A range of lent memory, by offset and length, within its bounds.
    Lent(&'a Lent, usize, usize),
}

impl ReceiveTarget<'_> {
    /// Bytes of it.
    #[inline]
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Bytes(bytes) => bytes.len(),
            Self::Lent(_, _, len) => *len,
        }
    }

    /// Writes its first bytes, for tests without a socket.
    #[cfg(any(test, feature = "testing"))]
    pub(super) fn put(self, bytes: &[u8]) {
        match self {
            Self::Bytes(to) => to[..bytes.len()].copy_from_slice(bytes),
            Self::Lent(to, offset, _) => assert!(to.write_at(offset, bytes), "a place outside of its buffer"),
        }
    }

    fn iovec(&mut self) -> libc::iovec {
        match self {
            Self::Bytes(bytes) => libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() },
            Self::Lent(lent, offset, len) => libc::iovec { iov_base: address(lent, *offset, *len), iov_len: *len },
        }
    }
}

/// Receives into `first`, then into `rest`, without waiting. Returns the bytes, 0 at the end of the stream.
#[inline]
pub(super) fn receive(socket: BorrowedFd<'_>, mut first: ReceiveTarget<'_>, rest: &mut [u8]) -> Result<usize, Errno> {
    let mut of = [first.iovec(), ReceiveTarget::Bytes(rest).iovec()];
    // SAFETY: as in `send`.
    let mut message: libc::msghdr = unsafe { zeroed() };
    message.msg_iov = of.as_mut_ptr();
    message.msg_iovlen = of.len() as _;
    // SAFETY: during the call neither element has another user. One is `&mut`; the other is lent memory of this thread,
    // accessed by copies of this thread alone. The call keeps nothing.
    let got = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, libc::MSG_DONTWAIT) };
    result(got)
}

/// Sets how long the kernel polls the network card on an empty read.
pub(super) fn set_busy_poll(socket: BorrowedFd<'_>, time: Duration) -> Result<(), Errno> {
    let micros = libc::c_int::try_from(time.as_micros()).unwrap_or(libc::c_int::MAX);
    // SAFETY: the value is a `c_int` that lives through the call, and its size is passed.
    let set = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_BUSY_POLL,
            (&raw const micros).cast(),
            size_of_val(&micros) as libc::socklen_t,
        )
    };
    result(set as isize).map(drop)
}

/// Bytes that were sent and that the peer's TCP has not acknowledged (`SIOCOUTQ`).
pub(super) fn unacknowledged(socket: BorrowedFd<'_>) -> Result<usize, Errno> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: the call writes one `c_int`, which lives through it.
    let got = unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    result(got as isize).map(|_| bytes.max(0) as usize)
}

/// Bytes that a TCP segment of this connection holds (`TCP_MAXSEG`).
pub(super) fn max_segment(socket: BorrowedFd<'_>) -> Result<usize, Errno> {
    tcp_option(socket, libc::TCP_MAXSEG).map(|[bytes]| bytes as usize)
}

/// Round-trip time to the peer's TCP, smoothed (`TCP_INFO`).
pub(super) fn round_trip(socket: BorrowedFd<'_>) -> Result<Duration, Errno> {
    /// Word of `tcpi_rtt`, in microseconds: 8 bytes of states, then words.
    const RTT: usize = 17;
    tcp_option::<{ RTT + 1 }>(socket, libc::TCP_INFO).map(|info| Duration::from_micros(info[RTT].into()))
}

/// The first words of a TCP option.
fn tcp_option<const WORDS: usize>(socket: BorrowedFd<'_>, name: libc::c_int) -> Result<[u32; WORDS], Errno> {
    let mut words = [0; WORDS];
    let mut size = size_of_val(&words) as libc::socklen_t;
    let (level, value) = (libc::IPPROTO_TCP, words.as_mut_ptr().cast());
    // SAFETY: value and size live through the call, and the size is the value's: the kernel writes no more.
    let got = unsafe { libc::getsockopt(socket.as_raw_fd(), level, name, value, &raw mut size) };
    result(got as isize).map(|_| words)
}

fn result(n: isize) -> Result<usize, Errno> {
    usize::try_from(n).map_err(|_| {
        let error = std::io::Error::last_os_error();
        Errno::from_io_error(&error).unwrap_or(Errno::IO)
    })
}
