use rpcrdma_mempool::sync::{Arc, AtomicUsize, Ordering};

use super::{Link, Linked, ReturnQueue};

/// A box that counts its drops.
struct Item {
    number: u32,
    link: Link<Self>,
    dropped: Arc<AtomicUsize>,
}

impl Linked for Item {
    fn link(&mut self) -> &mut Link<Self> {
        &mut self.link
    }
}

impl Drop for Item {
    fn drop(&mut self) {
        self.dropped.fetch_add(1, Ordering::Relaxed);
    }
}

fn item(number: u32, dropped: &Arc<AtomicUsize>) -> Box<Item> {
    Box::new(Item { number, link: Link::default(), dropped: Arc::clone(dropped) })
}

fn numbers(queue: &mut ReturnQueue<Item>) -> Vec<u32> {
    queue.drain().map(|item| item.number).collect()
}

#[cfg(not(loom))]
mod alone {
    use super::*;

    #[test]
    fn boxes_are_taken_in_the_order_of_their_return() {
        let dropped = Arc::default();
        let mut queue = ReturnQueue::new();
        let handle = queue.handle();
        assert!(queue.is_empty() && numbers(&mut queue).is_empty());
        for round in 0..3 {
            for number in 0..round {
                assert!(handle.push(item(number, &dropped)).is_ok());
            }
            assert_eq!(queue.is_empty(), round == 0);
            assert_eq!(numbers(&mut queue), (0..round).collect::<Vec<_>>());
            assert!(queue.is_empty());
        }
        assert_eq!(dropped.load(Ordering::Relaxed), 3);
    }

    #[test]
    fn a_taken_box_can_be_returned_again() {
        let dropped = Arc::default();
        let mut queue = ReturnQueue::new();
        let (first, second) = (item(1, &dropped), item(2, &dropped));
        assert!(queue.handle().push(first).is_ok() && queue.handle().push(second).is_ok());
        for item in queue.drain() {
            assert!(queue.handle().push(item).is_ok());
        }
        assert_eq!(numbers(&mut queue), [1, 2]);
    }

    #[test]
    fn boxes_that_are_never_taken_are_dropped_once() {
        let dropped = Arc::default();
        let mut queue = ReturnQueue::new();
        let handle = queue.handle();
        for number in 0..4 {
            assert!(handle.push(item(number, &dropped)).is_ok());
        }
        // `drain` takes the whole list, but the test takes only one box of it.
        assert_eq!(queue.drain().next().map(|item| item.number), Some(0));
        assert_eq!(dropped.load(Ordering::Relaxed), 4);
        assert!(handle.push(item(4, &dropped)).is_ok());
        assert_eq!(queue.close().map(|item| item.number).collect::<Vec<_>>(), [4]);
        drop(queue);
        assert_eq!(dropped.load(Ordering::Relaxed), 5);
        assert_eq!(handle.push(item(5, &dropped)).map_err(|item| item.number), Err(5));
        assert_eq!(dropped.load(Ordering::Relaxed), 6);
    }
}

#[cfg(loom)]
mod models {
    use loom::thread;

    use super::*;
    use crate::cross_thread::explore;
    use crate::cross_thread::parker::{Parker, Wake};

    #[test]
    fn loom_boxes_of_two_threads_are_taken_once_and_in_order() {
        explore(|| {
            let dropped = Arc::new(AtomicUsize::new(0));
            let mut queue = ReturnQueue::new();
            let producers = [0, 10].map(|first| {
                let (handle, dropped) = (queue.handle(), Arc::clone(&dropped));
                thread::spawn(move || {
                    for number in first..first + 2 {
                        assert!(handle.push(item(number, &dropped)).is_ok());
                    }
                })
            });
            let mut taken = numbers(&mut queue);
            for producer in producers {
                producer.join().unwrap();
            }
            taken.extend(numbers(&mut queue));
            let numbers_from = |first| taken.iter().copied().filter(move |number| (first..first + 2).contains(number));
            assert!(numbers_from(0).eq([0, 1]) && numbers_from(10).eq([10, 11]), "{taken:?}");
            assert_eq!((taken.len(), dropped.load(Ordering::Relaxed)), (4, 4));
        });
    }

    #[test]
    fn loom_a_box_returned_to_a_closing_queue_is_dropped_once() {
        explore(|| {
            let dropped = Arc::new(AtomicUsize::new(0));
            let queue = ReturnQueue::new();
            let producer = {
                let (handle, dropped) = (queue.handle(), Arc::clone(&dropped));
                thread::spawn(move || (0..2).filter(|&number| handle.push(item(number, &dropped)).is_ok()).count())
            };
            drop(queue);
            assert!(producer.join().unwrap() <= 2);
            assert_eq!(dropped.load(Ordering::Relaxed), 2);
        });
    }

    /// The producers notify after the return, and the taker checks once more after arming, so that one of them sees the
    /// other's write. A missed box deadlocks the model.
    #[test]
    fn loom_a_returned_box_wakes_the_taker() {
        explore(|| {
            let dropped = Arc::new(AtomicUsize::new(0));
            let mut queue = ReturnQueue::new();
            let mut parker = Parker::new(Wake::Thread);
            let producers = [0, 1].map(|number| {
                let (handle, signal, dropped) = (queue.handle(), parker.signal(), Arc::clone(&dropped));
                thread::spawn(move || {
                    assert!(handle.push(item(number, &dropped)).is_ok());
                    signal.notify();
                })
            });
            let taker = thread::spawn(move || {
                let mut taken = 0;
                while taken < 2 {
                    match numbers(&mut queue).len() {
                        0 => parker.sleep_unless(|| !queue.is_empty(), None),
                        count => taken += count,
                    }
                }
            });
            producers.into_iter().for_each(|producer| producer.join().unwrap());
            taker.join().unwrap();
            assert_eq!(dropped.load(Ordering::Relaxed), 2);
        });
    }
}
