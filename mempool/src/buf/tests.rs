use std::sync::{Arc, Mutex};
use std::thread;

use crate::{ArenaConfig, Buf, Class, PagePolicy, Pool, PoolConfig, SharedMapping};

fn pool(classes: &[(usize, usize)]) -> Pool {
    let classes = classes.iter().map(|&(size, count)| Class { size, count }).collect();
    let arena = ArenaConfig { bytes: 0, pages: PagePolicy::Small, name: "test", ..ArenaConfig::default() };
    Pool::new(&PoolConfig { classes, arena }).unwrap()
}

fn buf_with(pool: &Pool, text: &[u8]) -> Buf {
    let mut buf = pool.alloc(text.len()).unwrap();
    buf.copy_from_slice(text);
    buf
}

#[test]
fn the_range_moves_within_the_capacity() {
    let pool = pool(&[(256, 2)]);
    let mut buf = pool.alloc(10).unwrap();
    assert_eq!((buf.start(), buf.len(), buf.capacity()), (0, 10, 256));
    assert!(buf.full_mut().iter().all(|&byte| byte == 0), "memfd pages start zeroed");
    for (i, byte) in buf.full_mut().iter_mut().enumerate() {
        *byte = i as u8;
    }
    buf.set_window(100, 3);
    assert_eq!(*buf, [100, 101, 102]);
    assert_eq!(buf.offset(), buf.base_offset() + 100);
    assert_eq!(buf.address(), pool.arena().base_address() + buf.offset());
    assert!(buf.extend_front(98) && !buf.extend_front(99), "the range extends only to the front");
    assert_eq!(*buf, [98, 99, 100, 101, 102]);
    buf.set_window(256, 0);
    assert!(buf.is_empty());
    drop(buf);
    assert_eq!(pool.close(), Ok(()));
}

#[test]
fn a_range_beyond_the_capacity_panics() {
    for (start, len) in [(0, 257), (257, 0), (200, 57), (usize::MAX, 2), (2, usize::MAX)] {
        let moved = thread::spawn(move || {
            let pool = pool(&[(256, 1)]);
            pool.alloc(1).unwrap().set_window(start, len);
        });
        assert!(moved.join().is_err(), "{start}+{len}");
    }
}

#[test]
fn buffers_are_aligned_and_do_not_overlap() {
    let pool = pool(&[(100, 8), (4096, 8)]);
    let bufs: Vec<_> = (0..16).map(|i| pool.alloc(if i < 8 { 100 } else { 4096 }).unwrap()).collect();
    let mut places: Vec<_> = bufs.iter().map(|buf| (buf.base_offset(), buf.capacity())).collect();
    places.sort_unstable();
    assert!(bufs.iter().all(|buf| buf.address().is_multiple_of(64)));
    assert!(places.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0), "{places:?}");
    assert!(places.last().is_some_and(|last| last.0 + last.1 <= pool.arena().len()));
}

#[test]
fn frozen_is_shared_between_threads_and_returns_once() {
    let pool = pool(&[(64, 1)]);
    let frozen = buf_with(&pool, b"shared").freeze();
    assert_eq!(pool.census().classes[0].frozen, 1);
    let readers: Vec<_> = (0..4)
        .map(|_| {
            let clone = frozen.clone();
            thread::spawn(move || assert_eq!(*clone.clone(), *b"shared"))
        })
        .collect();
    readers.into_iter().for_each(|reader| reader.join().unwrap());
    assert_eq!(pool.census().classes[0].frozen, 1);
    thread::spawn(move || drop(frozen)).join().unwrap();
    assert_eq!(pool.stats().classes[0].free, 0);
    assert_eq!(pool.drain_remote(), 1);
    assert_eq!(pool.drain_remote(), 0);
    assert_eq!(pool.close(), Ok(()));
}

#[test]
fn a_part_of_frozen_keeps_the_whole() {
    let pool = pool(&[(64, 1)]);
    let mut buf = buf_with(&pool, b"..shared");
    buf.set_window(2, 6);
    let frozen = buf.freeze();
    let part = frozen.part(1, 4);
    assert_eq!((&*part, &*part.part(3, 1), &*part.part(4, 0)), (&b"hare"[..], &b"e"[..], &b""[..]));
    for (start, len) in [(0, 7), (7, 0), (usize::MAX, 1), (1, usize::MAX)] {
        let refused = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| frozen.part(start, len)));
        assert!(refused.is_err(), "{start}+{len}");
    }
    drop(frozen);
    assert_eq!(pool.stats().classes[0].free, 0);
    drop(part);
    assert_eq!(pool.close(), Ok(()));
}

