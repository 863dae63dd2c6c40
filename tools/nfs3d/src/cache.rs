//! Recently used nodes.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use crate::lock::lock;
use crate::node::Node;

/// Open nodes by inode number, in two generations.
///
/// A used node moves to the young generation. Each [rotation](NodeCache::rotate) and each overflow drops the old
/// generation, and the young one becomes old. Unused files are therefore closed soon, and removed ones free their
/// space.
#[derive(Debug)]
pub(crate) struct NodeCache {
    generations: Mutex<Generations>,
    /// Limit of nodes per generation.
    limit: usize,
}

#[derive(Debug, Default)]
struct Generations {
    young: HashMap<u64, Arc<Node>>,
    old: HashMap<u64, Arc<Node>>,
}

impl NodeCache {
    pub(crate) fn new(limit: usize) -> Self {
        Self { generations: Mutex::default(), limit: limit.max(1) }
    }

    pub(crate) fn get(&self, ino: u64) -> Option<Arc<Node>> {
        let mut all = lock(&self.generations);
        if let Some(node) = all.young.get(&ino) {
            return Some(Arc::clone(node));
        }
        let node = all.old.remove(&ino)?;
        let unused = all.insert(Arc::clone(&node), self.limit);
        drop(all);
        drop(unused);
        Some(node)
    }

    /// Adds a node. Returns it, or the earlier one of the same inode.
    pub(crate) fn enter(&self, node: Node) -> Arc<Node> {
        if let Some(known) = self.get(node.ino())
            && known.handle() == node.handle()
        {
            return known;
        }
        let node = Arc::new(node);
        let unused = lock(&self.generations).insert(Arc::clone(&node), self.limit);
        // The lock is released first, because closing files takes time.
        drop(unused);
        node
    }

    /// Closes a removed file.
    pub(crate) fn remove(&self, ino: u64) {
        let mut all = lock(&self.generations);
        let removed = (all.young.remove(&ino), all.old.remove(&ino));
        // The lock is released first, because closing the last descriptor of a large file takes time.
        drop(all);
        drop(removed);
    }

    /// Drops nodes that were not used since the rotation before the last.
    pub(crate) fn rotate(&self) {
        let old = lock(&self.generations).rotate();
        // The lock is released first, because closing files takes time.
        drop(old);
    }
}

impl Generations {
    /// Adds a node to the young generation. If that was full, returns the dropped old generation.
    fn insert(&mut self, node: Arc<Node>, limit: usize) -> HashMap<u64, Arc<Node>> {
        let unused = if self.young.len() >= limit { self.rotate() } else { HashMap::new() };
        self.young.insert(node.ino(), node);
        unused
    }

    fn rotate(&mut self) -> HashMap<u64, Arc<Node>> {
        std::mem::replace(&mut self.old, std::mem::take(&mut self.young))
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::{CWD, Mode, OFlags, fstat, openat};

    use super::*;
    use crate::handles::FileHandle;

    #[test]
    fn nodes_stay_within_the_limit_even_if_all_are_used() {
        const LIMIT: usize = 10;
        let cache = NodeCache::new(LIMIT);
        for ino in 0..200 {
            let file = openat(CWD, "/", OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap();
            let mut stat = fstat(&file).unwrap();
            stat.st_ino = ino;
            cache.enter(Node::new(file, FileHandle::default(), &stat));
            assert_eq!(cache.get(ino).map(|node| node.ino()), Some(ino));
            // The client uses every file that it knows.
            (0..ino).for_each(|ino| drop(cache.get(ino)));
            let all = lock(&cache.generations);
            assert!(all.young.len() <= LIMIT && all.old.len() <= LIMIT, "{} and {}", all.young.len(), all.old.len());
        }
    }
}
