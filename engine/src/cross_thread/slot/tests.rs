#[cfg(not(loom))]
mod real {
    use std::future::Future;
    use std::pin::{Pin, pin};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::{Context, Poll, Wake, Waker};
    use std::time::{Duration, Instant};

    use crate::cross_thread::idle::IdlePolicy;
    use crate::cross_thread::slot::{Completer, Disconnected, ResultTicket, SlotTable};

    /// Number of values that still exist.
    fn alive(token: &Arc<()>) -> usize {
        Arc::strong_count(token) - 1
    }

    /// Whether all slots have been returned, so that every one can be acquired.
    fn all_returned<T>(table: &mut SlotTable<T>) -> bool {
        let all: Vec<_> = std::iter::from_fn(|| table.acquire()).collect();
        all.len() == table.table().slots.len()
    }

    #[test]
    fn slots_are_bounded_and_are_returned_by_any_thread() {
        let mut table = SlotTable::new(3);
        for round in 0..50 {
            let mut pairs: Vec<_> = std::iter::from_fn(|| table.acquire()).collect();
            assert_eq!(pairs.len(), 3);
            assert!(table.acquire().is_none());
            let (mut ticket, completer) = pairs.pop().unwrap();
            completer.complete(round);
            assert_eq!(ticket.try_take(), Some(Ok(round)));
            assert_eq!(ticket.try_take(), None, "a result is taken once");
            let (mut ticket, completer) = pairs.pop().unwrap();
            std::thread::spawn(move || completer.complete(round)).join().unwrap();
            std::thread::spawn(move || assert_eq!(ticket.try_take(), Some(Ok(round)))).join().unwrap();
            drop(pairs);
        }
        assert!(all_returned(&mut table));
    }

    #[test]
    fn an_abandoned_value_is_dropped_exactly_once() {
        let token = Arc::new(());
        let mut table = SlotTable::new(2);
        // The call is abandoned before its result.
        let (ticket, completer) = table.acquire().unwrap();
        drop(ticket);
        let value = Arc::clone(&token);
        assert_eq!(alive(&token), 1);
        completer.complete(value);
        assert_eq!(alive(&token), 0);
        // The call is abandoned after its result.
        let (ticket, completer) = table.acquire().unwrap();
        completer.complete(Arc::clone(&token));
        assert_eq!(alive(&token), 1);
        drop(ticket);
        assert_eq!(alive(&token), 0);
        assert!(all_returned(&mut table));
    }

    #[test]
    fn a_dropped_completer_ends_the_call_as_disconnected() {
        let mut table = SlotTable::<u8>::new(1);
        let (mut ticket, completer) = table.acquire().unwrap();
        drop(completer);
        assert_eq!(ticket.wait(None), Some(Err(Disconnected)));
        assert!(all_returned(&mut table));
        assert!(Disconnected.to_string().contains("without a result"));
    }

    #[test]
    fn a_wait_ends_at_its_deadline_and_can_be_repeated() {
        let mut table = SlotTable::new(1);
        let (mut ticket, completer) = table.acquire().unwrap();
        for policy in [IdlePolicy::Poll, IdlePolicy::Adaptive { spin: 3 }, IdlePolicy::Event] {
            let deadline = Instant::now() + Duration::from_millis(2);
            assert_eq!(ticket.wait_with(policy, Some(deadline)), None);
            assert!(Instant::now() >= deadline);
        }
        let thread = std::thread::spawn(move || completer.complete(5));
        assert_eq!(ticket.wait_with(IdlePolicy::Event, None), Some(Ok(5)));
        assert_eq!(ticket.wait(None), None, "the result was taken before");
        thread.join().unwrap();
    }

    #[derive(Default)]
    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn poll<T>(ticket: &mut ResultTicket<T>, count: &Arc<Count>) -> Poll<Result<T, Disconnected>> {
        let waker = Waker::from(Arc::clone(count));
        Pin::new(ticket).poll(&mut Context::from_waker(&waker))
    }

    #[test]
    fn only_the_last_waker_is_woken_and_all_wakers_are_dropped() {
        let (first, last) = (Arc::new(Count::default()), Arc::new(Count::default()));
        let mut table = SlotTable::new(1);
        let (mut ticket, completer) = table.acquire().unwrap();
        assert!(poll(&mut ticket, &first).is_pending());
        assert!(poll(&mut ticket, &last).is_pending());
        assert_eq!(Arc::strong_count(&first), 1, "the earlier waker was dropped");
        completer.complete(1);
        assert_eq!((first.0.load(Ordering::Relaxed), last.0.load(Ordering::Relaxed)), (0, 1));
        assert_eq!(poll(&mut ticket, &last), Poll::Ready(Ok(1)));
        assert_eq!(Arc::strong_count(&last), 1);
        // The waker of an abandoned call is dropped too.
        let (mut ticket, completer) = table.acquire().unwrap();
        assert!(poll(&mut ticket, &last).is_pending());
        drop(ticket);
        completer.complete(2);
        assert_eq!((Arc::strong_count(&last), last.0.load(Ordering::Relaxed)), (1, 1));
        assert!(all_returned(&mut table));
    }

