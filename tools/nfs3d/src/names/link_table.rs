//! Last known names of inodes, in bounded memory.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::mem;

/// Approximate memory of a link, without its name, in bytes.
const OVERHEAD: usize = 96;

/// A name of an inode: the directory's inode number, and the name in it.
pub(super) type Link = (u64, Box<[u8]>);

/// Links by inode number, in two generations.
///
/// A used link moves to the young generation. When that is full, the old one is dropped, and the young one becomes old.
#[derive(Debug)]
pub(super) struct LinkTable {
    young: HashMap<u64, Link>,
    old: HashMap<u64, Link>,
    /// Bytes of the young generation.
    bytes: usize,
    /// Limit of bytes of each generation.
    limit: usize,
}

fn link_size((_, name): &Link) -> usize {
    OVERHEAD + name.len()
}

impl LinkTable {
    /// Creates an empty table that takes at most `bytes` bytes.
    pub(super) fn new(bytes: usize) -> Self {
        Self { young: HashMap::new(), old: HashMap::new(), bytes: 0, limit: bytes / 2 }
    }

    /// Number of links.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.young.len() + self.old.len()
    }

    /// Returns the link of an inode, and marks it as used.
    fn get(&mut self, ino: u64) -> Option<&Link> {
        if let Some(link) = self.old.remove(&ino) {
            self.insert_young(ino, link);
        }
        self.young.get(&ino)
    }

    fn insert_young(&mut self, ino: u64, link: Link) {
        self.bytes += link_size(&link);
        if self.bytes > self.limit {
            self.bytes = link_size(&link);
            self.old = mem::take(&mut self.young);
        }
        self.young.insert(ino, link);
    }

    /// Sets the link of an inode. This may drop the links that were used longest ago.
    pub(super) fn insert(&mut self, ino: u64, parent: u64, name: &[u8]) {
        if self.get(ino).is_none_or(|link| (link.0, &*link.1) != (parent, name)) {
            self.remove(ino);
            self.insert_young(ino, (parent, name.into()));
        }
    }

    /// Sets the link of an inode, unless that would drop other links.
    pub(super) fn insert_if_room(&mut self, ino: u64, parent: u64, name: &[u8]) {
        if self.bytes + OVERHEAD + name.len() <= self.limit {
            self.insert(ino, parent, name);
        }
    }

    /// Forgets an inode.
    pub(super) fn remove(&mut self, ino: u64) {
        self.old.remove(&ino);
        if let Some(link) = self.young.remove(&ino) {
            self.bytes -= link_size(&link);
        }
    }

    /// Forgets this name of an inode.
    pub(super) fn remove_name(&mut self, ino: u64, parent: u64, name: &[u8]) {
        if self.get(ino).is_some_and(|link| (link.0, &*link.1) == (parent, name)) {
            self.remove(ino);
        }
    }

    /// Names that lead from the root to an inode, in reverse order.
    ///
    /// `None` if one of them is unknown, or there are more than `depth`.
    pub(super) fn path(&mut self, ino: u64, root: u64, depth: usize) -> Option<Vec<Link>> {
        let (mut path, mut at) = (Vec::new(), ino);
        while at != root {
            let link = self.get(at)?.clone();
            at = link.0;
            path.push(link);
            if path.len() > depth {
                return None;
            }
        }
        Some(path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_used_longest_ago_are_dropped_at_the_limit() {
        let name = [b'n'; 4];
        // Ten links in each generation.
        let mut table = LinkTable::new(20 * (OVERHEAD + name.len()));
        (1..=10_000).for_each(|ino| {
            table.insert(ino, 0, &name);
            assert!(table.get(1).is_some(), "{ino}: link 1 was used in each round");
            assert!(table.len() <= 20);
        });
        assert!(table.get(10_000).is_some() && table.get(2).is_none());
        // `insert_if_room` drops no other link.
        let before = table.len();
        (20_000..20_100).for_each(|ino| table.insert_if_room(ino, 0, &name));
        assert!(table.get(10_000).is_some() && table.len() <= before + 10);
    }

    #[test]
    fn removed_links_leave_nothing() {
        let mut table = LinkTable::new(1 << 20);
        for ino in 1..1000 {
            table.insert(ino, 0, b"name");
            table.insert(ino, 0, b"renamed");
            table.remove_name(ino, 0, b"name");
            assert_eq!(table.path(ino, 0, 9), Some(vec![(0, (*b"renamed").into())]), "the inode has another name");
            table.remove_name(ino, 0, b"renamed");
        }
        assert_eq!((table.len(), table.bytes), (0, 0));
    }

    #[test]
    fn paths_are_bounded_even_if_links_form_a_cycle() {
        let mut table = LinkTable::new(1 << 20);
        table.insert(1, 0, b"a");
        table.insert(2, 1, b"b");
        let path = table.path(2, 0, 2).expect("both are known");
        assert_eq!(path, [(1, (*b"b").into()), (0, (*b"a").into())]);
        assert_eq!(table.path(2, 0, 1), None);
        assert_eq!(table.path(3, 0, 9), None);
        table.insert(1, 2, b"a");
        assert_eq!(table.path(2, 0, 9), None);
    }
}
