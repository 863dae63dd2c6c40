//! Distribution of connections among the fabrics that share an address. Each connection goes to the fabric with the
//! fewest, whichever fabric has accepted it.

#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use crate::{Waker, lock};

/// The fabrics that listen at one address. `T` is a connection request.
#[derive(Debug)]
pub(crate) struct AcceptBalancer<T>(Mutex<Vec<Arc<Load<T>>>>);

impl<T> Default for AcceptBalancer<T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

/// The load of one fabric, which the others read.
#[derive(Debug)]
struct Load<T> {
    /// The load is the number of clones: each connection or connect request of the fabric holds one.
    connections: ConnectionCount,
    /// Connections that other fabrics have accepted for this one.
    handed_over: Mutex<VecDeque<Accepted<T>>>,
    waker: Waker,
}

/// A new connection, counted at its fabric.
#[derive(Debug)]
pub(crate) struct Accepted<T> {
    pub(crate) request: T,
    pub(crate) count: ConnectionCount,
}

/// Counts one connection of a fabric until it is dropped.
pub(crate) type ConnectionCount = Arc<()>;

/// One fabric's membership in a balancer, which ends when this value is dropped.
#[derive(Debug)]
pub(crate) struct BalancerMember<T> {
    balancer: Arc<AcceptBalancer<T>>,
    own: Arc<Load<T>>,
}

impl<T> BalancerMember<T> {
    /// Adds a fabric, which `waker` wakes.
    pub(crate) fn new(balancer: &Arc<AcceptBalancer<T>>, waker: Waker) -> Self {
        let own = Arc::new(Load { connections: Arc::default(), handed_over: Mutex::default(), waker });
        lock(&balancer.0).push(Arc::clone(&own));
        Self { balancer: Arc::clone(balancer), own }
    }

    /// Assigns a connection that this fabric has accepted, and returns it if this fabric keeps it. A fabric for
    /// which `max_waiting` handed-over connections already wait gets no further one.
    pub(crate) fn assign(&self, request: T, max_waiting: usize) -> Option<Accepted<T>> {
        // The lock is held until the connection is counted, so that a concurrent call sees the new count.
        let all = lock(&self.balancer.0);
        // If several fabrics have the fewest connections, this one is preferred.
        let candidates = all.iter().filter(|load| lock(&load.handed_over).len() < max_waiting);
        let fewest =
            candidates.min_by_key(|load| (Arc::strong_count(&load.connections), !Arc::ptr_eq(load, &self.own)));
        let load = Arc::clone(fewest.unwrap_or(&self.own));
        let accepted = Accepted { request, count: Arc::clone(&load.connections) };
        drop(all);
        if Arc::ptr_eq(&load, &self.own) {
            return Some(accepted);
        }
        load.hand_over(accepted);
        None
    }

    /// Whether other fabrics have handed connections over to this one.
    #[cfg(feature = "verbs")]
    pub(crate) fn has_handed_over(&self) -> bool {
        !lock(&self.own.handed_over).is_empty()
    }

    /// Takes the connections that other fabrics have handed over to this one.
    pub(crate) fn take_handed_over(&self) -> VecDeque<Accepted<T>> {
        std::mem::take(&mut lock(&self.own.handed_over))
    }
}

impl<T> Drop for BalancerMember<T> {
    fn drop(&mut self) {
        let mut all = lock(&self.balancer.0);
        all.retain(|load| !Arc::ptr_eq(load, &self.own));
        for Accepted { request, .. } in self.take_handed_over() {
            // Without another fabric, the peer sees that the listener is closed.
            if let Some(next) = all.iter().min_by_key(|load| Arc::strong_count(&load.connections)) {
                next.hand_over(Accepted { request, count: Arc::clone(&next.connections) });
            }
        }
    }
}

impl<T> Load<T> {
    /// Hands a connection, which this fabric's load already counts, over to this fabric.
    fn hand_over(&self, accepted: Accepted<T>) {
        lock(&self.handed_over).push_back(accepted);
        self.waker.wake();
    }
}
