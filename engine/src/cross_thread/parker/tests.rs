#[cfg(not(loom))]
mod real {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use rustix::event::{EventfdFlags, eventfd};

    use crate::cross_thread::parker::{Parker, Wake};
    use crate::fabric::Waker;

    #[test]
    fn a_sleeping_thread_wakes_for_each_item() {
        const ITEMS: usize = if cfg!(miri) { 50 } else { 2_000 };
        let mut parker = Parker::new(Wake::Thread);
        let (signal, items) = (parker.signal(), Arc::new(AtomicUsize::new(0)));
        let received = Arc::new(AtomicUsize::new(0));
        let thread = {
            let (items, received) = (Arc::clone(&items), Arc::clone(&received));
            std::thread::spawn(move || {
                for n in 1..=ITEMS {
                    while items.load(Ordering::Acquire) < n {
                        parker.sleep_unless(|| items.load(Ordering::Acquire) >= n, None);
                    }
                    received.store(n, Ordering::Release);
                }
            })
        };
        for n in 1..=ITEMS {
            items.store(n, Ordering::Release);
            signal.notify();
            // The items are published one at a time, so a lost wake-up would hang the test here.
            while received.load(Ordering::Acquire) < n {
                std::thread::yield_now();
            }
        }
        thread.join().unwrap();
    }

    #[test]
    fn a_sleep_ends_at_its_timeout() {
        let mut parker = Parker::new(Wake::Thread);
        parker.sleep_unless(|| false, Some(Duration::from_millis(1)));
        assert!(!parker.shared.sleeping.load(Ordering::Relaxed));
        parker.sleep_unless(|| true, None);
        assert!(!parker.shared.sleeping.load(Ordering::Relaxed), "work was found, so it did not sleep");
    }

    #[test]
    fn a_notification_before_the_sleep_is_not_lost() {
        let mut parker = Parker::new(Wake::Thread);
        parker.arm();
        parker.signal().notify();
        // If the notification were lost, this would never return.
        parker.park(None);
    }

    #[test]
    fn a_fabric_is_woken_once_for_each_sleep_and_never_while_awake() {
        let fd = Arc::new(eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).unwrap());
        let wakes = || {
            let mut count = [0; 8];
            rustix::io::read(&*fd, &mut count).map_or(0, |_| u64::from_ne_bytes(count))
        };
        let mut parker = Parker::new(Wake::Fabric(Waker::new(Arc::clone(&fd))));
        let signal = parker.signal();
        signal.notify();
        assert_eq!(wakes(), 0, "awake: no system call");
        parker.arm();
        signal.notify();
        signal.clone().notify();
        assert_eq!(wakes(), 1);
        parker.disarm();
        signal.notify();
        assert_eq!(wakes(), 0);
        parker.arm();
        // With `Wake::Fabric` the thread would sleep in its fabric, so `park` only disarms, and returns immediately.
        parker.park(None);
        signal.notify();
        assert_eq!(wakes(), 0);
    }
}

#[cfg(loom)]
mod model {
    use loom::sync::Arc;
    use loom::sync::atomic::{AtomicUsize, Ordering};
    use loom::thread;

    use crate::cross_thread::explore;
    use crate::cross_thread::parker::{Parker, Wake};

    /// One thread waits for all items; each of `notifiers` sends `each` of them. A lost wake-up deadlocks the model.
    ///
    /// The waiting thread is a separate one that blocks only in its sleep, because in loom a late `unpark` would end
    /// any other wait, too.
    fn deliver(notifiers: usize, each: usize) {
        explore(move || {
            let mut parker = Parker::new(Wake::Thread);
            let items = Arc::new(AtomicUsize::new(0));
            let threads: Vec<_> = (0..notifiers)
                .map(|_| {
                    let (signal, items) = (parker.signal(), Arc::clone(&items));
                    thread::spawn(move || {
                        for _ in 0..each {
                            // The ordering is the weakest, so that only the fences order the item.
                            items.fetch_add(1, Ordering::Relaxed);
                            signal.notify();
                        }
                    })
                })
                .collect();
            let parker = thread::spawn(move || {
                let all = notifiers * each;
                loop {
                    let before = items.load(Ordering::Relaxed);
                    if before == all {
                        break;
                    }
                    parker.sleep_unless(|| items.load(Ordering::Relaxed) != before, None);
                }
            });
            threads.into_iter().for_each(|thread| thread.join().unwrap());
            parker.join().unwrap();
        });
    }

    #[test]
    fn loom_no_wake_up_is_lost() {
        deliver(1, 2);
    }

    #[test]
    fn loom_two_notifiers_wake_one_thread() {
        deliver(2, 1);
    }
}
