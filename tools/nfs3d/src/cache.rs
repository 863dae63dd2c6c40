//! Recently used nodes.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use crate::lock::lock;
use crate::node::Node;

/// By inode number, in two generations. A used node moves to the young one. Each [turn](Cache::turn), and each
/// overflow, drops the old generation, and the young one becomes old. So unused files are closed soon, and removed ones
/// free their space.
#[derive(Debug)]
pub(crate) struct Cache {
    generations: Mutex<Generations>,
    /// Limit of nodes per generation.
    limit: usize,
}

#[derive(Debug, Default)]
struct Generations {
    young: HashMap<u64, Arc<Node>>,
    old: HashMap<u64, Arc<Node>>,
}

impl Cache {
    pub(crate) fn new(limit: usize) -> Self {
        Self { generations: Mutex::default(), limit: limit.max(1) }
    }

    pub(crate) fn get(&self, ino: u64) -> Option<Arc<Node>> {
        let mut all = lock(&self.generations);
        if let Some(node) = all.young.get(&ino) {
            return Some(Arc::clone(node));
        }
        let node = all.old.remove(&ino)?;
        all.young.insert(ino, Arc::clone(&node));
        Some(node)
    }

    /// Enters a node. Returns it, or the earlier one of the same inode.
    pub(crate) fn enter(&self, node: Node) -> Arc<Node> {
        if let Some(known) = self.get(node.ino())
            && known.handle() == node.handle()
        {
            return known;
        }
        let node = Arc::new(node);
        let mut all = lock(&self.generations);
        if all.young.len() >= self.limit {
            all.turn();
        }
        all.young.insert(node.ino(), Arc::clone(&node));
        node
    }

    /// Closes a removed file.
    pub(crate) fn remove(&self, ino: u64) {
        let mut all = lock(&self.generations);
        let gone = (all.young.remove(&ino), all.old.remove(&ino));
        // Closing the last descriptor of a large file takes time.
        drop(all);
        drop(gone);
    }

    /// Drops nodes unused since the turn before the last.
    pub(crate) fn turn(&self) {
        let old = lock(&self.generations).turn();
        // Without the lock: closing files takes time.
        drop(old);
    }
}

impl Generations {
    fn turn(&mut self) -> HashMap<u64, Arc<Node>> {
        std::mem::replace(&mut self.old, std::mem::take(&mut self.young))
    }
}
