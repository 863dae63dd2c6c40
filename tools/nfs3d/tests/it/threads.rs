//! How the server's threads are shared among its clients.

#[path = "../../src/shares.rs"]
mod shares;

use shares::Shares;

/// Work until nobody may hold one more thread; who has got how many.
fn take_all(shares: &mut Shares<char, u32>) -> Vec<(char, u32)> {
    std::iter::from_fn(|| shares.take()).collect()
}

#[test]
fn whoever_hangs_leaves_threads_to_others() {
    let mut shares = Shares::new(8);
    // Each of them asks for more than there are threads, and what has been taken never ends.
    for (client, held) in [('a', 4), ('b', 2), ('c', 1), ('d', 1)] {
        (0..32).for_each(|work| shares.add(client, work));
        assert!(shares.is_ready());
        let taken = take_all(&mut shares);
        assert_eq!(taken, (0..held).map(|work| (client, work)).collect::<Vec<_>>());
        assert!(!shares.is_ready());
    }
    // All hang: the next one waits for any of them.
    shares.add('e', 0);
    assert_eq!(shares.take(), None);
    shares.give_back(&'a');
    assert_eq!(take_all(&mut shares), [('e', 0)]);
}

#[test]
fn clients_take_turns_and_the_work_of_each_stays_in_order() {
    let mut shares = Shares::new(1);
    (0..3).for_each(|work| shares.add('a', work));
    (10..12).for_each(|work| shares.add('b', work));
    shares.add('c', 20);
    let mut order = Vec::new();
    while let Some((client, work)) = shares.take() {
        assert_eq!(shares.take(), None, "there is one thread");
        shares.give_back(&client);
        order.push(work);
    }
    assert_eq!(order, [0, 10, 20, 1, 11, 2]);
}

#[test]
fn one_end_may_make_room_for_two() {
    let mut shares = Shares::new(4);
    for client in ['a', 'b'] {
        (0..4).for_each(|work| shares.add(client, work));
    }
    let held = take_all(&mut shares);
    assert_eq!(held, [('a', 0), ('b', 0), ('a', 1)], "one thread is left for who comes then");
    shares.give_back(&'a');
    assert_eq!(take_all(&mut shares), [('b', 1)], "it is that one's turn");
    shares.give_back(&'b');
    shares.give_back(&'b');
    // The first one has as many as are free now, and the second one none.
    assert_eq!(take_all(&mut shares), [('a', 2), ('b', 2)]);
}

#[test]
fn forgotten_work_is_skipped() {
    let mut shares = Shares::new(2);
    shares.retain(&'a', |_| None);
    (0..4).for_each(|work| shares.add('a', work));
    (10..12).for_each(|work| shares.add('b', work));
    assert_eq!(take_all(&mut shares), [('a', 0), ('b', 10)]);
    shares.retain(&'a', |work| (work % 2 == 0).then_some(work));
    shares.retain(&'b', |_| None);
    shares.give_back(&'b');
    assert_eq!(shares.take(), None, "the second one waits for nothing, and the first one has its half");
    shares.give_back(&'a');
    assert_eq!(take_all(&mut shares), [('a', 2)], "what was left");
    shares.retain(&'a', |_| None);
    shares.add('a', 4);
    shares.give_back(&'a');
    assert_eq!(take_all(&mut shares), [('a', 4)], "it has its turn once more");
}

#[test]
fn all_work_is_done_and_nothing_is_kept_of_it() {
    let mut rng = fastrand::Rng::with_seed(1);
    for threads in [1, 2, 3, 8] {
        let mut shares = Shares::new(threads);
        let (mut added, mut done, mut held) = (0, 0, Vec::new());
        for _ in 0..10_000 {
            if rng.bool() && added - done < 100 {
                shares.add(rng.u8(..5), added);
                added += 1;
            }
            held.extend(std::iter::from_fn(|| shares.take()));
            assert!(held.len() <= threads);
            // Whoever waits waits for somebody.
            assert!(!held.is_empty() || added == done);
            if !held.is_empty() && rng.bool() {
                shares.give_back(&held.swap_remove(rng.usize(..held.len())).0);
                done += 1;
            }
        }
        while let Some((client, _)) = held.pop() {
            shares.give_back(&client);
            done += 1;
            held.extend(std::iter::from_fn(|| shares.take()));
        }
        assert_eq!(added, done);
        let fresh = format!("{:?}", Shares::<u8, u32>::new(threads));
        assert_eq!(format!("{shares:?}"), fresh, "as if nobody had been there");
    }
}
