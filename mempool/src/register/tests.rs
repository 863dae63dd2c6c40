use std::cell::RefCell;
use std::rc::Rc;

use super::*;
use crate::{ArenaConfig, PagePolicy};

/// Records its calls; refuses when full.
struct Device {
    told: Rc<RefCell<Vec<String>>>,
    room: usize,
}

impl Registrar for Device {
    type Key = usize;
    type Error = &'static str;

    fn register(&mut self, arena: &Arena) -> Result<usize, &'static str> {
        self.room = self.room.checked_sub(1).ok_or("full")?;
        self.told.borrow_mut().push(format!("+{}", arena.len()));
        Ok(arena.len())
    }

    fn deregister(&mut self, key: usize) {
        self.room += 1;
        self.told.borrow_mut().push(format!("-{key}"));
    }
}

#[test]
fn each_arena_once_and_the_last_goes_first() {
    let told = Rc::new(RefCell::new(Vec::new()));
    let [a, b, c] = [4096, 8192, 12288]
        .map(|bytes| Arena::new(&ArenaConfig { bytes, pages: PagePolicy::Small, ..ArenaConfig::default() }).unwrap());
    let mut registrations = Registrations::new(Device { told: told.clone(), room: 2 });
    assert_eq!(registrations.add(&a), Ok(&4096));
    assert_eq!(registrations.add(&a.clone()), Ok(&4096));
    assert_eq!(registrations.add(&b), Ok(&8192));
    assert_eq!(registrations.add(&c), Err("full"));
    assert_eq!(registrations.get(c.id()), None);
    assert!(registrations.remove(a.id()) && !registrations.remove(a.id()));
    assert_eq!(registrations.add(&c), Ok(&12288));
    assert_eq!((registrations.get(a.id()), registrations.get(b.id())), (None, Some(&8192)));
    assert_eq!(registrations.device().room, 0);
    drop(registrations);
    assert_eq!(*told.borrow(), ["+4096", "+8192", "-4096", "+12288", "-12288", "-8192"]);
}

#[test]
fn a_registered_arena_stays_mapped() {
    let told = Rc::new(RefCell::new(Vec::new()));
    let arena = Arena::new(&ArenaConfig { bytes: 4096, name: "kept", ..ArenaConfig::default() }).unwrap();
    let start = format!("{:x}-", arena.base_address());
    let mapped = || {
        std::fs::read_to_string("/proc/self/maps")
            .unwrap()
            .lines()
            .any(|line| line.starts_with(&start) && line.contains("memfd:kept"))
    };
    let mut registrations = Registrations::new(Device { told, room: 1 });
    registrations.add(&arena).unwrap();
    drop(arena);
    assert!(mapped());
    drop(registrations);
    assert!(!mapped());
}
