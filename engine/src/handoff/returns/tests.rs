use rpcrdma_mempool::sync::{Arc, AtomicUsize, Ordering};

use super::{Home, Link, Linked};

/// A box that counts its drops.
struct Thing {
    number: u32,
    link: Link<Self>,
    dropped: Arc<AtomicUsize>,
}

impl Linked for Thing {
    fn link(&mut self) -> &mut Link<Self> {
        &mut self.link
    }
}

impl Drop for Thing {
    fn drop(&mut self) {
        self.dropped.fetch_add(1, Ordering::Relaxed);
    }
}

fn thing(number: u32, dropped: &Arc<AtomicUsize>) -> Box<Thing> {
    Box::new(Thing { number, link: Link::default(), dropped: Arc::clone(dropped) })
}

fn numbers(home: &mut Home<Thing>) -> Vec<u32> {
    home.take().map(|thing| thing.number).collect()
}

#[cfg(not(loom))]
mod alone {
    use super::*;

    #[test]
    fn they_come_in_the_order_in_which_they_were_given_back() {
        let dropped = Arc::default();
        let mut home = Home::new();
        let way = home.way();
        assert!(home.is_empty() && numbers(&mut home).is_empty());
        for round in 0..3 {
            for number in 0..round {
                assert!(way.give_back(thing(number, &dropped)).is_ok());
            }
            assert_eq!(home.is_empty(), round == 0);
            assert_eq!(numbers(&mut home), (0..round).collect::<Vec<_>>());
            assert!(home.is_empty());
        }
        assert_eq!(dropped.load(Ordering::Relaxed), 3);
    }

    #[test]
    fn one_that_came_may_go_out_again() {
        let dropped = Arc::default();
        let mut home = Home::new();
        let (first, second) = (thing(1, &dropped), thing(2, &dropped));
        assert!(home.way().give_back(first).is_ok() && home.way().give_back(second).is_ok());
        for thing in home.take() {
            assert!(home.way().give_back(thing).is_ok());
        }
        assert_eq!(numbers(&mut home), [1, 2]);
    }

    #[test]
    fn nothing_is_lost_where_nobody_takes_it() {
        let dropped = Arc::default();
        let mut home = Home::new();
        let way = home.way();
        for number in 0..4 {
            assert!(way.give_back(thing(number, &dropped)).is_ok());
        }
        // Takes the list, and looks at one box.
        assert_eq!(home.take().next().map(|thing| thing.number), Some(0));
        assert_eq!(dropped.load(Ordering::Relaxed), 4);
        assert!(way.give_back(thing(4, &dropped)).is_ok());
        drop(home);
        assert_eq!(dropped.load(Ordering::Relaxed), 5);
        assert_eq!(way.give_back(thing(5, &dropped)).map_err(|thing| thing.number), Err(5));
        assert_eq!(dropped.load(Ordering::Relaxed), 6);
    }
}

#[cfg(loom)]
mod models {
    use loom::thread;

    use super::*;
    use crate::handoff::explore;
    use crate::handoff::parker::{Sleeper, Wake};

    #[test]
    fn loom_boxes_of_two_threads_return_once_and_in_order() {
        explore(|| {
            let dropped = Arc::new(AtomicUsize::new(0));
            let mut home = Home::new();
            let givers = [0, 10].map(|first| {
                let (way, dropped) = (home.way(), Arc::clone(&dropped));
                thread::spawn(move || {
                    for number in first..first + 2 {
                        assert!(way.give_back(thing(number, &dropped)).is_ok());
                    }
                })
            });
            let mut came = numbers(&mut home);
            for giver in givers {
                giver.join().unwrap();
            }
            came.extend(numbers(&mut home));
            let of = |first| came.iter().copied().filter(move |number| (first..first + 2).contains(number));
            assert!(of(0).eq([0, 1]) && of(10).eq([10, 11]), "{came:?}");
            assert_eq!((came.len(), dropped.load(Ordering::Relaxed)), (4, 4));
        });
    }

    #[test]
    fn loom_a_box_for_a_closing_home_is_dropped_once() {
        explore(|| {
            let dropped = Arc::new(AtomicUsize::new(0));
            let home = Home::new();
            let giver = {
                let (way, dropped) = (home.way(), Arc::clone(&dropped));
                thread::spawn(move || (0..2).filter(|&number| way.give_back(thing(number, &dropped)).is_ok()).count())
            };
            drop(home);
            assert!(giver.join().unwrap() <= 2);
            assert_eq!(dropped.load(Ordering::Relaxed), 2);
        });
    }

    /// The giver notifies, and the sleeper checks once more after arming: one of the two sees the other. A missed box
    /// deadlocks the model.
    #[test]
    fn loom_a_returned_box_wakes_the_sleeper() {
        explore(|| {
            let dropped = Arc::new(AtomicUsize::new(0));
            let mut home = Home::new();
            let mut sleeper = Sleeper::new(Wake::Thread);
            let givers = [0, 1].map(|number| {
                let (way, signal, dropped) = (home.way(), sleeper.signal(), Arc::clone(&dropped));
                thread::spawn(move || {
                    assert!(way.give_back(thing(number, &dropped)).is_ok());
                    signal.notify();
                })
            });
            let taker = thread::spawn(move || {
                let mut came = 0;
                while came < 2 {
                    match numbers(&mut home).len() {
                        0 => sleeper.sleep_unless(|| !home.is_empty(), None),
                        more => came += more,
                    }
                }
            });
            givers.into_iter().for_each(|giver| giver.join().unwrap());
            taker.join().unwrap();
            assert_eq!(dropped.load(Ordering::Relaxed), 2);
        });
    }
}
