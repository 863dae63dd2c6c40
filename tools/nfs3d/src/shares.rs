//! Shares of threads. Each client has its own queue, and may hold as many threads as it leaves free. So a client with a
//! stalled disk holds at most half, the next one half of the rest, and one stays free for new clients. A single client
//! has the same half.
#![forbid(unsafe_code)]

use std::collections::{HashMap, VecDeque};
use std::hash::Hash;

/// Queued work of clients `K`, for a number of threads.
#[derive(Debug)]
pub(crate) struct Shares<K, W> {
    /// Free threads.
    pub(super) free: usize,
    /// Clients that hold or await threads.
    pub(super) clients: HashMap<K, Client<W>>,
    /// Waiting clients, each once, in round-robin order.
    turns: VecDeque<K>,
}

/// Work of one client.
#[derive(Debug)]
pub(super) struct Client<W> {
    /// Threads that it holds.
    pub(super) held: usize,
    /// Its queued work, oldest first.
    pub(super) waiting: VecDeque<W>,
}

impl<K: Clone + Eq + Hash, W> Shares<K, W> {
    /// For this many threads, at least 1.
    pub(crate) fn new(threads: usize) -> Self {
        Self { free: threads, clients: HashMap::new(), turns: VecDeque::new() }
    }

    /// Queues work behind the client's earlier work.
    pub(crate) fn add(&mut self, key: K, work: W) {
        let client = self.clients.entry(key.clone()).or_insert_with(|| Client { held: 0, waiting: VecDeque::new() });
        if client.waiting.is_empty() {
            self.turns.push_back(key);
        }
        client.waiting.push_back(work);
    }

    /// Keeps the queued work of a client that `keep` returns.
    pub(crate) fn retain(&mut self, key: &K, keep: impl FnMut(W) -> Option<W>) {
        let Some(client) = self.clients.get_mut(key) else { return };
        let before = client.waiting.len();
        client.waiting = std::mem::take(&mut client.waiting).into_iter().filter_map(keep).collect();
        if before == 0 || !client.waiting.is_empty() {
            return;
        }
        self.turns.retain(|waits| waits != key);
        if client.held == 0 {
            self.clients.remove(key);
        }
    }

    /// Assigns a thread to the next admitted client, until [`give_back`](Self::give_back); `None` if there is none.
    pub(crate) fn take(&mut self) -> Option<(K, W)> {
        let key = self.turns.remove(self.next()?)?;
        let client = self.clients.get_mut(&key)?;
        let work = client.waiting.pop_front()?;
        client.held += 1;
        self.free -= 1;
        if !client.waiting.is_empty() {
            self.turns.push_back(key.clone());
        }
        Some((key, work))
    }

    /// True if another thread has work.
    pub(crate) fn is_ready(&self) -> bool {
        self.next().is_some()
    }

    /// Returns a client's thread.
    pub(crate) fn give_back(&mut self, key: &K) {
        let Some(client) = self.clients.get_mut(key) else { return };
        client.held -= 1;
        self.free += 1;
        if client.held == 0 && client.waiting.is_empty() {
            self.clients.remove(key);
        }
    }

    /// The next admitted client.
    fn next(&self) -> Option<usize> {
        self.turns.iter().position(|key| self.clients.get(key).is_some_and(|client| client.held < self.free))
    }
}