    #[test]
    #[should_panic(expected = "not polled after it was ready")]
    fn polling_a_finished_future_panics() {
        let mut table = SlotTable::new(1);
        let (ticket, completer) = table.acquire().unwrap();
        completer.complete(1);
        let mut ticket = pin!(ticket);
        let mut cx = Context::from_waker(Waker::noop());
        assert_eq!(ticket.as_mut().poll(&mut cx), Poll::Ready(Ok(1)));
        let _ = ticket.poll(&mut cx);
    }

    #[test]
    fn tickets_and_completers_outlive_the_table_owner() {
        let token = Arc::new(());
        type TicketAndCompleter = (ResultTicket<Arc<()>>, Completer<Arc<()>>);
        let ends = || -> [TicketAndCompleter; 3] {
            let mut table = SlotTable::new(5);
            let used = table.acquire().unwrap();
            let ends = [(); 3].map(|()| table.acquire().unwrap());
            drop(used);
            ends
        };
        let [(mut a, finish_a), (b, finish_b), (c, finish_c)] = ends();
        finish_a.complete(Arc::clone(&token));
        drop(b);
        finish_b.complete(Arc::clone(&token));
        drop(finish_c);
        drop(c);
        assert_eq!(alive(&token), 1);
        assert!(a.wait(None).unwrap().is_ok());
        assert_eq!(alive(&token), 0);
        // One owner is dropped with no slot in use, another one with all slots in use.
        drop(SlotTable::<u8>::new(2));
        let mut table = SlotTable::<u8>::new(1);
        let ends = table.acquire().unwrap();
        drop(table);
        drop(ends);
    }
}

#[cfg(loom)]
mod model {
    use loom::sync::Arc;
    use loom::sync::atomic::{AtomicUsize, Ordering};
    use loom::thread;
    use std::future::Future;
    use std::pin::Pin;
    use std::task::{Context, Poll, Wake, Waker};

    use crate::cross_thread::explore;
    use crate::cross_thread::idle::IdlePolicy;
    use crate::cross_thread::slot::{Disconnected, ResultTicket, SlotTable};

    struct Unpark(thread::Thread);

    impl Wake for Unpark {
        fn wake(self: std::sync::Arc<Self>) {
            self.0.unpark();
        }
    }

    fn block_on<T>(mut ticket: ResultTicket<T>) -> Result<T, Disconnected> {
        let waker = Waker::from(std::sync::Arc::new(Unpark(thread::current())));
        loop {
            match Pin::new(&mut ticket).poll(&mut Context::from_waker(&waker)) {
                Poll::Ready(result) => return result,
                Poll::Pending => thread::park(),
            }
        }
    }

    struct Counted(Arc<AtomicUsize>);

