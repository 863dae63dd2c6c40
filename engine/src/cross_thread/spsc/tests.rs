#[cfg(not(loom))]
mod model {
    use std::collections::VecDeque;
    use std::rc::Rc;
    use std::sync::atomic::Ordering;

    use proptest::prelude::*;

    use crate::cross_thread::spsc::{SpscConsumer, SpscProducer, ring};

    /// Number of items in the ring.
    fn len<T>(producer: &SpscProducer<T>) -> usize {
        producer.tail.wrapping_sub(producer.shared.head.load(Ordering::Relaxed))
    }

    #[derive(Clone, Debug)]
    enum Op {
        Push,
        Pop,
        /// Requests the first number of items, and takes only the second number of them.
        Drain(usize, usize),
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            3 => Just(Op::Push),
            3 => Just(Op::Pop),
            2 => (0..6usize, 0..6usize).prop_map(|(ask, take)| Op::Drain(ask, take)),
        ]
    }

    /// A ring, and a model of its items.
    struct ModelledRing {
        producer: SpscProducer<(u64, Rc<()>)>,
        consumer: SpscConsumer<(u64, Rc<()>)>,
        items: VecDeque<u64>,
        capacity: usize,
        next: u64,
        alive: Rc<()>,
    }

    impl ModelledRing {
        fn new(capacity: usize) -> Self {
            let (producer, consumer) = ring(capacity);
            let capacity = capacity.max(1).next_power_of_two();
            assert_eq!(producer.capacity(), capacity);
            Self { producer, consumer, items: VecDeque::new(), capacity, next: 0, alive: Rc::new(()) }
        }

        fn push(&mut self) {
            let result = self.producer.push((self.next, Rc::clone(&self.alive)));
            assert_eq!(result.is_ok(), self.items.len() < self.capacity);
            match result {
                Ok(()) => self.items.push_back(self.next),
                Err((back, _)) => assert_eq!(back, self.next, "a refused item is returned"),
            }
            self.next += 1;
        }

        fn apply(&mut self, op: &Op) {
            match *op {
                Op::Push => self.push(),
                Op::Pop => assert_eq!(self.consumer.pop().map(|item| item.0), self.items.pop_front()),
                Op::Drain(max, take) => {
                    let drained: Vec<_> = self.consumer.drain(max).take(take).map(|item| item.0).collect();
                    let count = take.min(max).min(self.items.len());
                    assert_eq!(drained, self.items.drain(..count).collect::<Vec<_>>());
                }
            }
            assert_eq!(len(&self.producer), self.items.len());
            assert_eq!(Rc::strong_count(&self.alive), 1 + self.items.len(), "exactly the items of the ring exist");
        }
    }

    proptest! {
        #[test]
        fn behaves_as_a_bounded_queue(capacity in 0..9usize, ops in prop::collection::vec(op(), 0..400)) {
            let mut ring = ModelledRing::new(capacity);
            ops.iter().for_each(|op| ring.apply(op));
            let ModelledRing { producer, mut consumer, items, alive, .. } = ring;
            // The end that is dropped last drops the remaining items.
            drop(producer);
            prop_assert_eq!(consumer.is_empty(), items.is_empty());
            prop_assert_eq!(consumer.is_finished(), items.is_empty());
            let rest: Vec<_> = std::iter::from_fn(|| consumer.pop()).map(|item| item.0).take(2).collect();
            let expected: Vec<_> = items.into_iter().take(2).collect();
            prop_assert_eq!(rest, expected);
            drop(consumer);
            prop_assert_eq!(Rc::strong_count(&alive), 1);
        }
    }

    #[test]
    fn items_left_by_a_consumer_are_reclaimed() {
        let alive = Rc::new(());
        let (mut producer, mut consumer) = ring(4);
        (0..3).for_each(|n| producer.push((n, Rc::clone(&alive))).unwrap());
        consumer.pop().unwrap();
        assert!(producer.reclaim().is_none() && !producer.is_closed() && !producer.is_abandoned());
        consumer.close();
        assert!(producer.is_closed() && !producer.is_abandoned());
        assert!(producer.reclaim().is_none(), "the consumer still exists");
        assert_eq!(consumer.pop().unwrap().0, 1, "a closed consumer can still take items");
        drop(consumer);
        assert!(producer.is_abandoned());
        assert_eq!(Rc::strong_count(&alive), 2, "a closed consumer leaves the remaining items");
        assert_eq!(producer.reclaim().unwrap().0, 2);
        producer.push((7, Rc::clone(&alive))).unwrap();
        producer.push((8, Rc::clone(&alive))).unwrap();
        producer.push((9, Rc::clone(&alive))).unwrap();
        assert_eq!((producer.reclaim().unwrap().0, producer.reclaim().unwrap().0), (7, 8));
        assert_eq!((len(&producer), Rc::strong_count(&alive)), (1, 2));
        drop(producer);
        assert_eq!(Rc::strong_count(&alive), 1);
    }

    #[test]
    fn a_dropped_consumer_drops_its_items() {
        let alive = Rc::new(());
        let (mut producer, consumer) = ring(4);
        (0..3).for_each(|_| producer.push(Rc::clone(&alive)).unwrap());
        drop(consumer);
        assert_eq!((Rc::strong_count(&alive), len(&producer)), (1, 0));
        assert!(producer.is_closed() && producer.reclaim().is_none());
    }

    #[test]
    fn an_item_that_panics_in_its_drop_does_not_keep_the_ring_open() {
        struct Bomb(bool);
        impl Drop for Bomb {
            fn drop(&mut self) {
                assert!(!self.0, "armed");
            }
        }
        let (mut producer, consumer) = ring(4);
        producer.push(Bomb(true)).ok().unwrap();
        producer.push(Bomb(false)).ok().unwrap();
        let dropped = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| drop(consumer)));
        assert!(dropped.is_err());
        assert!(producer.is_abandoned());
        assert!(producer.reclaim().is_some_and(|bomb| !bomb.0));
    }

    #[test]
    fn a_ring_works_while_its_positions_wrap() {
        let (mut producer, mut consumer) = ring(4);
        // All positions are about to wrap.
        for position in [&mut producer.tail, &mut producer.head] {
            *position = usize::MAX - 1;
        }
        (consumer.head, consumer.tail) = (usize::MAX - 1, usize::MAX - 1);
        producer.shared.head.store(usize::MAX - 1, Ordering::Relaxed);
        producer.shared.tail.store(usize::MAX - 1, Ordering::Relaxed);
        for round in 0..3 {
            (0..4).for_each(|n| producer.push(round * 4 + n).unwrap());
            assert_eq!((producer.push(99), len(&producer)), (Err(99), 4));
            assert!(consumer.drain(9).eq(round * 4..round * 4 + 4));
        }
        assert!(consumer.pop().is_none() && consumer.is_empty());
    }
}

