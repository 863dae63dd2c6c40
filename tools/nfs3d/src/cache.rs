//! Recently used nodes.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex};

use crate::lock::lock;
use crate::node::Node;

/// Open nodes by inode number, in two generations.
///
/// A used node moves to the young generation. Each [rotation](NodeCache::rotate) and each overflow drops the old
/// generation, and the young one becomes old. Unused files are therefore closed soon, and removed ones free their
/// space.
///
/// A node that could not be opened again is [kept](NodeCache::keep) until it was not used between two rotations,
/// whatever other clients open. Each host has a share of the kept nodes. Nodes beyond it are treated like any other.
#[derive(Debug)]
pub(crate) struct NodeCache {
    generations: Mutex<Generations>,
    /// Limit of nodes per generation, and of kept nodes.
    limit: usize,
}

/// One host may have one of this many parts of the kept nodes.
const HOST_SHARES: usize = 8;

#[derive(Debug)]
struct KeptNode {
    node: Arc<Node>,
    host: Option<IpAddr>,
    /// Whether it was used since the last rotation.
    is_used: bool,
}

#[derive(Debug, Default)]
struct Generations {
    young: HashMap<u64, Arc<Node>>,
    old: HashMap<u64, Arc<Node>>,
    kept: HashMap<u64, KeptNode>,
}

impl NodeCache {
    /// Creates a cache that opens at most `files` files.
    pub(crate) fn new(files: usize) -> Self {
        // Two generations and the kept nodes, each node with up to three files.
        Self { generations: Mutex::default(), limit: (files / 9).max(1) }
    }

    pub(crate) fn get(&self, ino: u64) -> Option<Arc<Node>> {
        let mut all = lock(&self.generations);
        if let Some(kept) = all.kept.get_mut(&ino) {
            kept.is_used = true;
            return Some(Arc::clone(&kept.node));
        }
        if let Some(node) = all.young.get(&ino) {
            return Some(Arc::clone(node));
        }
        let node = all.old.remove(&ino)?;
        let dropped = all.insert(Arc::clone(&node), self.limit);
        drop(all);
        drop(dropped);
        Some(node)
    }

    /// Adds a node. Returns it, or the earlier one of the same inode.
    pub(crate) fn insert(&self, node: Node) -> Arc<Node> {
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

    /// Keeps a node that this host has created, unless the host has its share of kept nodes.
    pub(crate) fn keep(&self, node: &Arc<Node>, host: Option<IpAddr>) {
        let mut all = lock(&self.generations);
        let of_host = all.kept.values().filter(|kept| kept.host == host).count();
        if all.kept.len() < self.limit && of_host < self.limit.div_ceil(HOST_SHARES) {
            all.kept.insert(node.ino(), KeptNode { node: Arc::clone(node), host, is_used: true });
        }
    }

    /// Removes the nodes of a removed file. Dropping them closes the file, which takes time if it is large.
    #[must_use]
    pub(crate) fn remove(&self, ino: u64) -> [Option<Arc<Node>>; 3] {
        let mut all = lock(&self.generations);
        [all.young.remove(&ino), all.old.remove(&ino), all.kept.remove(&ino).map(|kept| kept.node)]
    }

    /// Drops nodes that were not used since the rotation before the last.
    pub(crate) fn rotate(&self) {
        let mut all = lock(&self.generations);
        let is_unused = |_: &u64, kept: &mut KeptNode| !std::mem::replace(&mut kept.is_used, false);
        let unused: Vec<_> = all.kept.extract_if(is_unused).collect();
        let old = all.rotate();
        // The lock is released first, because closing files takes time.
        drop(all);
        drop((old, unused));
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

    fn node(ino: u64) -> Node {
        let file = openat(CWD, "/", OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap();
        let mut stat = fstat(&file).unwrap();
        stat.st_ino = ino;
        Node::new(file, FileHandle::default(), &stat)
    }

    #[test]
    fn nodes_stay_within_the_limit_even_if_all_are_used() {
        const LIMIT: usize = 10;
        let cache = NodeCache::new(9 * LIMIT);
        for ino in 0..200 {
            cache.insert(node(ino));
            assert_eq!(cache.get(ino).map(|node| node.ino()), Some(ino));
            // The client uses every file that it knows.
            (0..ino).for_each(|ino| drop(cache.get(ino)));
            let all = lock(&cache.generations);
            assert!(all.young.len() <= LIMIT && all.old.len() <= LIMIT, "{} and {}", all.young.len(), all.old.len());
        }
    }

    #[test]
    fn kept_nodes_stay_until_an_unused_rotation_whatever_others_open() {
        let cache = NodeCache::new(9 * 16);
        let host = |last| Some(IpAddr::from([192, 0, 2, last]));
        cache.keep(&cache.insert(node(1)), host(1));
        for ino in 100..200 {
            // The cache keeps only the share of the other host.
            cache.keep(&cache.insert(node(ino)), host(2));
        }
        assert_eq!(lock(&cache.generations).kept.len(), 1 + 2);
        cache.rotate();
        assert!(cache.get(1).is_some(), "used since");
        cache.rotate();
        assert!(cache.get(1).is_some());
        cache.rotate();
        cache.rotate();
        assert!(cache.get(1).is_none() && lock(&cache.generations).kept.is_empty());
    }
}
