//! Who may have a thread next: work waits in a queue of its client's own, and a client may hold as many threads as it
//! leaves free. So one whose disk hangs has half of the threads at most, the next one half of the rest, and there is
//! one left for who comes then; a client alone has the same half, whatever it asks for.
#![forbid(unsafe_code)]

use std::collections::{HashMap, VecDeque};
use std::hash::Hash;

/// Work of clients `K`, for a number of threads.
#[derive(Debug)]
pub(crate) struct Shares<K, W> {
    /// Threads that nobody holds.
    free: usize,
    /// Those that hold threads, or wait for one.
    clients: HashMap<K, Client<W>>,
    /// Those that wait, each once; who has got a thread goes to the end.
    turns: VecDeque<K>,
}

#[derive(Debug)]
struct Client<W> {
    held: usize,
    waiting: VecDeque<W>,
}

impl<K: Copy + Eq + Hash, W> Shares<K, W> {
    /// Of so many threads, at least 1.
    pub(crate) fn new(threads: usize) -> Self {
        Self { free: threads, clients: HashMap::new(), turns: VecDeque::new() }
    }

    /// Work of a client: it waits, behind what that client has asked for before.
    pub(crate) fn add(&mut self, key: K, work: W) {
        let client = self.clients.entry(key).or_insert_with(|| Client { held: 0, waiting: VecDeque::new() });
        if client.waiting.is_empty() {
            self.turns.push_back(key);
        }
        client.waiting.push_back(work);
    }

    /// Drops what a client waits for and nobody needs any more.
    pub(crate) fn forget(&mut self, key: K, needless: impl Fn(&W) -> bool) {
        let Some(client) = self.clients.get_mut(&key) else { return };
        let before = client.waiting.len();
        client.waiting.retain(|work| !needless(work));
        if before == 0 || !client.waiting.is_empty() {
            return;
        }
        self.turns.retain(|waits| *waits != key);
        if client.held == 0 {
            self.clients.remove(&key);
        }
    }

    /// Gives a thread to the client whose turn it is, until [`give_back`](Self::give_back); `None` if nobody waits who
    /// may hold one more.
    pub(crate) fn take(&mut self) -> Option<(K, W)> {
        let key = self.turns.remove(self.next()?)?;
        let client = self.clients.get_mut(&key)?;
        let work = client.waiting.pop_front()?;
        client.held += 1;
        self.free -= 1;
        if !client.waiting.is_empty() {
            self.turns.push_back(key);
        }
        Some((key, work))
    }

    /// Whether there is work for one more thread.
    pub(crate) fn is_ready(&self) -> bool {
        self.next().is_some()
    }

    /// A client's thread is through with its work.
    pub(crate) fn give_back(&mut self, key: K) {
        let Some(client) = self.clients.get_mut(&key) else { return };
        client.held -= 1;
        self.free += 1;
        if client.held == 0 && client.waiting.is_empty() {
            self.clients.remove(&key);
        }
    }

    /// The first in turn that may hold one more.
    fn next(&self) -> Option<usize> {
        self.turns.iter().position(|key| self.clients.get(key).is_some_and(|client| client.held < self.free))
    }
}
