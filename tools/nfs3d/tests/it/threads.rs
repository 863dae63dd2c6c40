//! Distribution of the server's threads among clients.

#[path = "../../src/shares.rs"]
mod shares;

use shares::Shares;

/// Assigns threads until no client may hold one more. Returns the clients and their work.
fn assign_all(shares: &mut Shares<char, u32>) -> Vec<(char, u32)> {
    std::iter::from_fn(|| shares.assign()).collect()
}

#[test]
fn clients_with_stalled_work_leave_threads_to_others() {
    let mut shares = Shares::new(8);
    // Each client has more work than there are threads, and no work ends.
    for (client, held) in [('a', 4), ('b', 2), ('c', 1), ('d', 1)] {
        (0..32).for_each(|work| shares.push(client, work));
        assert!(shares.is_ready());
        let taken = assign_all(&mut shares);
        assert_eq!(taken, (0..held).map(|work| (client, work)).collect::<Vec<_>>());
        assert!(!shares.is_ready());
    }
    // All threads are held, so the next client waits until one is released.
    shares.push('e', 0);
    assert_eq!(shares.assign(), None);
    shares.release(&'a');
    assert_eq!(assign_all(&mut shares), [('e', 0)]);
}

#[test]
fn clients_are_served_round_robin_and_their_work_in_order() {
    let mut shares = Shares::new(1);
    (0..3).for_each(|work| shares.push('a', work));
    (10..12).for_each(|work| shares.push('b', work));
    shares.push('c', 20);
    let mut order = Vec::new();
    while let Some((client, work)) = shares.assign() {
        assert_eq!(shares.assign(), None, "there is one thread");
        shares.release(&client);
        order.push(work);
    }
    assert_eq!(order, [0, 10, 20, 1, 11, 2]);
}

#[test]
fn one_released_thread_may_admit_two_clients() {
    let mut shares = Shares::new(4);
    for client in ['a', 'b'] {
        (0..4).for_each(|work| shares.push(client, work));
    }
    let held = assign_all(&mut shares);
    assert_eq!(held, [('a', 0), ('b', 0), ('a', 1)], "one thread is left for a new client");
    shares.release(&'a');
    assert_eq!(assign_all(&mut shares), [('b', 1)], "client b is next");
    shares.release(&'b');
    shares.release(&'b');
    // Client a now holds as many threads as are free, and client b none.
    assert_eq!(assign_all(&mut shares), [('a', 2), ('b', 2)]);
}

#[test]
fn dropped_work_is_skipped() {
    let mut shares = Shares::new(2);
    shares.retain(&'a', |_| None);
    (0..4).for_each(|work| shares.push('a', work));
    (10..12).for_each(|work| shares.push('b', work));
    assert_eq!(assign_all(&mut shares), [('a', 0), ('b', 10)]);
    shares.retain(&'a', |work| (work % 2 == 0).then_some(work));
    shares.retain(&'b', |_| None);
    shares.release(&'b');
    assert_eq!(shares.assign(), None, "client b has no work, and client a holds its half");
    shares.release(&'a');
    assert_eq!(assign_all(&mut shares), [('a', 2)], "the work that was kept");
    shares.retain(&'a', |_| None);
    shares.push('a', 4);
    shares.release(&'a');
    assert_eq!(assign_all(&mut shares), [('a', 4)], "client a is in the queue again");
}

#[test]
fn all_work_is_done_and_no_state_is_left() {
    let mut rng = fastrand::Rng::with_seed(1);
    for threads in [1, 2, 3, 8] {
        let mut shares = Shares::new(threads);
        let (mut added, mut done, mut held) = (0, 0, Vec::new());
        for _ in 0..10_000 {
            if rng.bool() && added - done < 100 {
                shares.push(rng.u8(..5), added);
                added += 1;
            }
            held.extend(std::iter::from_fn(|| shares.assign()));
            assert!(held.len() <= threads);
            // Work waits only while threads are held.
            assert!(!held.is_empty() || added == done);
            if !held.is_empty() && rng.bool() {
                shares.release(&held.swap_remove(rng.usize(..held.len())).0);
                done += 1;
            }
        }
        while let Some((client, _)) = held.pop() {
            shares.release(&client);
            done += 1;
            held.extend(std::iter::from_fn(|| shares.assign()));
        }
        assert_eq!(added, done);
        let fresh = format!("{:?}", Shares::<u8, u32>::new(threads));
        assert_eq!(format!("{shares:?}"), fresh, "state of clients is left");
    }
}
