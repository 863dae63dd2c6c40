#![forbid(unsafe_code)]
//! Registering arenas with a device.

use crate::arena::{Arena, ArenaId};

/// A device that must know memory before it uses it.
pub trait Registrar {
    /// The device's name for the memory.
    type Key;
    /// Why the device does not register memory.
    type Error;

    /// Makes a whole arena usable.
    fn register(&mut self, arena: &Arena) -> Result<Self::Key, Self::Error>;
    /// Undoes [`register`](Self::register). Nothing of the arena may be in use by the device.
    fn deregister(&mut self, key: Self::Key);
}

/// The arenas registered with one device. Each is registered once, kept alive meanwhile, and deregistered last first.
#[derive(Debug)]
pub struct Registrations<R: Registrar> {
    device: R,
    /// In order of registration. A handful: searched from the front.
    entries: Vec<(Arena, R::Key)>,
}

impl<R: Registrar> Registrations<R> {
    /// Nothing registered yet.
    pub fn new(device: R) -> Self {
        Self { device, entries: Vec::new() }
    }

    fn position(&self, arena: ArenaId) -> Option<usize> {
        self.entries.iter().position(|(known, _)| known.id() == arena)
    }

    /// Registers an arena unless it is already; returns its key.
    pub fn add(&mut self, arena: &Arena) -> Result<&R::Key, R::Error> {
        let index = match self.position(arena.id()) {
            Some(index) => index,
            None => {
                let key = self.device.register(arena)?;
                self.entries.push((arena.clone(), key));
                self.entries.len() - 1
            }
        };
        Ok(&self.entries[index].1)
    }

    /// The key of a registered arena.
    #[inline]
    pub fn get(&self, arena: ArenaId) -> Option<&R::Key> {
        self.position(arena).map(|index| &self.entries[index].1)
    }

    /// Deregisters an arena; false if it was not registered.
    pub fn remove(&mut self, arena: ArenaId) -> bool {
        let Some(index) = self.position(arena) else { return false };
        let (_arena, key) = self.entries.remove(index);
        self.device.deregister(key);
        true
    }

    /// The device.
    pub fn device(&self) -> &R {
        &self.device
    }
}

impl<R: Registrar> Drop for Registrations<R> {
    fn drop(&mut self) {
        while let Some((_arena, key)) = self.entries.pop() {
            self.device.deregister(key);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
