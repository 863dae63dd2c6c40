//! The nodes that were used lately.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::node::Node;

/// By inode number. There are two generations: what is used moves to the young one; at each
/// [turn](Cache::turn), and when there are too many, the old one goes and the young one becomes old. So a
/// file that nobody uses is soon closed, and its space free if it was removed behind the server's back.
#[derive(Debug)]
pub(crate) struct Cache {
    generations: Mutex<Generations>,
    /// Most nodes of one generation.
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

    fn generations(&self) -> MutexGuard<'_, Generations> {
        self.generations.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn get(&self, ino: u64) -> Option<Arc<Node>> {
        let mut all = self.generations();
        if let Some(node) = all.young.get(&ino) {
            return Some(Arc::clone(node));
        }
        let node = all.old.remove(&ino)?;
        all.young.insert(ino, Arc::clone(&node));
        Some(node)
    }

    /// Enters a node, and gives back what is to be used: it, or the one of the same inode that was there
    /// first.
    pub(crate) fn enter(&self, node: Node) -> Arc<Node> {
        if let Some(known) = self.get(node.ino())
            && known.handle() == node.handle()
        {
            return known;
        }
        let node = Arc::new(node);
        let mut all = self.generations();
        if all.young.len() >= self.limit {
            all.turn();
        }
        all.young.insert(node.ino(), Arc::clone(&node));
        node
    }

    /// Closes a file that is gone.
    pub(crate) fn remove(&self, ino: u64) {
        let mut all = self.generations();
        let gone = (all.young.remove(&ino), all.old.remove(&ino));
        // To close the last descriptor of a large file takes its time.
        drop(all);
        drop(gone);
    }

    /// Forgets what was not used since the turn before the last.
    pub(crate) fn turn(&self) {
        let old = {
            let mut all = self.generations();
            all.turn()
        };
        drop(old);
    }
}

impl Generations {
    fn turn(&mut self) -> HashMap<u64, Arc<Node>> {
        std::mem::replace(&mut self.old, std::mem::take(&mut self.young))
    }
}
