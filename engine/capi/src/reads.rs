//! Memory of the application that Read chunks arrive in.
#![forbid(unsafe_code)]

use std::cell::RefCell;

use rpcrdma::{Arena, Buf};
use rpcrdma_mempool::{Class, Pool};

use crate::failure::Failure;

/// Places are whole pages.
const PAGE: usize = 4096;
/// Shards get an arena in at least this many parts, as they need them.
const PARTS: usize = 16;

thread_local! {
    /// Parts that this thread's shard has.
    static PARTS_HERE: RefCell<Vec<Pool>> = const { RefCell::new(Vec::new()) };
}

/// Places for Read chunks of one procedure.
pub(crate) struct Places {
    arena: Arena,
    /// Bytes of a place.
    size: usize,
    /// Places of a part.
    count: usize,
}

impl Places {
    /// Places for chunks of up to `longest` bytes.
    pub(crate) fn new(arena: Arena, longest: usize) -> Result<Self, Failure> {
        let size = longest.max(1).checked_next_multiple_of(PAGE).unwrap_or(usize::MAX);
        match arena.len() / size {
            0 => {
                Err(Failure::argument(format_args!("max_read is {longest}, and reads_into has {} bytes", arena.len())))
            }
            places => Ok(Self { arena, size, count: places.div_ceil(PARTS) }),
        }
    }

    /// A free place, on a shard's thread. `None` if there is none.
    pub(crate) fn choose(&self) -> Option<Buf> {
        PARTS_HERE.with_borrow_mut(|parts| {
            let of_arena = parts.iter().filter(|part| part.arena().id() == self.arena.id());
            let free = |part: &Pool| {
                part.alloc(self.size).or_else(|| {
                    // Those that other threads have freed.
                    part.drain_remote();
                    part.alloc(self.size)
                })
            };
            of_arena.into_iter().find_map(free).or_else(|| {
                let part = Pool::of_pages(self.arena.clone(), Class { size: self.size, count: self.count }).ok()?;
                let place = part.alloc(self.size);
                parts.push(part);
                place
            })
        })
    }
}

/// Gives the parts of this thread back, where its shard ends and it goes on.
pub(crate) fn end_shard() {
    // A thread that ends has given them back.
    let _ = PARTS_HERE.try_with(|parts| drop(parts.take()));
}
