#[cfg(not(loom))]
mod real {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use crate::cross_thread::idle::{Idle, IdlePolicy, IdleStep};
    use crate::cross_thread::mailbox::{ALWAYS_POLLED, Connector, IDLE_AFTER, Mailbox, SendError};
    use crate::cross_thread::parker::{Parker, Wake};
    use crate::cross_thread::slot::{Completer, Disconnected, SlotTable};

    fn mailbox<T: Send>() -> (Mailbox<T>, Connector<T>) {
        let mailbox = Mailbox::new(Parker::new(Wake::Thread).signal());
        let connector = mailbox.connector();
        (mailbox, connector)
    }

    fn poll<T: Send>(mailbox: &mut Mailbox<T>, max: usize) -> Vec<T> {
        let mut items = Vec::new();
        let count = mailbox.poll(max, |item| items.push(item));
        assert_eq!(count, items.len());
        items
    }

    #[test]
    fn a_poll_is_bounded_and_a_busy_sender_does_not_starve_others() {
        let (mut mailbox, connector) = mailbox();
        let mut flood = connector.connect(256);
        let mut quiet = connector.clone().connect(4);
        assert!(!mailbox.has_work(), "a mailbox without items has no work");
        (0..200).for_each(|_| flood.send('f').unwrap());
        quiet.send('q').unwrap();
        assert!(mailbox.has_work(), "a new ring is work");
        let first = poll(&mut mailbox, 24);
        assert_eq!((mailbox.busy_rings(), first.len()), (2, 24));
        assert!(first.contains(&'q'), "each sender is polled within one turn");
        let mut remaining = 0;
        while mailbox.has_work() {
            let count = poll(&mut mailbox, 24).len();
            assert!((1..=24).contains(&count));
            remaining += count;
        }
        assert_eq!((remaining, poll(&mut mailbox, 24).len()), (177, 0));
    }

    #[test]
    fn rings_of_dropped_senders_are_freed_once_empty() {
        let (mut mailbox, connector) = mailbox();
        let mut senders: Vec<_> = (0..5).map(|_| connector.connect(4)).collect();
        for (n, sender) in senders.iter_mut().enumerate() {
            sender.send(n).unwrap();
        }
        assert_eq!(poll(&mut mailbox, 64), [0, 1, 2, 3, 4]);
        assert_eq!(mailbox.busy_rings(), 5);
        for (n, sender) in senders.iter_mut().enumerate() {
            sender.send(n + 100).unwrap();
        }
        senders.truncate(1);
        let mut items = poll(&mut mailbox, 64);
        items.sort_unstable();
        assert_eq!(items, [100, 101, 102, 103, 104]);
        assert!(poll(&mut mailbox, 64).is_empty());
        assert_eq!(mailbox.busy_rings(), 1);
    }

    #[test]
    fn idle_rings_are_not_polled_and_lose_no_item() {
        const SENDERS: usize = 100;
        let (mut mailbox, connector) = mailbox();
        let mut senders: Vec<_> = (0..SENDERS).map(|_| connector.connect(4)).collect();
        assert_eq!((poll(&mut mailbox, 64).len(), mailbox.busy_rings()), (0, 0));
        for round in 0..3 {
            senders.iter_mut().enumerate().for_each(|(n, sender)| sender.send((round, n)).unwrap());
            let mut items = Vec::new();
            while mailbox.has_work() {
                items.append(&mut poll(&mut mailbox, 64));
            }
            items.sort_unstable();
            assert!(items.into_iter().eq((0..SENDERS).map(|n| (round, n))));
            assert_eq!(mailbox.busy_rings(), SENDERS);
            (0..IDLE_AFTER).for_each(|_| assert!(poll(&mut mailbox, 64).is_empty()));
            assert_eq!(mailbox.busy_rings(), ALWAYS_POLLED, "polling so few costs less than making them idle");
        }
        // The shard sees the close of an idle sender, and its last item, and frees its ring.
        senders[SENDERS - 1].send((3, 0)).unwrap();
        drop(senders);
        assert_eq!(poll(&mut mailbox, 64), [(3, 0)]);
        assert_eq!((poll(&mut mailbox, 64).len(), mailbox.busy_rings(), mailbox.has_work()), (0, 0, false));
    }

    #[test]
    fn an_idle_sender_detects_that_the_mailbox_was_dropped() {
        let token = Arc::new(());
        let (mut mailbox, connector) = mailbox();
        let mut senders: Vec<_> = (0..=ALWAYS_POLLED).map(|_| connector.connect(4)).collect();
        senders.iter_mut().for_each(|sender| sender.send(Arc::clone(&token)).unwrap());
        (0..=IDLE_AFTER).for_each(|_| drop(poll(&mut mailbox, 64)));
        assert_eq!(mailbox.busy_rings(), ALWAYS_POLLED);
        drop(mailbox);
        for sender in &mut senders {
            assert!(sender.is_closed());
            assert!(matches!(sender.send(Arc::clone(&token)), Err(SendError::Closed(_))));
        }
        assert_eq!(Arc::strong_count(&token), 1);
    }

