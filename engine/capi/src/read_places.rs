//! Memory of the application for the data of Read chunks.
#![forbid(unsafe_code)]

use std::cell::RefCell;

use rpcrdma::{Arena, Buf};
use rpcrdma_mempool::{Class, Pool};

use crate::failure::ApiFailure;

/// The size of a place is a multiple of this.
const PAGE: usize = 4096;
/// An arena is divided into up to this many parts, which shards take as they need them.
const PARTS: usize = 16;

thread_local! {
    /// Parts that this thread's shard has taken.
    static THREAD_PARTS: RefCell<Vec<Pool>> = const { RefCell::new(Vec::new()) };
}

/// Places for the Read chunks of one procedure.
pub(crate) struct ReadPlaces {
    arena: Arena,
    /// Size of a place in bytes.
    size: usize,
    /// Number of places in a part.
    count: usize,
}

impl ReadPlaces {
    /// Divides an arena into places for chunks of up to `longest` bytes.
    pub(crate) fn new(arena: Arena, longest: usize) -> Result<Self, ApiFailure> {
        let size = longest.max(1).checked_next_multiple_of(PAGE).unwrap_or(usize::MAX);
        match arena.len() / size {
            0 => Err(ApiFailure::argument(format_args!(
                "max_read is {longest}, but reads_into has only {} bytes",
                arena.len()
            ))),
            places => Ok(Self { arena, size, count: places.div_ceil(PARTS) }),
        }
    }

    /// Allocates a place, on a shard's thread. Returns `None` if no place is free.
    pub(crate) fn allocate(&self) -> Option<Buf> {
        THREAD_PARTS.with_borrow_mut(|parts| {
            let arena_parts = parts.iter().filter(|part| part.arena().id() == self.arena.id());
            let allocate_in = |part: &Pool| {
                part.alloc(self.size).or_else(|| {
                    // Collect the places that other threads have freed.
                    part.drain_remote();
                    part.alloc(self.size)
                })
            };
            arena_parts.into_iter().find_map(allocate_in).or_else(|| {
                let part = Pool::of_pages(self.arena.clone(), Class { size: self.size, count: self.count }).ok()?;
                let place = part.alloc(self.size);
                parts.push(part);
                place
            })
        })
    }
}

/// Returns the parts of this thread to their arenas, when its shard ends but the thread continues.
pub(crate) fn release_thread_parts() {
    // An ending thread has returned its parts already.
    let _ = THREAD_PARTS.try_with(|parts| drop(parts.take()));
}
