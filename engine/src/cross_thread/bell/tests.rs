#[cfg(not(loom))]
mod alone {
    use crate::cross_thread::bell::Bell;
    use crate::cross_thread::parker::{Sleeper, Wake};

    #[test]
    fn it_is_found_rung_once_however_often_it_was_rung() {
        let mut sleeper = Sleeper::new(Wake::Thread);
        let bell = Bell::new(sleeper.signal());
        assert!(!bell.take());
        sleeper.arm();
        bell.ring();
        bell.ring();
        // Without the ring, this would never return.
        sleeper.park(None);
        assert!(bell.take() && !bell.take());
        bell.ring();
        assert!(bell.take());
    }
}

#[cfg(loom)]
mod models {
    use loom::sync::Arc;
    use loom::sync::atomic::{AtomicUsize, Ordering};
    use loom::thread;

    use crate::cross_thread::bell::Bell;
    use crate::cross_thread::explore;
    use crate::cross_thread::parker::{Sleeper, Wake};

    /// Each of `ringers` publishes `each` items and rings after each. The sleeper checks for items only after it takes
    /// a ring. A missed item deadlocks the model.
    fn deliver(ringers: usize, each: usize) {
        explore(move || {
            let mut sleeper = Sleeper::new(Wake::Thread);
            let bell = Arc::new(Bell::new(sleeper.signal()));
            let published: Arc<Vec<_>> = Arc::new((0..ringers).map(|_| AtomicUsize::new(0)).collect());
            let threads: Vec<_> = (0..ringers)
                .map(|ringer| {
                    let (bell, published) = (Arc::clone(&bell), Arc::clone(&published));
                    thread::spawn(move || {
                        for n in 1..=each {
                            published[ringer].store(n, Ordering::Relaxed);
                            bell.ring();
                        }
                    })
                })
                .collect();
            let sleeper = thread::spawn(move || {
                let mut seen = 0;
                while seen != ringers * each {
                    let mut look = || {
                        let rung = bell.take();
                        if rung {
                            seen = published.iter().map(|count| count.load(Ordering::Relaxed)).sum();
                        }
                        rung
                    };
                    if !look() {
                        sleeper.sleep_unless(look, None);
                    }
                }
            });
            threads.into_iter().for_each(|thread| thread.join().unwrap());
            sleeper.join().unwrap();
        });
    }

    #[test]
    fn loom_work_before_a_ring_is_seen() {
        deliver(1, 2);
    }

    #[test]
    fn loom_a_second_ring_may_skip_the_wake_up() {
        deliver(2, 1);
    }
}
