//! Shares of threads between clients.
//!
//! Each client has its own queue, and may hold as many threads as it leaves free. A client with a stalled disk
//! therefore holds at most half of the threads, the next one half of the rest, and one thread stays free for new
//! clients. A single client also gets only half.
#![forbid(unsafe_code)]

use std::collections::{HashMap, VecDeque};
use std::hash::Hash;

/// Queued work of clients `K`, for a number of threads.
#[derive(Debug)]
pub(crate) struct Shares<K, W> {
    /// Free threads.
    pub(super) free: usize,
    /// Clients that hold or await threads.
    pub(super) clients: HashMap<K, ClientQueue<W>>,
    /// Clients with waiting work, each once, in round-robin order.
    queue: VecDeque<K>,
}

/// Work of one client.
#[derive(Debug)]
pub(super) struct ClientQueue<W> {
    /// Threads that the client holds.
    pub(super) threads: usize,
    /// The client's queued work, oldest first.
    pub(super) waiting: VecDeque<W>,
}

impl<K: Clone + Eq + Hash, W> Shares<K, W> {
    /// Creates the shares of `threads` threads, at least 1.
    pub(crate) fn new(threads: usize) -> Self {
        Self { free: threads, clients: HashMap::new(), queue: VecDeque::new() }
    }

    /// Queues work behind the client's earlier work.
    pub(crate) fn push(&mut self, key: K, work: W) {
        let client =
            self.clients.entry(key.clone()).or_insert_with(|| ClientQueue { threads: 0, waiting: VecDeque::new() });
        if client.waiting.is_empty() {
            self.queue.push_back(key);
        }
        client.waiting.push_back(work);
    }

    /// Passes each queued item of a client to `keep`, and queues the returned work instead.
    pub(crate) fn retain(&mut self, key: &K, keep: impl FnMut(W) -> Option<W>) {
        let Some(client) = self.clients.get_mut(key) else { return };
        let before = client.waiting.len();
        client.waiting = std::mem::take(&mut client.waiting).into_iter().filter_map(keep).collect();
        if before == 0 || !client.waiting.is_empty() {
            return;
        }
        self.queue.retain(|queued| queued != key);
        if client.threads == 0 {
            self.clients.remove(key);
        }
    }

    /// Assigns a thread to the next admitted client, until [`release`](Self::release); `None` if there is none.
    pub(crate) fn assign(&mut self) -> Option<(K, W)> {
        let key = self.queue.remove(self.next_admitted()?)?;
        let client = self.clients.get_mut(&key)?;
        let work = client.waiting.pop_front()?;
        client.threads += 1;
        self.free -= 1;
        if !client.waiting.is_empty() {
            self.queue.push_back(key.clone());
        }
        Some((key, work))
    }

    /// True if there is work for another thread.
    pub(crate) fn is_ready(&self) -> bool {
        self.next_admitted().is_some()
    }

    /// Takes back a thread from a client.
    pub(crate) fn release(&mut self, key: &K) {
        let Some(client) = self.clients.get_mut(key) else { return };
        client.threads -= 1;
        self.free += 1;
        if client.threads == 0 && client.waiting.is_empty() {
            self.clients.remove(key);
        }
    }

    /// Position of the next admitted client in the queue.
    fn next_admitted(&self) -> Option<usize> {
        self.queue.iter().position(|key| self.clients.get(key).is_some_and(|client| client.threads < self.free))
    }
}
