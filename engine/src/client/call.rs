//! Calls before their start.

use std::time::Duration;

use rpcrdma_mempool::Buf;

use crate::service::MAX_CHUNKS;
use crate::shard::{CallBuffers, ChunkMemory};
use crate::wire::EncodeError;

/// A call to start, on any kind of client; `Send`.
///
/// A call created by [`ClientCall::new`] owns its arguments, which the client copies into the message.
/// [`LocalClient::prepare`](super::LocalClient::prepare) makes a call in the memory that it is sent from, so its
/// arguments are not copied.
///
/// ```
/// use std::time::Duration;
/// use rpcrdma::client::ClientCall;
///
/// let call = ClientCall::new(1).args(7_u32.to_be_bytes()).timeout(Duration::from_secs(1));
/// let call = call.write_chunk(1 << 16).expect_reply(4096);
/// ```
///
/// A call with more than [`MAX_CHUNKS`] Read or Write chunks does not start
/// ([`CallError::Invalid`](crate::CallError::Invalid)). The buffers beyond the limit return to their pool immediately,
/// all others return with the [`FailedCall`](crate::FailedCall).
#[must_use]
#[derive(Debug)]
pub struct ClientCall {
    /// The RPC message, in the memory that it is sent from. If `None`, `memory` has the arguments, if there are any.
    pub(super) message: Option<Buf>,
    /// Offset of the arguments; 0 without a message.
    pub(super) args_at: usize,
    /// Bytes written, from the start of the message. The rest of the memory holds data of other messages.
    filled: usize,
    pub(super) memory: ChunkMemory,
    pub(super) procedure: u32,
    pub(crate) one_way: bool,
    pub(super) max_reply: usize,
    pub(crate) timeout: Option<Duration>,
}

impl ClientCall {
    /// A call of this procedure, without arguments.
    #[inline]
    pub fn new(procedure: u32) -> Self {
        Self {
            message: None,
            args_at: 0,
            filled: 0,
            memory: ChunkMemory::NONE,
            procedure,
            one_way: false,
            max_reply: 0,
            timeout: None,
        }
    }

    /// A call in the memory that it is sent from, with its header, and room for the arguments at `args_at`.
    #[inline]
    pub(super) fn in_message(procedure: u32, message: Buf, args_at: usize) -> Self {
        Self { message: Some(message), args_at, filled: args_at, ..Self::new(procedure) }
    }

    /// Sets the XDR-encoded arguments, without those in chunks.
    ///
    /// A prepared call loses its message buffer, so these arguments are copied when it starts.
    pub fn args(mut self, args: impl Into<Vec<u8>>) -> Self {
        let memory = self.memory.get_or_new();
        memory.move_reads(self.args_at, 0);
        memory.args = args.into();
        (self.message, self.args_at) = (None, 0);
        self
    }

    /// Arguments of the call.
    ///
    /// A prepared call has arguments of the length that it was prepared for. They are zero where nothing was written;
    /// [`put_args`](Self::put_args) avoids the clearing.
    #[inline]
    pub fn args_mut(&mut self) -> &mut [u8] {
        self.clear_unwritten();
        self.args_room()
    }

    /// Appends arguments; allocates unless the call is prepared.
    ///
    /// A prepared call sends zeroes for unwritten bytes.
    ///
    /// # Errors
    /// The arguments exceed the room of a prepared call; none are written.
    #[inline]
    pub fn put_args(&mut self, args: &[u8]) -> Result<(), EncodeError> {
        let Some(message) = &mut self.message else {
            self.memory.get_or_new().args.extend_from_slice(args);
            return Ok(());
        };
        let room = message.get_mut(self.filled..).unwrap_or_default();
        let available = room.len();
        let room = room.get_mut(..args.len()).ok_or(EncodeError::new(args.len(), available))?;
        room.copy_from_slice(args);
        self.filled += args.len();
        Ok(())
    }

    /// Memory of all arguments, uninitialized. The caller writes it, then calls
    /// [`set_args_written`](Self::set_args_written).
    #[inline]
    pub(crate) fn args_room(&mut self) -> &mut [u8] {
        match &mut self.message {
            Some(message) => message.get_mut(self.args_at..).unwrap_or_default(),
            None => self.memory.get_mut().map(|memory| &mut memory.args[..]).unwrap_or_default(),
        }
    }

    /// Marks the first `len` bytes of the arguments as written. The rest, if any, is cleared later.
    #[inline]
    pub(crate) fn set_args_written(&mut self, len: usize) {
        self.filled = self.args_at + len;
    }

    /// Clears the unwritten rest of the message.
    #[inline]
    pub(super) fn clear_unwritten(&mut self) {
        if let Some(message) = &mut self.message
            && let Some(rest @ [_, ..]) = message.get_mut(self.filled..)
        {
            rest.fill(0);
            self.filled = message.len();
        }
    }

    /// Changes the chunk memory of the call.
    ///
    /// Destructures the call, because otherwise dropping it while unwinding would force it into memory.
    #[inline(always)]
    fn with_buffers(self, change: impl FnOnce(&mut CallBuffers)) -> Self {
        let Self { message, mut memory, .. } = self;
        change(memory.get_or_new());
        Self { message, memory, ..self }
    }

    /// Adds a Read chunk: sends the bytes of `data` as an argument.
    ///
    /// The chunk is the argument at byte `at` of the arguments (a multiple of 4), without XDR round-up. The buffer must
    /// come from the client's own `alloc`.
    #[doc(alias("chunk list", "read list"))]
    #[inline]
    pub fn read_chunk(self, at: usize, data: Buf) -> Self {
        // A position that overflows becomes `u32::MAX`, which is refused when the call starts.
        let position = u32::try_from(self.args_at.saturating_add(at)).unwrap_or(u32::MAX);
        self.with_buffers(|memory| memory.too_many |= memory.send.try_push((position, data)).is_err())
    }

    /// Offers a Write chunk of `len` bytes for the next result.
    ///
    /// The client allocates the chunk at the start of the call, which fails without memory.
    #[doc(alias("chunk list", "write list", "reply chunk"))]
    pub fn write_chunk(self, len: u32) -> Self {
        self.with_buffers(|memory| match memory.results() {
            index @ ..MAX_CHUNKS => memory.unallocated_writes.push((index, len)),
            _ => memory.too_many = true,
        })
    }

    /// Offers `room` as a Write chunk for the next result.
    ///
    /// The buffer must come from the client's own `alloc`.
    #[inline]
    pub fn write_chunk_into(self, room: Buf) -> Self {
        self.with_buffers(|memory| match memory.results() {
            ..MAX_CHUNKS => memory.receive.push(room),
            _ => memory.too_many = true,
        })
    }

    /// Reserves room for results of up to `bytes` bytes.
    ///
    /// This is required if the results may exceed one message.
    #[inline]
    pub fn expect_reply(mut self, bytes: usize) -> Self {
        // No message of the protocol is longer, and sums with this limit do not overflow.
        self.max_reply = bytes.min(u32::MAX as usize);
        self
    }

    /// Makes the call [one-way](crate::Procedure::one_way), without a reply.
    ///
    /// It completes once sent, and its caller does not learn whether it ran. Version 2 only, and without chunks.
    #[inline]
    pub fn one_way(mut self) -> Self {
        self.one_way = true;
        self
    }

    /// Sets the time-out of the call, measured from its start. Default: none.
    ///
    /// A call that exceeds it fails with [`CallError::TimedOut`](crate::CallError::TimedOut).
    #[inline]
    pub fn timeout(mut self, time: Duration) -> Self {
        self.timeout = Some(time);
        self
    }
}