    impl Drop for Counted {
        fn drop(&mut self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Reuses the slot and writes both its cells, so that a late access of the former use would race with these writes.
    fn reuse(table: &mut SlotTable<Counted>, dropped: &Arc<AtomicUsize>) {
        let (mut ticket, completer) = loop {
            if let Some(ends) = table.acquire() {
                break ends;
            }
            thread::yield_now();
        };
        let mut cx = Context::from_waker(Waker::noop());
        assert!(Pin::new(&mut ticket).poll(&mut cx).is_pending());
        completer.complete(Counted(Arc::clone(dropped)));
        assert!(ticket.try_take().unwrap().is_ok());
    }

    #[test]
    fn loom_a_wait_gets_a_result_completed_meanwhile() {
        explore(|| {
            let dropped = Arc::new(AtomicUsize::new(0));
            let mut table = SlotTable::new(1);
            let (mut ticket, completer) = table.acquire().unwrap();
            let value = Counted(Arc::clone(&dropped));
            let thread = thread::spawn(move || completer.complete(value));
            let value_of_ticket = ticket.wait_with(IdlePolicy::Event, None).unwrap().unwrap();
            assert_eq!(dropped.load(Ordering::Relaxed), 0);
            drop(value_of_ticket);
            thread.join().unwrap();
            reuse(&mut table, &dropped);
            assert_eq!(dropped.load(Ordering::Relaxed), 2);
        });
    }

    #[test]
    fn loom_an_await_gets_a_result_completed_meanwhile() {
        explore(|| {
            let mut table = SlotTable::new(1);
            let (ticket, completer) = table.acquire().unwrap();
            let thread = thread::spawn(move || completer.complete(Box::new(7)));
            assert_eq!(block_on(ticket), Ok(Box::new(7)));
            thread.join().unwrap();
            assert!(table.acquire().is_some());
        });
    }

    #[test]
    fn loom_a_result_completed_while_its_ticket_drops_is_dropped_once() {
        explore(|| {
            let dropped = Arc::new(AtomicUsize::new(0));
            let mut table = SlotTable::new(1);
            let (ticket, completer) = table.acquire().unwrap();
            let value = Counted(Arc::clone(&dropped));
            let thread = thread::spawn(move || completer.complete(value));
            drop(ticket);
            thread.join().unwrap();
            assert_eq!(dropped.load(Ordering::Relaxed), 1);
            reuse(&mut table, &dropped);
        });
    }

    /// Polls with one waker, polls with another, and drops the ticket, while the other thread completes the call.
    #[test]
    fn loom_a_result_completed_during_polls_and_drop_is_dropped_once() {
        explore(|| {
            let dropped = Arc::new(AtomicUsize::new(0));
            let mut table = SlotTable::new(1);
            let (mut ticket, completer) = table.acquire().unwrap();
            let value = Counted(Arc::clone(&dropped));
            let thread = thread::spawn(move || completer.complete(value));
            let mut cx = Context::from_waker(Waker::noop());
            for _ in 0..2 {
                if let Poll::Ready(value) = Pin::new(&mut ticket).poll(&mut cx) {
                    assert!(value.is_ok());
                    break;
                }
            }
            drop(ticket);
            thread.join().unwrap();
            assert_eq!(dropped.load(Ordering::Relaxed), 1);
            reuse(&mut table, &dropped);
        });
    }

    /// Reuses one slot as soon as it is returned, while the completer may not have finished the first use.
    #[test]
    fn loom_a_slot_is_returned_only_after_both_ends() {
        explore(|| {
            let dropped = Arc::new(AtomicUsize::new(0));
            let mut table = SlotTable::new(1);
            let (mut ticket, completer) = table.acquire().unwrap();
            let value = Counted(Arc::clone(&dropped));
            let thread = thread::spawn(move || completer.complete(value));
            let mut cx = Context::from_waker(Waker::noop());
            if Pin::new(&mut ticket).poll(&mut cx).is_pending() {
                while ticket.try_take().is_none() {
                    thread::yield_now();
                }
            }
            reuse(&mut table, &dropped);
            thread.join().unwrap();
            assert_eq!(dropped.load(Ordering::Relaxed), 2);
        });
    }

    /// Stores a waker, drops the ticket, and reuses the slot immediately.
    #[test]
    fn loom_an_abandoned_slot_is_returned_only_after_both_ends() {
        explore(|| {
            let dropped = Arc::new(AtomicUsize::new(0));
            let mut table = SlotTable::new(1);
            let (mut ticket, completer) = table.acquire().unwrap();
            let value = Counted(Arc::clone(&dropped));
            let thread = thread::spawn(move || completer.complete(value));
            let _ = Pin::new(&mut ticket).poll(&mut Context::from_waker(Waker::noop()));
            drop(ticket);
            reuse(&mut table, &dropped);
            thread.join().unwrap();
            assert_eq!(dropped.load(Ordering::Relaxed), 2);
        });
    }

    #[test]
    fn loom_a_dropped_completer_wakes_the_waiter() {
        explore(|| {
            let mut table = SlotTable::<u8>::new(1);
            let (mut ticket, completer) = table.acquire().unwrap();
            let thread = thread::spawn(move || drop(completer));
            assert_eq!(ticket.wait_with(IdlePolicy::Event, None), Some(Err(Disconnected)));
            thread.join().unwrap();
        });
    }

    /// Owner, ticket and completer are dropped on three threads. Exactly one frees the table, after all have finished.
    #[test]
    fn loom_the_last_of_owner_ticket_and_completer_frees_the_table() {
        explore(|| {
            let dropped = Arc::new(AtomicUsize::new(0));
            let mut table = SlotTable::new(2);
            let (ticket, completer) = table.acquire().unwrap();
            let other_ends = table.acquire().unwrap();
            let value = Counted(Arc::clone(&dropped));
            let shard = thread::spawn(move || completer.complete(value));
            // The thread `app` synchronizes with no other after the drop, so the free itself has to synchronize.
            let app = thread::spawn(move || drop(ticket));
            drop(other_ends);
            drop(table);
            shard.join().unwrap();
            app.join().unwrap();
            assert_eq!(dropped.load(Ordering::Relaxed), 1);
        });
    }
}
