//! The byte stream below a connection, and other system calls on its socket.
//!
//! All bytes of an established connection pass through [`ByteStream::send`] and [`ByteStream::receive`]. Another byte
//! stream, such as TLS over TCP, belongs behind these two methods. `connect` exchanges the MPA frames before that.
//!
//! Only this file of the fabric passes addresses to the system, because `rustix` and `std` need slices, and lent memory
//! is never a slice. This thread may copy from and to clones of a [`Lent`] at any time. The system copies before the
//! call returns, so the address must be valid only during the call.

#![expect(unsafe_code, reason = "lent memory is no slice, so the system gets its address")]

use std::marker::PhantomData;
use std::mem::zeroed;
use std::ptr::null_mut;
use std::time::Duration;

use arrayvec::ArrayVec;
use nix::sys::socket::getsockopt;
use nix::{getsockopt_impl, setsockopt_impl, sockopt_impl};
use rpcrdma_mempool::Lent;
use rustix::fd::{AsRawFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;

/// Maximum slices in one call: the headers and payloads of a turn.
const MAX_SLICES: usize = 64;

/// The byte stream below a connection: a non-blocking TCP socket.
#[derive(Debug)]
pub(super) struct ByteStream {
    /// Other files use the socket for options, epoll and closing, but never for bytes.
    pub(super) socket: OwnedFd,
}

impl ByteStream {
    /// Sends the slices or a prefix of them without waiting. Returns the number of sent bytes.
    #[inline]
    pub(super) fn send(&self, slices: &mut Slices<'_>) -> Result<usize, Errno> {
        // SAFETY: a `msghdr` of zeroes is a valid one: no name, no data, no control.
        let mut message: libc::msghdr = unsafe { zeroed() };
        message.msg_iov = slices.iovecs.as_mut_ptr();
        message.msg_iovlen = slices.iovecs.len() as _;
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        // SAFETY: the memory of the elements is valid while the slices borrow it. The call only reads it, and keeps
        // nothing.
        let sent = unsafe { libc::sendmsg(self.socket.as_raw_fd(), &raw const message, flags) };
        result(sent)
    }

    /// Receives into `first`, then into `rest`, without waiting. Returns the number of bytes, 0 at the end of the
    /// stream.
    #[inline]
    pub(super) fn receive(&self, first: Option<ReceiveTarget<'_>>, rest: &mut [u8]) -> Result<usize, Errno> {
        let nothing = libc::iovec { iov_base: null_mut(), iov_len: 0 };
        let first = first.map_or(nothing, |mut target| target.iovec());
        let mut iovecs = [first, ReceiveTarget::Bytes(rest).iovec()];
        // SAFETY: a `msghdr` of zeroes is a valid one: no name, no data, no control.
        let mut message: libc::msghdr = unsafe { zeroed() };
        message.msg_iov = iovecs.as_mut_ptr();
        message.msg_iovlen = iovecs.len() as _;
        // SAFETY: during the call neither element has another user. One is `&mut`; the other is `&mut`, or lent memory
        // of this thread, accessed by copies of this thread alone. The call keeps nothing.
        let received = unsafe { libc::recvmsg(self.socket.as_raw_fd(), &raw mut message, libc::MSG_DONTWAIT) };
        result(received)
    }
}

/// The memory of a vectored send, valid while its sources are borrowed.
#[derive(Default)]
pub(super) struct Slices<'a> {
    iovecs: ArrayVec<libc::iovec, MAX_SLICES>,
    _borrows: PhantomData<&'a [u8]>,
}

impl<'a> Slices<'a> {
    /// Total length in bytes.
    pub(super) fn total(&self) -> usize {
        self.iovecs.iter().map(|slice| slice.iov_len).sum()
    }

    /// Adds ordinary bytes. Returns false if there are too many slices.
    #[inline]
    pub(super) fn bytes(&mut self, bytes: &'a [u8]) -> bool {
        let iov_base = bytes.as_ptr().cast_mut().cast();
        self.iovecs.try_push(libc::iovec { iov_base, iov_len: bytes.len() }).is_ok()
    }

    /// Adds `len` bytes of lent memory from `offset` on. Returns false if there are too many slices.
    ///
    /// # Panics
    /// If the range exceeds the memory.
    #[inline]
    pub(super) fn lent(&mut self, lent: &'a Lent, offset: usize, len: usize) -> bool {
        self.iovecs.try_push(lent_iovec(lent, offset, len)).is_ok()
    }
}

/// The `len` bytes of lent memory from `offset` on.
///
/// # Panics
/// If the range exceeds the memory.
#[inline]
fn lent_iovec(lent: &Lent, offset: usize, len: usize) -> libc::iovec {
    assert!(offset <= lent.len() && len <= lent.len() - offset, "{len} bytes at {offset} of {}", lent.len());
    libc::iovec { iov_base: (lent.address() + offset) as *mut libc::c_void, iov_len: len }
}

/// Memory to receive into.
pub(super) enum ReceiveTarget<'a> {
    /// Ordinary bytes.
    Bytes(&'a mut [u8]),
    /// A range of lent memory, by offset and length, within its bounds.
    Lent(&'a Lent, usize, usize),
}

impl ReceiveTarget<'_> {
    /// Length in bytes.
    #[inline]
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Bytes(bytes) => bytes.len(),
            Self::Lent(_, _, len) => *len,
        }
    }

    /// Copies `bytes` to the start of the target, which must not be shorter.
    #[inline]
    pub(super) fn fill(self, bytes: &[u8]) {
        match self {
            Self::Bytes(to) => to[..bytes.len()].copy_from_slice(bytes),
            Self::Lent(to, offset, _) => assert!(to.write_at(offset, bytes), "the target exceeds its buffer"),
        }
    }

    fn iovec(&mut self) -> libc::iovec {
        match self {
            Self::Bytes(bytes) => libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() },
            Self::Lent(lent, offset, len) => lent_iovec(lent, *offset, *len),
        }
    }
}

// Microseconds that the kernel polls the network card on an empty read.
sockopt_impl!(BusyPoll, SetOnly, libc::SOL_SOCKET, libc::SO_BUSY_POLL, libc::c_int);

/// Index of the 32-bit word `tcpi_rtt` in `struct tcp_info`.
const RTT: usize = 17;

// The start of `struct tcp_info`, as 32-bit words up to the round-trip time.
sockopt_impl!(TcpInfo, GetOnly, libc::IPPROTO_TCP, libc::TCP_INFO, [u32; RTT + 1]);

/// Smoothed round-trip time to the peer's TCP.
pub(super) fn round_trip(socket: BorrowedFd<'_>) -> Option<Duration> {
    getsockopt(&socket, TcpInfo).ok().map(|info| Duration::from_micros(info[RTT].into()))
}

/// Sent bytes that the peer's TCP has not acknowledged (`SIOCOUTQ`).
pub(super) fn unacknowledged(socket: BorrowedFd<'_>) -> Result<usize, Errno> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: the call writes one `c_int`, which lives through it.
    let status = unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    result(status as isize).map(|_| bytes.max(0) as usize)
}

fn result(n: isize) -> Result<usize, Errno> {
    let error = |_| Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO);
    usize::try_from(n).map_err(error)
}
