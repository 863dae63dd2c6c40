//! Messages on a connection's Unix socket: one datagram each, with descriptors.
//!
//! All integers are little-endian. Every message begins with 8 bytes: the magic word, the version, the kind,
//! and one byte of flags.
//!
//! | kind | sender | body | descriptors |
//! |---|---|---|---|
//! | Hello | connector | ring bytes u32, max message u32, windows u32, private data | rings, window table |
//! | Accept | acceptor | ring bytes u32, max message u32, windows u32, private data | window table |
//! | Reject | acceptor | private data | none |
//! | Refused | acceptor | the fabric's reason, text | none |
//! | Region | either | id u32, 4 bytes of zero, bytes u64 | memory |
//! | Bell | either | nothing | none |

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;

use arrayvec::ArrayVec;
use rustix::fd::{BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};

use super::config::RING_BYTES;
use crate::connection_manager::SocketInput;
use crate::error::failed;

/// Maximum bytes of private data in a Hello, Accept or Reject.
pub(super) const MAX_PRIVATE_DATA: usize = 256;
/// Maximum descriptors beside one message.
pub(super) const MAX_DESCRIPTORS: usize = 2;
const MAX_MESSAGE: usize = 32 + MAX_PRIVATE_DATA;
const MAGIC: u32 = u32::from_le_bytes(*b"RPsf");
const VERSION: u16 = 3;
const MAY_SLEEP: u8 = 1;

/// Kinds of messages.
mod kind {
    pub(super) const HELLO: u8 = 1;
    pub(super) const ACCEPT: u8 = 2;
    pub(super) const REJECT: u8 = 3;
    pub(super) const REGION: u8 = 4;
    pub(super) const BELL: u8 = 5;
    pub(super) const REFUSED: u8 = 6;
}

/// One message on the socket.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum SocketMessage {
    Hello(Opening),
    Accept(Opening),
    Reject {
        private_data: Vec<u8>,
    },
    /// The acceptor's fabric itself refuses the request, not the fabric's owner.
    Refused {
        reason: String,
    },
    Region {
        id: u32,
        bytes: u64,
    },
    Bell,
}

/// Each side's parameters of a connection.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Opening {
    pub(super) may_sleep: bool,
    pub(super) ring_bytes: u32,
    pub(super) max_message: u32,
    pub(super) windows: u32,
    pub(super) private_data: Vec<u8>,
}

impl Opening {
    /// Checks the sizes against these limits.
    pub(super) fn check_sizes(&self, largest_ring: u32, longest_message: u32) -> Result<(), String> {
        let Self { ring_bytes, max_message, .. } = *self;
        let is_size = ring_bytes.is_power_of_two() && RING_BYTES.contains(&(ring_bytes as usize));
        if !is_size || ring_bytes > largest_ring {
            return Err(format!("invalid ring size of {ring_bytes} bytes"));
        }
        if !(1..=longest_message.min(ring_bytes / 2)).contains(&max_message) {
            return Err(format!("invalid message size of {max_message} bytes in rings of {ring_bytes}"));
        }
        Ok(())
    }

    fn flags(&self) -> u8 {
        u8::from(self.may_sleep) * MAY_SLEEP
    }

    fn numbers(&self) -> [u32; 3] {
        [self.ring_bytes, self.max_message, self.windows]
    }
}

/// Descriptors received with a message.
pub(crate) type Descriptors = ArrayVec<OwnedFd, MAX_DESCRIPTORS>;

