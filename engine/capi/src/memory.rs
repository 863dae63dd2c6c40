#![expect(unsafe_code, reason = "takes the word of C about memory that it has mapped")]
//! Memory of chunks: the library's, and the application's.

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::OnceLock;

use rpcrdma::{Arena, Buf, Frozen};
use rpcrdma_mempool::{ArenaId, Class, GivenMemory, Pool};
use rustix::io::Errno;

use crate::failure::Failure;

/// A buffer: written by its holder, or shared and only read.
pub(crate) enum Memory {
    Own(Buf),
    /// Of an arena that several shards may have.
    Shared(Frozen),
    /// Of a shard's own arena.
    OfShard(Frozen),
}

impl Memory {
    /// Its bytes: address and length.
    pub(crate) fn bytes(&mut self) -> (*mut u8, usize) {
        match self {
            Self::Own(buf) => (buf.as_mut_ptr(), buf.len()),
            Self::Shared(bytes) | Self::OfShard(bytes) => (bytes.as_ptr().cast_mut(), bytes.len()),
        }
    }

    /// Moves its window.
    pub(crate) fn set_window(&mut self, start: usize, len: usize) -> Result<(), Failure> {
        let capacity = match self {
            Self::Own(buf) => buf.capacity(),
            Self::Shared(bytes) | Self::OfShard(bytes) => bytes.len(),
        };
        check_window(start, len, capacity)?;
        match self {
            Self::Own(buf) => buf.set_window(start, len),
            Self::Shared(bytes) | Self::OfShard(bytes) => *bytes = bytes.part(start, len),
        }
        Ok(())
    }

    /// For a chunk of a client's call.
    pub(crate) fn into_own(self) -> Result<Buf, Failure> {
        match self {
            Self::Own(buf) => Ok(buf),
            Self::Shared(_) | Self::OfShard(_) => {
                Err(Failure::argument("the buffer is only read: use one of rpcrdma_alloc"))
            }
        }
    }

    /// A Read chunk of a call whose shard has this arena.
    pub(crate) fn taken(bytes: Frozen, own: Option<ArenaId>) -> Self {
        if own == Some(bytes.arena()) { Self::OfShard(bytes) } else { Self::Shared(bytes) }
    }

    /// For a result of a call whose shard has this arena.
    ///
    /// # Errors
    /// It is memory of another shard, or of a client.
    pub(crate) fn into_result(self, own: Option<ArenaId>) -> Result<Frozen, Failure> {
        let bytes = match self {
            Self::Shared(bytes) => return Ok(bytes),
            Self::Own(buf) => buf.freeze(),
            Self::OfShard(bytes) => bytes,
        };
        match own {
            Some(own) if own != bytes.arena() => {
                Err(Failure::new(Errno::XDEV, "the buffer is another shard's, or a client's: copy it"))
            }
            _ => Ok(bytes),
        }
    }
}

fn check_window(start: usize, len: usize, capacity: usize) -> Result<(), Failure> {
    match start.checked_add(len) {
        Some(end) if end <= capacity => Ok(()),
        _ => Err(Failure::argument(format_args!("{len} bytes from {start} exceed the memory's {capacity}"))),
    }
}

/// Tells the application that its memory is free, when it is dropped.
pub(crate) struct Release {
    function: unsafe extern "C-unwind" fn(context: *mut c_void),
    context: *mut c_void,
}

// SAFETY: the interface says that any thread may call it.
unsafe impl Send for Release {}
// SAFETY: a reference does nothing with it.
unsafe impl Sync for Release {}

impl Release {
    /// # Safety
    /// `function` may be called with `context` once, on any thread.
    pub(crate) unsafe fn new(
        function: Option<unsafe extern "C-unwind" fn(context: *mut c_void)>,
        context: *mut c_void,
    ) -> Option<Self> {
        Some(Self { function: function?, context })
    }
}

impl Drop for Release {
    fn drop(&mut self) {
        // SAFETY: the promise of `new`.
        unsafe { (self.function)(self.context) }
    }
}

/// The application's memory.
pub(crate) struct Adopted {
    pub(crate) arena: Arena,
    /// Set by the first use: all of it, to be sent as results; `None` for Read chunks.
    results: OnceLock<Option<Frozen>>,
}

impl Adopted {
    /// Adopts memory.
    ///
    /// # Errors
    /// It does not start at a page, or is no whole number of pages.
    ///
    /// # Safety
    /// As [`GivenMemory::new`], until `release` is dropped.
    pub(crate) unsafe fn new(base: *mut c_void, len: usize, release: Option<Release>) -> Result<Self, Failure> {
        let base = NonNull::new(base.cast()).ok_or_else(|| Failure::argument("the memory is NULL"))?;
        if !len.is_multiple_of(4096) {
            return Err(Failure::argument(format_args!("{len} bytes are no whole number of pages")));
        }
        // SAFETY: the caller's promise.
        let given = unsafe { GivenMemory::new(base, len, release) };
        let arena = given.map_err(Failure::argument)?.into_arena("memory of the application");
        Ok(Self { arena, results: OnceLock::new() })
    }

    /// The arena, for Read chunks from now on.
    pub(crate) fn for_reads(&self) -> Result<Arena, Failure> {
        match self.results.get_or_init(|| None) {
            None => Ok(self.arena.clone()),
            Some(_) => Err(Failure::new(Errno::BUSY, "reads_into: the arena has results (rpcrdma_arena_part)")),
        }
    }

    /// A part, to be sent as a result. `release` is dropped once nobody uses it.
    pub(crate) fn part(&self, start: usize, len: usize, release: Option<Release>) -> Result<Memory, Failure> {
        let whole = || {
            let size = self.arena.len();
            let pool = Pool::of_pages(self.arena.clone(), Class { size, count: 1 }).ok()?;
            pool.alloc(size).map(Buf::freeze)
        };
        let results = self.results.get_or_init(whole).as_ref();
        let bytes =
            results.ok_or_else(|| Failure::new(Errno::BUSY, "the arena has Read chunks (reads_into), or 4 GiB"))?;
        check_window(start, len, bytes.len())?;
        let part = bytes.part(start, len);
        Ok(Memory::Shared(match release {
            Some(release) => part.with_owner(release),
            None => part,
        }))
    }
}
