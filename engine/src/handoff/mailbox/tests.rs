#[cfg(not(loom))]
mod real {
    use std::rc::Rc;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use crate::handoff::idle::{Idle, IdlePolicy, IdleStep};
    use crate::handoff::mailbox::{Connector, Mailbox, SendError};
    use crate::handoff::parker::{Sleeper, Wake};
    use crate::handoff::slot::{Completer, Lost, SlotTable};

    fn mailbox<T>() -> (Mailbox<T>, Connector<T>) {
        let mailbox = Mailbox::new(Sleeper::new(Wake::Thread).signal());
        let connector = mailbox.connector();
        (mailbox, connector)
    }

    fn poll<T>(mailbox: &mut Mailbox<T>, max: usize) -> Vec<T> {
        let mut got = Vec::new();
        let count = mailbox.poll(max, |item| got.push(item));
        assert_eq!(count, got.len());
        got
    }

    #[test]
    fn a_turn_is_bounded_and_a_flood_does_not_starve_others() {
        let (mut mailbox, connector) = mailbox();
        assert!(!mailbox.has_work());
        let mut flood = connector.connect(256);
        let mut quiet = connector.clone().connect(4);
        assert!(mailbox.has_work(), "a new ring is work");
        (0..200).for_each(|_| flood.send('f').unwrap());
        quiet.send('q').unwrap();
        let first = poll(&mut mailbox, 24);
        assert_eq!((mailbox.senders(), first.len(), mailbox.depth()), (2, 24, 177));
        assert!(first.contains(&'q'), "within one turn");
        let mut rest = 0;
        while mailbox.has_work() {
            let got = poll(&mut mailbox, 24).len();
            assert!((1..=24).contains(&got));
            rest += got;
        }
        assert_eq!((rest, flood.len(), poll(&mut mailbox, 24).len()), (177, 0, 0));
    }

    #[test]
    fn closed_rings_are_forgotten_once_empty() {
        let (mut mailbox, connector) = mailbox();
        let mut senders: Vec<_> = (0..5).map(|_| connector.connect(4)).collect();
        for (n, sender) in senders.iter_mut().enumerate() {
            sender.send(n).unwrap();
            sender.stage(n + 100).unwrap();
        }
        assert_eq!(poll(&mut mailbox, 64), [0, 1, 2, 3, 4]);
        assert_eq!(mailbox.senders(), 5);
        // What was staged is sent by the drop.
        senders.truncate(1);
        let mut got = poll(&mut mailbox, 64);
        got.sort_unstable();
        assert_eq!(got, [101, 102, 103, 104]);
        assert!(poll(&mut mailbox, 64).is_empty());
        assert_eq!(mailbox.senders(), 1);
        senders[0].flush();
        assert_eq!(poll(&mut mailbox, 64), [100]);
    }

    #[test]
    fn a_full_ring_pushes_back_and_a_closed_one_says_so() {
        let token = Rc::new(());
        let (mailbox, connector) = mailbox();
        let mut sender = connector.connect(2);
        sender.send(Rc::clone(&token)).unwrap();
        sender.send(Rc::clone(&token)).unwrap();
        let full = sender.send(Rc::clone(&token)).unwrap_err();
        assert!(matches!(full, SendError::Full(_)));
        assert_eq!((sender.len(), sender.capacity(), sender.is_closed()), (2, 2, false));
        drop(full.into_inner());
        drop(mailbox);
        assert_eq!(Rc::strong_count(&token), 1, "what waited was dropped with the mailbox");
        assert!(sender.is_closed() && sender.is_empty());
        let closed = sender.send(Rc::clone(&token)).unwrap_err();
        assert_eq!(closed.to_string(), "the receiver is gone");
        assert!(matches!(closed, SendError::Closed(_)));
        // Born closed.
        assert!(connector.connect(2).send(Rc::clone(&token)).is_err());
    }

    #[test]
    fn calls_in_a_mailbox_that_is_dropped_are_lost_not_stuck() {
        let (mailbox, connector) = mailbox::<Completer<u8>>();
        let mut table = SlotTable::new(4);
        let mut sender = connector.connect(4);
        let (mut ticket, completer) = table.acquire().unwrap();
        sender.send(completer).unwrap();
        drop(mailbox);
        assert_eq!(ticket.wait(None), Some(Err(Lost)));
    }