impl SocketMessage {
    pub(super) fn encode(&self) -> ArrayVec<u8, MAX_MESSAGE> {
        // Every body has a few numbers, followed by private data or text.
        let (kind, flags, numbers, rest): (u8, u8, &[u32], &[u8]) = match self {
            Self::Hello(opening) => (kind::HELLO, opening.flags(), &opening.numbers(), &opening.private_data),
            Self::Accept(opening) => (kind::ACCEPT, opening.flags(), &opening.numbers(), &opening.private_data),
            Self::Reject { private_data } => (kind::REJECT, 0, &[], private_data),
            Self::Region { id, bytes } => (kind::REGION, 0, &[*id, 0, *bytes as u32, (*bytes >> 32) as u32], &[]),
            Self::Bell => (kind::BELL, 0, &[], &[]),
            Self::Refused { reason } => {
                (kind::REFUSED, 0, &[], &reason.as_bytes()[..reason.len().min(MAX_PRIVATE_DATA)])
            }
        };
        let mut out: ArrayVec<u8, MAX_MESSAGE> = MAGIC.to_le_bytes().into_iter().chain(VERSION.to_le_bytes()).collect();
        out.extend([kind, flags]);
        out.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
        out.extend(rest.iter().copied());
        out
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Self, &'static str> {
        const SHORT: &str = "message too short";
        let (&[m0, m1, m2, m3, v0, v1, kind, flags], body) = bytes.split_first_chunk().ok_or(SHORT)?;
        if u32::from_le_bytes([m0, m1, m2, m3]) != MAGIC {
            return Err("wrong magic word");
        }
        if u16::from_le_bytes([v0, v1]) != VERSION {
            return Err("unknown version of the software fabric; run the same release on both sides");
        }
        // Per kind: known flags, count of numbers in the body, and maximum bytes of private data or text behind them.
        // Only Hello and Accept state whether their sender may sleep.
        let (known, count, max_rest) = match kind {
            kind::HELLO | kind::ACCEPT => (MAY_SLEEP, 3, MAX_PRIVATE_DATA),
            kind::REJECT | kind::REFUSED => (0, 0, MAX_PRIVATE_DATA),
            kind::REGION => (0, 4, 0),
            kind::BELL => (0, 0, 0),
            _ => return Err("unknown kind of message"),
        };
        if flags & !known != 0 {
            return Err("unknown flags");
        }
        let (numbers, rest) = body.split_at_checked(4 * count).ok_or(SHORT)?;
        if rest.len() > max_rest {
            return Err("too much private data, or bytes behind the message");
        }
        let numbers: ArrayVec<u32, 4> = numbers.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect();
        let private_data = rest.to_vec();
        Ok(match (kind, &numbers[..]) {
            (kind::HELLO | kind::ACCEPT, &[ring_bytes, max_message, windows]) => {
                let may_sleep = flags & MAY_SLEEP != 0;
                let opening = Opening { may_sleep, ring_bytes, max_message, windows, private_data };
                if kind == kind::HELLO { Self::Hello(opening) } else { Self::Accept(opening) }
            }
            (kind::REJECT, _) => Self::Reject { private_data },
            (kind::REGION, &[id, 0, low, high]) => Self::Region { id, bytes: u64::from(high) << 32 | u64::from(low) },
            (kind::BELL, _) => Self::Bell,
            (kind::REFUSED, _) => Self::Refused { reason: String::from_utf8_lossy(rest).escape_debug().to_string() },
            _ => return Err("reserved bytes are not zero"),
        })
    }

    /// Sends the message with descriptors. Fails with `AGAIN` while the peer does not read.
    pub(super) fn send(&self, socket: BorrowedFd<'_>, descriptors: &[BorrowedFd<'_>]) -> Result<(), Errno> {
        let bytes = self.encode();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
            return Err(Errno::TOOBIG);
        }
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let send = || rustix::net::sendmsg(socket, &[IoSlice::new(&bytes)], &mut control, flags);
        rustix::io::retry_on_intr(send).map(drop)
    }

    /// Whether the next message may carry descriptors, which a doorbell does not. `None` if no message has arrived.
    pub(super) fn next_has_descriptors(socket: BorrowedFd<'_>) -> Option<bool> {
        let bell = Self::Bell.encode();
        let mut head = [0; MAX_MESSAGE];
        let look = || rustix::net::recv(socket, &mut head, RecvFlags::PEEK | RecvFlags::DONTWAIT);
        match rustix::io::retry_on_intr(look) {
            Ok((_, len)) => Some(len > 0 && head[..len] != bell[..]),
            Err(Errno::AGAIN) => None,
            Err(_) => Some(false),
        }
    }

    /// Reads one message. The descriptors of a refused message are closed.
    pub(super) fn receive(socket: BorrowedFd<'_>) -> SocketInput<(Self, Descriptors)> {
        // One byte more than the longest message, to detect longer ones.
        let mut bytes = [0; MAX_MESSAGE + 1];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let receive = || rustix::net::recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags);
        let received = match rustix::io::retry_on_intr(receive) {
            Ok(received) => received,
            Err(Errno::AGAIN) => return SocketInput::Pending,
            Err(_) => return SocketInput::Closed,
        };
        let mut descriptors = Descriptors::new();
        let mut has_unexpected = false;
        for message in control.drain() {
            // The space holds no more descriptors than `descriptors`; an extra one is closed when dropped.
            match message {
                RecvAncillaryMessage::ScmRights(fds) => {
                    fds.for_each(|fd| has_unexpected |= descriptors.try_push(fd).is_err());
                }
                _ => has_unexpected = true,
            }
        }
        if received.flags.contains(ReturnFlags::CTRUNC) || has_unexpected {
            // When this process has no free descriptor, the kernel drops descriptors with no other sign than this flag.
            // With too little space, it installs as many as fit.
            let is_our_limit = !has_unexpected && descriptors.len() < MAX_DESCRIPTORS;
            let lost = || SocketInput::Failed(failed("recvmsg of a message with descriptors", Errno::MFILE));
            return if is_our_limit { lost() } else { SocketInput::violation("unexpected control data") };
        }
        if received.bytes == 0 {
            return SocketInput::Closed;
        }
        match Self::decode(&bytes[..received.bytes.min(bytes.len())]) {
            Ok(message) => SocketInput::Message((message, descriptors)),
            Err(why) => SocketInput::violation(why),
        }
    }
}