    #[test]
    fn a_full_ring_and_a_closed_ring_return_the_item() {
        let token = Arc::new(());
        let (mailbox, connector) = mailbox();
        let mut sender = connector.connect(2);
        sender.send(Arc::clone(&token)).unwrap();
        sender.send(Arc::clone(&token)).unwrap();
        let full = sender.send(Arc::clone(&token)).unwrap_err();
        assert!(matches!(full, SendError::Full(_)));
        assert!(!sender.is_closed());
        drop(full.into_inner());
        drop(mailbox);
        assert_eq!(Arc::strong_count(&token), 1, "the waiting items were dropped with the mailbox");
        assert!(sender.is_closed());
        let closed = sender.send(Arc::clone(&token)).unwrap_err();
        assert_eq!(closed.to_string(), "the receiver has been dropped");
        assert!(matches!(closed, SendError::Closed(_)));
        // A sender that is created afterwards is closed from the start.
        assert!(connector.connect(2).send(Arc::clone(&token)).is_err());
    }

    #[test]
    fn calls_in_a_dropped_mailbox_end_as_disconnected() {
        let (mailbox, connector) = mailbox::<Completer<u8>>();
        let mut table = SlotTable::new(4);
        let mut sender = connector.connect(4);
        let (mut ticket, completer) = table.acquire().unwrap();
        sender.send(completer).unwrap();
        drop(mailbox);
        assert_eq!(ticket.wait(None), Some(Err(Disconnected)));
    }

    /// Two application threads and a shard, on any number of cores; each call waits for its result.
    fn call_and_answer(shard: IdlePolicy, app: IdlePolicy, calls: u64) {
        type Call = (u64, Completer<u64>);
        const LAST: u64 = u64::MAX - 1;
        let mut parker = Parker::new(Wake::Thread);
        let mut mailbox = Mailbox::<Call>::new(parker.signal());
        let connector = mailbox.connector();
        let served = Arc::new(AtomicUsize::new(0));
        let apps: Vec<_> = (0..2)
            .map(|app_id| {
                let connector = connector.clone();
                std::thread::spawn(move || {
                    let mut sender = connector.connect(8);
                    let mut table = SlotTable::new(8);
                    let mut waiting = std::collections::VecDeque::new();
                    for n in 0..calls {
                        // Keeps one to four calls outstanding. The call beyond them is dropped without being sent.
                        while let Some((mut ticket, completer)) = table.acquire() {
                            let number = n * 2 + app_id;
                            if waiting.len() > (n % 4) as usize {
                                drop(completer);
                                assert_eq!(ticket.wait_with(app, None), Some(Err(Disconnected)));
                                break;
                            }
                            sender.send((number, completer)).unwrap();
                            waiting.push_back((number, ticket));
                        }
                        let (number, mut ticket) = waiting.pop_front().unwrap();
                        assert_eq!(ticket.wait_with(app, None), Some(Ok(number + 1)));
                    }
                    let last = std::iter::repeat_with(|| table.acquire()).flatten().next();
                    let (_ticket, completer) = last.unwrap();
                    sender.send((LAST, completer)).unwrap();
                    waiting.into_iter().for_each(|(number, mut ticket)| {
                        // Takes some results, and abandons others.
                        if number % 3 == 0 {
                            assert_eq!(ticket.wait_with(app, None), Some(Ok(number + 1)));
                        }
                    });
                })
            })
            .collect();
        drop(connector);
        let counter = Arc::clone(&served);
        let shard = std::thread::spawn(move || {
            let mut idle = Idle::new(shard);
            let mut ended = 0;
            loop {
                let count = mailbox.poll(4, |(number, completer)| {
                    ended += u32::from(number == LAST);
                    completer.complete(number + 1);
                });
                counter.fetch_add(count, Ordering::Relaxed);
                if count > 0 {
                    idle.reset();
                } else if ended == 2 && mailbox.busy_rings() == 0 {
                    return;
                } else {
                    match idle.after_empty_poll() {
                        IdleStep::Spin => std::hint::spin_loop(),
                        IdleStep::Yield => std::thread::yield_now(),
                        // The close of the last sender notifies the shard, too.
                        IdleStep::Sleep => parker.sleep_unless(|| mailbox.has_work(), None),
                    }
                }
            }
        });
        apps.into_iter().for_each(|app| app.join().unwrap());
        shard.join().unwrap();
        assert!(served.load(Ordering::Relaxed) as u64 >= 2 * calls);
    }

