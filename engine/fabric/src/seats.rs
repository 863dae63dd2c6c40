//! Which of the fabrics that share a bound address takes a connection: of all the one with the fewest, whoever
//! has seen it first.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fd::OwnedFd;

use super::address::Peer;
use crate::Waker;

/// The fabrics that listen at one address.
#[derive(Debug, Default)]
pub(super) struct Seats(Mutex<Vec<Arc<Place>>>);

/// What the others know of one of them.
#[derive(Debug)]
struct Place {
    /// Connections that it has, requests included.
    taken: AtomicUsize,
    /// Those that others have seen first.
    handed: Mutex<VecDeque<Arrival>>,
    waker: Waker,
}

/// A connection that was just accepted, and is counted where it goes.
#[derive(Debug)]
pub(super) struct Arrival {
    pub(super) socket: OwnedFd,
    pub(super) peer: Peer,
    pub(super) taken: Taken,
}

/// Counts one connection until it is dropped.
#[derive(Debug)]
pub(super) struct Taken(Arc<Place>);

impl Taken {
    fn new(place: &Arc<Place>) -> Self {
        // It counts, and orders nothing.
        place.taken.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(place))
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.0.taken.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A fabric's own place among those that listen, until it is dropped.
#[derive(Debug)]
pub(super) struct Seat {
    seats: Arc<Seats>,
    place: Arc<Place>,
}

impl Seat {
    /// One more, which `waker` wakes.
    pub(super) fn new(seats: &Arc<Seats>, waker: Waker) -> Self {
        let place = Arc::new(Place { taken: AtomicUsize::new(0), handed: Mutex::default(), waker });
        lock(&seats.0).push(Arc::clone(&place));
        Self { seats: Arc::clone(seats), place }
    }

    /// A connection that this fabric has seen first: given back if it is its own, else handed to another, of
    /// which each keeps at most so many.
    pub(super) fn place(&self, socket: OwnedFd, peer: Peer, most: usize) -> Option<Arrival> {
        let taken = {
            // The lock is held until it is counted: of two that choose at a time, the second sees the first.
            let all = lock(&self.seats.0);
            let others = all.iter().filter(|place| lock(&place.handed).len() < most);
            let fewest = others.min_by_key(|place| {
                let own = Arc::ptr_eq(place, &self.place);
                (place.taken.load(Ordering::Relaxed), !own)
            });
            Taken::new(fewest.unwrap_or(&self.place))
        };
        let arrival = Arrival { socket, peer, taken };
        if Arc::ptr_eq(&arrival.taken.0, &self.place) {
            return Some(arrival);
        }
        hand(arrival);
        None
    }

    /// The connections that others have handed to this fabric.
    pub(super) fn handed(&self) -> VecDeque<Arrival> {
        std::mem::take(&mut lock(&self.place.handed))
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut all = lock(&self.seats.0);
        all.retain(|place| !Arc::ptr_eq(place, &self.place));
        for Arrival { socket, peer, taken } in self.handed() {
            // Without another, the peer sees that nobody listens any more.
            if let Some(next) = all.iter().min_by_key(|place| place.taken.load(Ordering::Relaxed)) {
                drop(taken);
                hand(Arrival { socket, peer, taken: Taken::new(next) });
            }
        }
    }
}

/// Gives a connection to the fabric that it is counted at.
fn hand(arrival: Arrival) {
    let place = Arc::clone(&arrival.taken.0);
    lock(&place.handed).push_back(arrival);
    place.waker.wake();
}

/// A panic of another thread has left the list whole.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
