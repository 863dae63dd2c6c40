//! Calls before their start.

use std::time::Duration;

use rpcrdma_mempool::Buf;

use super::header::Template;
use crate::proto::{CallError, Defect};
use crate::service::MAX_CHUNKS;
use crate::shard::{ChunkMemory, Memory};
use crate::wire::NoSpace;

/// A call to start, on any kind of client; `Send`.
///
/// [`ClientCall::new`] owns its arguments; the client copies them into the message.
/// [`LocalClient::prepare`](super::LocalClient::prepare) makes a call in the memory that it is sent from, so that its
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
/// A call with more than [`MAX_CHUNKS`] Read or Write chunks does not start: [`CallError::Invalid`]. The buffers beyond
/// the limit return to their pool at once, all others return with the [`FailedCall`](crate::FailedCall).
#[derive(Debug)]
#[must_use]
pub struct ClientCall {
    pub(super) args: Args,
    pub(super) memory: ChunkMemory,
    pub(super) procedure: u32,
    pub(super) one_way: bool,
    pub(super) max_reply: usize,
    pub(super) timeout: Option<Duration>,
}

/// The arguments of a call.
#[derive(Debug)]
pub(super) enum Args {
    Owned(Vec<u8>),
    Placed(Placed),
}

/// An RPC message in the memory that it is sent from.
#[derive(Debug)]
pub(super) struct Placed {
    pub(super) message: Buf,
    pub(super) args_at: usize,
    /// Bytes written, from the message's start. The rest holds data of other messages.
    filled: usize,
}

impl Placed {
    /// `message` has room for the header and the arguments.
    #[inline(always)]
    pub(super) fn new(mut message: Buf, template: &Template, procedure: u32) -> Self {
        template.write(&mut message, procedure);
        Self { message, args_at: template.len(), filled: template.len() }
    }

    #[inline]
    pub(super) fn put(&mut self, args: &[u8]) -> Result<(), NoSpace> {
        let room = self.message.get_mut(self.filled..).unwrap_or_default();
        let available = room.len();
        let room = room.get_mut(..args.len()).ok_or(NoSpace { needed: args.len(), available })?;
        room.copy_from_slice(args);
        self.filled += args.len();
        Ok(())
    }

    /// Clears the unwritten rest.
    #[inline]
    pub(super) fn fill(&mut self) {
        if let Some(rest @ [_, ..]) = self.message.get_mut(self.filled..) {
            rest.fill(0);
            self.filled = self.message.len();
        }
    }
}

impl ClientCall {
    /// A call of this procedure, without arguments.
    pub fn new(procedure: u32) -> Self {
        Self::with(procedure, Args::Owned(Vec::new()))
    }

    #[inline(always)]
    pub(super) fn with(procedure: u32, args: Args) -> Self {
        Self { args, memory: ChunkMemory::NONE, procedure, one_way: false, max_reply: 0, timeout: None }
    }

    /// Sets the XDR encoded arguments, without those in chunks.
    ///
    /// A prepared call frees the memory that it was prepared in.
    pub fn args(mut self, args: impl Into<Vec<u8>>) -> Self {
        if let Args::Placed(placed) = &self.args {
            let at = placed.args_at;
            self.move_reads(at, 0);
        }
        self.args = Args::Owned(args.into());
        self
    }

    /// Arguments of the call.
    ///
    /// Those of a prepared call have its length, and are zero where unwritten; [`put_args`](Self::put_args) avoids the
    /// clearing.
    #[inline]
    pub fn args_mut(&mut self) -> &mut [u8] {
        match &mut self.args {
            Args::Placed(placed) => {
                placed.fill();
                &mut placed.message[placed.args_at..]
            }
            Args::Owned(args) => args,
        }
    }

    /// Appends arguments; allocates unless the call is prepared.
    ///
    /// A prepared call sends zeroes for unwritten bytes.
    ///
    /// # Errors
    /// A prepared call has no room for all of them; it writes none.
    #[inline]
    pub fn put_args(&mut self, args: &[u8]) -> Result<(), NoSpace> {
        match &mut self.args {
            Args::Placed(placed) => placed.put(args)?,
            Args::Owned(all) => all.extend_from_slice(args),
        }
        Ok(())
    }

    /// Adds a Read chunk: an argument from a buffer's window.
    ///
    /// It is the argument at byte `at` of the arguments (a multiple of 4), without XDR round-up. The buffer must be of
    /// the client's own `alloc`.
    #[inline]
    #[doc(alias("chunk list", "read list"))]
    pub fn read_chunk(mut self, at: usize, data: Buf) -> Self {
        let args_at = match &self.args {
            Args::Placed(placed) => placed.args_at,
            Args::Owned(_) => 0,
        };
        let memory = self.memory.get_or_new();
        memory.too_many |= memory.send.try_push(((args_at + at) as u32, data)).is_err();
        self
    }

    /// Offers a Write chunk of `len` bytes for the next result.
    ///
    /// The client allocates it at the start of the call, which fails without memory.
    #[doc(alias("chunk list", "write list", "reply chunk"))]
    pub fn write_chunk(mut self, len: u32) -> Self {
        let memory = self.memory.get_or_new();
        let index = memory.results();
        match index < MAX_CHUNKS {
            true => memory.wanted.push((index, len)),
            false => memory.too_many = true,
        }
        self
    }

    /// Offers a buffer's window as a Write chunk for the next result.
    ///
    /// The buffer must be of the client's own `alloc`.
    #[inline]
    pub fn write_chunk_into(mut self, room: Buf) -> Self {
        let memory = self.memory.get_or_new();
        match memory.results() < MAX_CHUNKS {
            true => memory.receive.push(room),
            false => memory.too_many = true,
        }
        self
    }

    /// Reserves room for results of up to so many bytes.
    ///
    /// Needed for results that exceed one message.
    #[inline]
    pub fn expect_reply(mut self, bytes: usize) -> Self {
        self.max_reply = bytes;
        self
    }

    /// Makes it a [one-way](crate::Procedure::one_way) call, without a reply.
    ///
    /// It completes once sent; whether it ran is unknown. Version 2 only, and without chunks.
    #[inline]
    pub fn one_way(mut self) -> Self {
        self.one_way = true;
        self
    }

    /// Sets a time-out from the start: [`CallError::TimedOut`].
    #[inline]
    pub fn timeout(mut self, time: Duration) -> Self {
        self.timeout = Some(time);
        self
    }

    /// Moves the positions of Read chunks: arguments begin at byte `to` of the message instead of `from`.
    pub(super) fn move_reads(&mut self, from: usize, to: usize) {
        if let Some(memory) = self.memory.get_mut() {
            move_reads(memory, from, to);
        }
    }
}

/// As [`ClientCall::move_reads`].
pub(super) fn move_reads(memory: &mut Memory, from: usize, to: usize) {
    memory.send.iter_mut().for_each(|(position, _)| *position = *position - from as u32 + to as u32);
}

/// The error of a call with too many chunks.
#[cold]
pub(super) fn too_many_chunks() -> CallError {
    Defect::TooManyChunks { limit: MAX_CHUNKS }.into()
}