    #[test]
    fn three_threads_finish_whether_they_poll_adapt_or_sleep() {
        // A call takes a thousand times as long in Miri.
        let (few, many) = if cfg!(miri) { (10, 20) } else { (3_000, 20_000) };
        call_and_answer(IdlePolicy::Event, IdlePolicy::Event, few);
        call_and_answer(IdlePolicy::Poll, IdlePolicy::Poll, many);
        call_and_answer(IdlePolicy::Adaptive { spin: 50 }, IdlePolicy::Adaptive { spin: 50 }, many);
        call_and_answer(IdlePolicy::default(), IdlePolicy::default(), many);
    }
}

#[cfg(loom)]
mod model {
    use loom::sync::Arc;
    use loom::thread;

    use crate::cross_thread::explore;
    use crate::cross_thread::idle::IdlePolicy;
    use crate::cross_thread::mailbox::Mailbox;
    use crate::cross_thread::parker::{Parker, Wake};
    use crate::cross_thread::slot::{Completer, Disconnected, SlotTable};

    /// A new sender sends to a shard that is about to sleep. A lost ring or wake-up deadlocks the model.
    #[test]
    fn loom_a_new_sender_reaches_a_sleeping_shard() {
        explore(|| {
            let mut parker = Parker::new(Wake::Thread);
            let mut mailbox = Mailbox::new(parker.signal());
            let connector = mailbox.connector();
            let app = thread::spawn(move || {
                let mut sender = connector.connect(2);
                sender.send(Box::new(7)).unwrap();
            });
            // The shard is a separate thread, which blocks only in its sleep: see the models of `parker`.
            let shard = thread::spawn(move || {
                let mut received = None;
                while received.is_none() {
                    if mailbox.poll(4, |item| received = Some(item)) == 0 {
                        parker.sleep_unless(|| mailbox.has_work(), None);
                    }
                }
                assert_eq!(received.as_deref(), Some(&7));
            });
            app.join().unwrap();
            shard.join().unwrap();
        });
    }

    /// Makes a ring idle while its sender sends. The sender then stays, or is dropped immediately.
    fn make_idle_during_a_send(sender_stays: bool) {
        explore(move || {
            let mut parker = Parker::new(Wake::Thread);
            let mut mailbox = Mailbox::new(parker.signal());
            let mut sender = mailbox.connector().connect(2);
            sender.send(Box::new(1)).unwrap();
            let app = thread::spawn(move || {
                sender.send(Box::new(2)).unwrap();
                sender_stays.then_some(sender)
            });
            let shard = thread::spawn(move || {
                let mut items = Vec::new();
                while items.len() < 2 {
                    if mailbox.poll(4, |item| items.push(*item)) == 0 && items.len() < 2 {
                        parker.sleep_unless(|| mailbox.has_work(), None);
                    }
                }
                assert_eq!(items, [1, 2]);
            });
            let sender = app.join().unwrap();
            shard.join().unwrap();
            drop(sender);
        });
    }

    /// A lost item deadlocks the model. The sender stays alive, because dropping it would deliver the lost item.
    #[test]
    fn loom_a_ring_that_becomes_idle_loses_no_item() {
        make_idle_during_a_send(true);
    }

    /// The shard receives the items of a dropped sender, and frees its ring; otherwise the model finds a leak.
    #[test]
    fn loom_a_ring_that_becomes_idle_is_freed_with_its_sender() {
        make_idle_during_a_send(false);
    }

    /// Whatever the order of send and drop, the call ends, and its thread does not wait forever.
    #[test]
    fn loom_a_call_sent_to_a_stopping_shard_ends() {
        explore(|| {
            let mailbox = Mailbox::<Completer<u8>>::new(Parker::new(Wake::Thread).signal());
            let mut sender = mailbox.connector().connect(2);
            let mut mailbox = mailbox;
            mailbox.poll(1, |_| unreachable!("nothing was sent"));
            let shard = thread::spawn(move || drop(mailbox));
            let mut table = SlotTable::new(1);
            let (mut ticket, completer) = table.acquire().unwrap();
            if let Err(refused) = sender.send(completer) {
                drop(refused);
            }
            // The sender still exists, so an item could be stuck in its ring.
            assert_eq!(ticket.wait_with(IdlePolicy::Event, None), Some(Err(Disconnected)));
            shard.join().unwrap();
            drop(sender);
        });
    }

    #[test]
    fn loom_a_sender_created_while_the_shard_stops_is_closed() {
        explore(|| {
            let mailbox = Mailbox::new(Parker::new(Wake::Thread).signal());
            let connector = mailbox.connector();
            let shard = thread::spawn(move || drop(mailbox));
            let mut sender = connector.connect(2);
            let item = Arc::new(1);
            let sent = sender.send(Arc::clone(&item)).map_err(drop);
            shard.join().unwrap();
            assert!(sender.is_closed());
            assert!(sent.is_ok() || Arc::strong_count(&item) == 1);
        });
    }
}
