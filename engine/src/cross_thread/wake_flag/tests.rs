#[cfg(not(loom))]
mod alone {
    use crate::cross_thread::parker::{Parker, Wake};
    use crate::cross_thread::wake_flag::WakeFlag;

    #[test]
    fn a_flag_that_was_set_twice_is_taken_once() {
        let mut parker = Parker::new(Wake::Thread);
        let flag = WakeFlag::new(parker.signal());
        assert!(!flag.take());
        parker.arm();
        flag.set();
        flag.set();
        // If `set` did not wake the thread, this would never return.
        parker.park(None);
        assert!(flag.take() && !flag.take());
        flag.set();
        assert!(flag.take());
    }
}

#[cfg(loom)]
mod models {
    use loom::sync::Arc;
    use loom::sync::atomic::{AtomicUsize, Ordering};
    use loom::thread;

    use crate::cross_thread::explore;
    use crate::cross_thread::parker::{Parker, Wake};
    use crate::cross_thread::wake_flag::WakeFlag;

    /// Each of `setters` publishes `each` items and sets the flag after each. The polling thread checks for items only
    /// after it has taken the flag. A missed item deadlocks the model.
    fn deliver(setters: usize, each: usize) {
        explore(move || {
            let mut parker = Parker::new(Wake::Thread);
            let flag = Arc::new(WakeFlag::new(parker.signal()));
            let published: Arc<Vec<_>> = Arc::new((0..setters).map(|_| AtomicUsize::new(0)).collect());
            let threads: Vec<_> = (0..setters)
                .map(|setter| {
                    let (flag, published) = (Arc::clone(&flag), Arc::clone(&published));
                    thread::spawn(move || {
                        for n in 1..=each {
                            published[setter].store(n, Ordering::Relaxed);
                            flag.set();
                        }
                    })
                })
                .collect();
            let poller = thread::spawn(move || {
                let mut observed = 0;
                while observed != setters * each {
                    let mut check = || {
                        let was_set = flag.take();
                        if was_set {
                            observed = published.iter().map(|count| count.load(Ordering::Relaxed)).sum();
                        }
                        was_set
                    };
                    if !check() {
                        parker.sleep_unless(check, None);
                    }
                }
            });
            threads.into_iter().for_each(|thread| thread.join().unwrap());
            poller.join().unwrap();
        });
    }

    #[test]
    fn loom_work_published_before_a_set_is_seen() {
        deliver(1, 2);
    }

    #[test]
    fn loom_a_second_set_may_skip_the_wake_up() {
        deliver(2, 1);
    }
}