#[cfg(loom)]
mod model {
    use loom::sync::Arc;
    use loom::sync::atomic::{AtomicUsize, Ordering, fence};
    use loom::thread;

    use crate::cross_thread::explore;
    use crate::cross_thread::spsc::{SpscConsumer, ring};

    fn pop_wait<T>(consumer: &mut SpscConsumer<T>) -> Option<T> {
        loop {
            if let Some(item) = consumer.pop() {
                return Some(item);
            }
            if consumer.is_finished() {
                return None;
            }
            thread::yield_now();
        }
    }

    /// The items are boxes, so that a read before the write is an invalid access and not just a wrong number.
    #[test]
    fn loom_items_arrive_whole_and_in_order() {
        explore(|| {
            let (mut producer, mut consumer) = ring(2);
            let thread = thread::spawn(move || {
                for n in 0..3 {
                    let mut item = Box::new(n);
                    while let Err(back) = producer.push(item) {
                        item = back;
                        thread::yield_now();
                    }
                }
            });
            for n in 0..3 {
                assert_eq!(pop_wait(&mut consumer).as_deref(), Some(&n));
            }
            assert!(pop_wait(&mut consumer).is_none(), "the ring is closed once the producer is gone");
            thread.join().unwrap();
        });
    }

    struct Counted(Arc<AtomicUsize>);

    impl Drop for Counted {
        fn drop(&mut self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn loom_a_closing_consumer_takes_each_item_or_leaves_it_to_be_reclaimed() {
        explore(|| {
            let dropped = Arc::new(AtomicUsize::new(0));
            let (mut producer, consumer) = ring(2);
            let thread = thread::spawn(move || drop(consumer));
            producer.push(Counted(Arc::clone(&dropped))).ok().unwrap();
            fence(Ordering::SeqCst);
            if producer.is_closed() {
                while !producer.is_abandoned() {
                    thread::yield_now();
                }
                drop(producer.reclaim());
                assert_eq!(dropped.load(Ordering::Relaxed), 1, "taken or reclaimed");
            }
            thread.join().unwrap();
            assert_eq!(dropped.load(Ordering::Relaxed), 1, "taken or reclaimed before the producer is dropped");
            drop(producer);
            assert_eq!(dropped.load(Ordering::Relaxed), 1);
        });
    }

    #[test]
    fn loom_the_end_dropped_last_drops_the_remaining_items() {
        explore(|| {
            let dropped = Arc::new(AtomicUsize::new(0));
            let (mut producer, mut consumer) = ring(2);
            let counter = Arc::clone(&dropped);
            let thread = thread::spawn(move || {
                producer.push(Counted(Arc::clone(&counter))).ok().unwrap();
                producer.push(Counted(counter)).ok().unwrap();
            });
            drop(consumer.pop());
            drop(consumer);
            thread.join().unwrap();
            assert_eq!(dropped.load(Ordering::Relaxed), 2);
        });
    }
}
