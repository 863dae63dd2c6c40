//! Distribution of connections among the fabrics that share an address. The fabric with the fewest gets each one,
//! whichever has seen it first.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::Waker;

/// The fabrics that listen at one address. `T` is a connection request.
#[derive(Debug)]
pub(crate) struct Seats<T>(Mutex<Vec<Arc<Place<T>>>>);

impl<T> Default for Seats<T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

/// The shared state of one fabric.
#[derive(Debug)]
struct Place<T> {
    /// Connections that it has, requests included.
    taken: Arc<AtomicUsize>,
    /// Connections that other fabrics have accepted.
    handed: Mutex<VecDeque<Arrival<T>>>,
    waker: Waker,
}

/// A new connection, counted at its destination.
#[derive(Debug)]
pub(crate) struct Arrival<T> {
    pub(crate) who: T,
    pub(crate) taken: Taken,
}

/// Counts one connection until it is dropped.
#[derive(Debug)]
pub(crate) struct Taken(Arc<AtomicUsize>);

impl Taken {
    fn new<T>(place: &Place<T>) -> Self {
        // It counts, and orders nothing.
        place.taken.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(&place.taken))
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A fabric's place among the listening ones, until it is dropped.
#[derive(Debug)]
pub(crate) struct Seat<T> {
    seats: Arc<Seats<T>>,
    place: Arc<Place<T>>,
}

impl<T> Seat<T> {
    /// One more, which `waker` wakes.
    pub(crate) fn new(seats: &Arc<Seats<T>>, waker: Waker) -> Self {
        let place = Arc::new(Place { taken: Arc::default(), handed: Mutex::default(), waker });
        lock(&seats.0).push(Arc::clone(&place));
        Self { seats: Arc::clone(seats), place }
    }

    /// Places a connection seen by this fabric, on itself or another. It is returned if it is its own. Each keeps at
    /// most `most` of them.
    pub(crate) fn place(&self, who: T, most: usize) -> Option<Arrival<T>> {
        let (place, taken) = {
            // The lock is held until it is counted: of two that choose at a time, the second sees the first.
            let all = lock(&self.seats.0);
            let others = all.iter().filter(|place| lock(&place.handed).len() < most);
            let fewest = others.min_by_key(|place| {
                let own = Arc::ptr_eq(place, &self.place);
                (place.taken.load(Ordering::Relaxed), !own)
            });
            let place = fewest.unwrap_or(&self.place);
            (Arc::clone(place), Taken::new(place))
        };
        let arrival = Arrival { who, taken };
        if Arc::ptr_eq(&place, &self.place) {
            return Some(arrival);
        }
        place.hand(arrival);
        None
    }

    /// Others have handed connections to this fabric.
    #[cfg(feature = "verbs")]
    pub(crate) fn has_handed(&self) -> bool {
        !lock(&self.place.handed).is_empty()
    }

    /// The connections that others have handed to this fabric.
    pub(crate) fn handed(&self) -> VecDeque<Arrival<T>> {
        std::mem::take(&mut lock(&self.place.handed))
    }
}

impl<T> Drop for Seat<T> {
    fn drop(&mut self) {
        let mut all = lock(&self.seats.0);
        all.retain(|place| !Arc::ptr_eq(place, &self.place));
        for Arrival { who, taken } in self.handed() {
            // Without another, the peer sees that the listener is closed.
            if let Some(next) = all.iter().min_by_key(|place| place.taken.load(Ordering::Relaxed)) {
                drop(taken);
                next.hand(Arrival { who, taken: Taken::new(next) });
            }
        }
    }
}

impl<T> Place<T> {
    /// Gives it a connection that is counted here.
    fn hand(&self, arrival: Arrival<T>) {
        lock(&self.handed).push_back(arrival);
        self.waker.wake();
    }
}

/// A panic of another thread has left the list whole.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