#[test]
fn lent_is_reclaimed_by_its_only_clone() {
    let pool = pool(&[(64, 1)]);
    let mut buf = buf_with(&pool, b"....abcd");
    buf.set_window(4, 4);
    let lent = buf.lend().unwrap();
    assert_eq!(pool.census().classes[0].lent, 1);
    let clone = lent.clone();
    let lent = lent.reclaim().unwrap_err();
    assert!(clone.write_at(1, b"XY") && !clone.write_at(3, b"XY") && !clone.write_at(usize::MAX, b"XY"));
    drop(clone);
    let mut seen = [0; 4];
    assert!(lent.read_at(0, &mut seen) && !lent.read_at(1, &mut seen));
    assert_eq!(seen, *b"aXYd");
    let buf = lent.reclaim().unwrap();
    assert_eq!((buf.start(), &*buf), (4, &b"aXYd"[..]));
    drop(buf.lend().unwrap());
    assert_eq!(pool.close(), Ok(()));
}

#[test]
fn lending_fails_on_other_threads_and_after_the_pools_end() {
    let pool = pool(&[(64, 2)]);
    let (far, near) = (buf_with(&pool, b"far"), buf_with(&pool, b"near"));
    let far = thread::spawn(move || {
        // Its own pool gives that thread a number other than the owner's.
        let _own = self::pool(&[(64, 1)]);
        far.lend().unwrap_err()
    });
    assert_eq!(*far.join().unwrap(), *b"far");
    let lent = near.lend().unwrap();
    drop(pool);
    let near = lent.clone();
    drop(lent);
    let near = near.reclaim().unwrap().lend().unwrap_err();
    assert_eq!(*near, *b"near");
}

#[test]
fn a_posted_buffer_is_completed_or_leaked() {
    let pool = pool(&[(64, 2)]);
    let posted = buf_with(&pool, b"recv").post();
    assert_eq!(pool.census().classes[0].posted, 1);
    assert_eq!((posted.len(), posted.capacity(), posted.arena()), (4, 64, pool.arena().id()));
    #[expect(unsafe_code, reason = "the end of a transfer")]
    // SAFETY: there is no device.
    let buf = unsafe { posted.complete() };
    assert_eq!(*buf, *b"recv");
    drop(buf);
    drop(pool.alloc(1).unwrap().post());
    assert_eq!(pool.stats().leaked, 1);
    let leak = pool.close().unwrap_err();
    assert_eq!(leak.classes[0].leaked, 1);
    assert!(leak.to_string().contains("1 of 2 buffers of 64 bytes"), "{leak}");
}

#[test]
fn bytes_are_copied_between_shared_and_lent_memory() {
    let pool = pool(&[(64, 1)]);
    let ring = SharedMapping::create(4096, "ring").unwrap();
    let lent = pool.alloc(8).unwrap().lend().unwrap();
    assert!(ring.write(4090, b"abcdef"));
    assert!(ring.copy_to_lent(4090, &lent, 2, 6));
    assert!(!ring.copy_to_lent(4090, &lent, 2, 7) && !ring.copy_to_lent(0, &lent, 3, 6));
    assert!(!ring.copy_to_lent(0, &lent, usize::MAX, 1) && !ring.copy_to_lent(usize::MAX, &lent, 0, 1));
    assert!(ring.copy_from_lent(100, &lent, 2, 6));
    assert!(!ring.copy_from_lent(4090, &lent, 2, 7) && !ring.copy_from_lent(0, &lent, 3, 6));
    let mut seen = [0; 8];
    assert!(ring.read(99, &mut seen));
    assert_eq!(seen, *b"\0abcdef\0");
    assert_eq!(lent.reclaim().unwrap()[2..], *b"abcdef");
}

#[test]
fn an_owner_is_dropped_with_the_last_clone() {
    let pool = pool(&[(64, 1)]);
    let whole = buf_with(&pool, b"0123456789").freeze();
    let owner = Arc::new(());
    let owned = whole.part(2, 6).with_owner(Arc::clone(&owner));
    assert_eq!((owned.start(), owned.capacity(), owned.address()), (2, 64, whole.address() + 2));
    let part = owned.part(1, 3);
    assert!(part.has_owner() && !whole.has_owner());
    drop(owned);
    assert_eq!((&*part, Arc::strong_count(&owner)), (&b"345"[..], 2), "the part keeps the owner");
    // A clone without the owner does not keep it.
    thread::spawn(move || drop(part)).join().unwrap();
    assert_eq!((&*whole, Arc::strong_count(&owner)), (&b"0123456789"[..], 1));

    // The owner is dropped before the bytes, which may have an owner of their own.
    struct RecordsDrop(&'static str, Arc<Mutex<String>>);
    impl Drop for RecordsDrop {
        fn drop(&mut self) {
            self.1.lock().unwrap().push_str(self.0);
        }
    }
    let drops = Arc::new(Mutex::new(String::new()));
    drop(
        whole.with_owner(RecordsDrop("last", Arc::clone(&drops))).with_owner(RecordsDrop("first ", Arc::clone(&drops))),
    );
    assert_eq!(*drops.lock().unwrap(), "first last");
    assert_eq!(pool.close(), Ok(()));
}

#[test]
fn debug_shows_places_and_no_contents() {
    let pool = pool(&[(64, 1)]);
    let buf = buf_with(&pool, b"secret");
    let text = format!("{buf:?}");
    assert_eq!(text, format!("Buf(0+6 of 64, arena {} at 0)", pool.arena().id()));
}
