#![expect(unsafe_code, reason = "the C caller guarantees that its memory is mapped")]
//! Memory of chunks, of the library or of the application.

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::OnceLock;

use rpcrdma::{Arena, Buf, Frozen};
use rpcrdma_mempool::{ArenaId, Class, ExternalMemory, Pool};
use rustix::io::Errno;

use crate::failure::ApiFailure;

/// Value of a buffer handle: owned and writable, or shared and read-only.
pub(crate) enum BufferMemory {
    Owned(Buf),
    /// Memory of an arena that several shards may have.
    Shared(Frozen),
    /// Memory of a shard's own arena.
    OfShard(Frozen),
}

impl BufferMemory {
    /// Address and length of the bytes.
    pub(crate) fn bytes(&mut self) -> (*mut u8, usize) {
        match self {
            Self::Owned(buf) => (buf.as_mut_ptr(), buf.len()),
            Self::Shared(bytes) | Self::OfShard(bytes) => (bytes.as_ptr().cast_mut(), bytes.len()),
        }
    }

    /// Restricts the buffer to a range of its bytes.
    pub(crate) fn set_range(&mut self, start: usize, len: usize) -> Result<(), ApiFailure> {
        let capacity = match self {
            Self::Owned(buf) => buf.capacity(),
            Self::Shared(bytes) | Self::OfShard(bytes) => bytes.len(),
        };
        check_range(start, len, capacity)?;
        match self {
            Self::Owned(buf) => buf.set_window(start, len),
            Self::Shared(bytes) | Self::OfShard(bytes) => *bytes = bytes.part(start, len),
        }
        Ok(())
    }

    /// Converts the buffer for a chunk of a client's call.
    pub(crate) fn into_client_buffer(self) -> Result<Buf, ApiFailure> {
        match self {
            Self::Owned(buf) => Ok(buf),
            Self::Shared(_) | Self::OfShard(_) => {
                Err(ApiFailure::argument("the buffer is read-only: use one from rpcrdma_alloc"))
            }
        }
    }

    /// The memory of a Read chunk of a call whose shard has the arena `shard_arena`.
    pub(crate) fn of_read_chunk(bytes: Frozen, shard_arena: Option<ArenaId>) -> Self {
        if shard_arena == Some(bytes.arena()) { Self::OfShard(bytes) } else { Self::Shared(bytes) }
    }

    /// Converts the buffer for a result of a call whose shard has the arena `shard_arena`.
    ///
    /// # Errors
    /// The memory belongs to another shard or to a client.
    pub(crate) fn into_result(self, shard_arena: Option<ArenaId>) -> Result<Frozen, ApiFailure> {
        let bytes = match self {
            Self::Shared(bytes) => return Ok(bytes),
            Self::Owned(buf) => buf.freeze(),
            Self::OfShard(bytes) => bytes,
        };
        match shard_arena {
            Some(arena) if arena != bytes.arena() => {
                Err(ApiFailure::new(Errno::XDEV, "the buffer belongs to another shard or to a client: copy it"))
            }
            _ => Ok(bytes),
        }
    }
}

fn check_range(start: usize, len: usize, capacity: usize) -> Result<(), ApiFailure> {
    match start.checked_add(len) {
        Some(end) if end <= capacity => Ok(()),
        _ => Err(ApiFailure::argument(format_args!(
            "{len} bytes from byte {start} exceed the {capacity} bytes of the memory"
        ))),
    }
}

/// Reports to the application, when dropped, that its memory is free.
pub(crate) struct ReleaseCallback {
    function: unsafe extern "C-unwind" fn(context: *mut c_void),
    context: *mut c_void,
}

// SAFETY: the caller of `new` guarantees that any thread may call the function.
unsafe impl Send for ReleaseCallback {}
// SAFETY: no method uses a shared reference.
unsafe impl Sync for ReleaseCallback {}

impl ReleaseCallback {
    /// # Safety
    /// `function` may be called with `context` once, on any thread.
    pub(crate) unsafe fn new(
        function: Option<unsafe extern "C-unwind" fn(context: *mut c_void)>,
        context: *mut c_void,
    ) -> Option<Self> {
        Some(Self { function: function?, context })
    }
}

impl Drop for ReleaseCallback {
    fn drop(&mut self) {
        // SAFETY: the caller of `new` guarantees it.
        unsafe { (self.function)(self.context) }
    }
}

/// Memory of the application: value of an arena handle.
pub(crate) struct AdoptedArena {
    pub(crate) arena: Arena,
    /// Set by the first use: the whole memory, to be sent as results, or `None` for Read chunks.
    results: OnceLock<Option<Frozen>>,
}

impl AdoptedArena {
    /// Adopts memory of the application.
    ///
    /// # Errors
    /// The memory does not start at a page, or is not a whole number of pages.
    ///
    /// # Safety
    /// See [`ExternalMemory::new`], whose contract holds until `release` is dropped.
    pub(crate) unsafe fn new(
        base: *mut c_void,
        len: usize,
        release: Option<ReleaseCallback>,
    ) -> Result<Self, ApiFailure> {
        let base = NonNull::new(base.cast()).ok_or_else(|| ApiFailure::argument("base is NULL"))?;
        if !len.is_multiple_of(4096) {
            return Err(ApiFailure::argument(format_args!("len is {len}: expected a multiple of 4096")));
        }
        // SAFETY: the caller guarantees it.
        let memory = unsafe { ExternalMemory::new(base, len, release) };
        let arena = memory.map_err(ApiFailure::argument)?.into_arena("memory of the application");
        Ok(Self { arena, results: OnceLock::new() })
    }

    /// Reserves the arena for Read chunks, and returns it.
    pub(crate) fn for_reads(&self) -> Result<Arena, ApiFailure> {
        match self.results.get_or_init(|| None) {
            None => Ok(self.arena.clone()),
            Some(_) => {
                Err(ApiFailure::new(Errno::BUSY, "reads_into: the arena has parts for results (rpcrdma_arena_part)"))
            }
        }
    }

    /// A part of the memory, to be sent as a result. `release` is dropped once nobody uses the part.
    pub(crate) fn part(
        &self,
        start: usize,
        len: usize,
        release: Option<ReleaseCallback>,
    ) -> Result<BufferMemory, ApiFailure> {
        let whole = || {
            let size = self.arena.len();
            let pool = Pool::of_pages(self.arena.clone(), Class { size, count: 1 }).ok()?;
            pool.alloc(size).map(Buf::freeze)
        };
        let results = self.results.get_or_init(whole).as_ref();
        let bytes = results.ok_or_else(|| {
            ApiFailure::new(Errno::BUSY, "the arena is for Read chunks (reads_into), or has 4 GiB or more")
        })?;
        check_range(start, len, bytes.len())?;
        let part = bytes.part(start, len);
        Ok(BufferMemory::Shared(match release {
            Some(release) => part.with_owner(release),
            None => part,
        }))
    }
}