    /// Two application threads and a shard, whatever the number of cores; each call waits for its result.
    fn call_and_answer(shard: IdlePolicy, app: IdlePolicy, calls: u64) {
        type Call = (u64, Completer<u64>);
        let mut sleeper = Sleeper::new(Wake::Thread);
        let mut mailbox = Mailbox::<Call>::new(sleeper.signal());
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
                        while let Some((mut ticket, completer)) = table.acquire() {
                            let number = n * 2 + app_id;
                            if waiting.len() > (n % 4) as usize {
                                drop(completer);
                                assert_eq!(ticket.wait_with(app, None), Some(Err(Lost)));
                                break;
                            }
                            sender.send((number, completer)).unwrap();
                            waiting.push_back((number, ticket));
                        }
                        let (number, mut ticket) = waiting.pop_front().unwrap();
                        assert_eq!(ticket.wait_with(app, None), Some(Ok(number + 1)));
                    }
                    waiting.into_iter().for_each(|(number, mut ticket)| {
                        // Some are taken, some abandoned.
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
            let mut known = false;
            loop {
                let count = mailbox.poll(4, |(number, completer)| completer.complete(number + 1));
                known |= mailbox.senders() == 2;
                counter.fetch_add(count, Ordering::Relaxed);
                if count > 0 {
                    idle.reset();
                } else if known && mailbox.senders() == 0 {
                    return;
                } else {
                    match idle.next() {
                        IdleStep::Spin => std::hint::spin_loop(),
                        IdleStep::Yield => std::thread::yield_now(),
                        // The end of the last sender notifies too.
                        IdleStep::Sleep => sleeper.sleep_unless(|| mailbox.has_work(), None),
                    }
                }
            }
        });
        apps.into_iter().for_each(|app| app.join().unwrap());
        shard.join().unwrap();
        assert!(served.load(Ordering::Relaxed) as u64 >= 2 * calls);
    }

    #[test]
    fn three_threads_finish_whatever_their_policies() {
        // Miri takes a thousand times as long for each.
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

    use crate::handoff::explore;
    use crate::handoff::idle::IdlePolicy;
    use crate::handoff::mailbox::{Intake, Mailbox};
    use crate::handoff::parker::{Sleeper, Wake};
    use crate::handoff::slot::{Completer, Lost, SlotTable};

    /// A new ring that comes while another is taken in is not forgotten: the model would never end.
    #[test]
    fn loom_nothing_is_lost_in_the_intake() {
        explore(|| {
            let intake = Arc::new(Intake::new());
            let offers = Arc::clone(&intake);
            let app = thread::spawn(move || {
                offers.offer(1).unwrap();
                offers.offer(2).unwrap();
            });
            let mut got = Vec::new();
            while got.len() < 2 {
                if intake.is_fresh() {
                    got.append(&mut intake.take());
                } else {
                    thread::yield_now();
                }
            }
            assert_eq!(got, [1, 2]);
            app.join().unwrap();
        });
    }

    /// Joins a shard that is about to sleep and sends: a lost ring or a lost wake-up is a deadlock of the
    /// model.
    #[test]
    fn loom_a_new_sender_reaches_a_sleeping_shard() {
        explore(|| {
            let mut sleeper = Sleeper::new(Wake::Thread);
            let mut mailbox = Mailbox::new(sleeper.signal());
            let connector = mailbox.connector();
            let app = thread::spawn(move || {
                let mut sender = connector.connect(2);
                sender.send(Box::new(7)).unwrap();
            });
            // A thread of its own, that blocks in nothing but its sleep: see the parker's model.
            let shard = thread::spawn(move || {
                let mut got = None;
                while got.is_none() {
                    if mailbox.poll(4, |item| got = Some(item)) == 0 {
                        sleeper.sleep_unless(|| mailbox.has_work(), None);
                    }
                }
                assert_eq!(got.as_deref(), Some(&7));
            });
            app.join().unwrap();
            shard.join().unwrap();
        });
    }

    /// Whatever the order of send and drop, the call ends and its thread does not wait for ever.
    #[test]
    fn loom_a_call_sent_to_a_stopping_shard_ends() {
        explore(|| {
            let mailbox = Mailbox::<Completer<u8>>::new(Sleeper::new(Wake::Thread).signal());
            let mut sender = mailbox.connector().connect(2);
            let mut mailbox = mailbox;
            mailbox.poll(1, |_| unreachable!("nothing was sent"));
            let shard = thread::spawn(move || drop(mailbox));
            let mut table = SlotTable::new(1);
            let (mut ticket, completer) = table.acquire().unwrap();
            if let Err(refused) = sender.send(completer) {
                drop(refused);
            }
            // The sender lives on: nothing may be stuck in its ring.
            assert_eq!(ticket.wait_with(IdlePolicy::Event, None), Some(Err(Lost)));
            shard.join().unwrap();
            drop(sender);
        });
    }

    #[test]
    fn loom_joining_a_stopping_shard() {
        explore(|| {
            let mailbox = Mailbox::new(Sleeper::new(Wake::Thread).signal());
            let connector = mailbox.connector();
            let shard = thread::spawn(move || drop(mailbox));
            let mut sender = connector.connect(2);
            let sent = sender.send(Box::new(1));
            shard.join().unwrap();
            assert!(sender.is_closed());
            assert!(sent.is_ok() || sender.is_empty());
        });
    }
}
