#![cfg(not(loom))]
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, Mutex};

use rustix::thread::sched_getaffinity;

use crate::cross_thread::idle::IdlePolicy;
use crate::cross_thread::parker::{Parker, Wake};
use crate::cross_thread::pin::allowed_cores;
use crate::cross_thread::workers::{JobError, JobResult, ShardPort, WorkerConfig, WorkerPool};

fn config(count: usize, ring_capacity: usize, idle: IdlePolicy) -> WorkerConfig {
    WorkerConfig { count, cores: None, ring_capacity, idle }
}

/// Collects until no job is outstanding; sleeps in between.
fn collect_all<J, D>(port: &mut ShardPort<u64, J, D>, parker: &mut Parker) -> BTreeMap<u64, JobResult<D>> {
    let mut all = BTreeMap::new();
    while port.outstanding() > 0 {
        if port.collect(3, |key, result| assert!(all.insert(key, result).is_none(), "{key} is collected once")) == 0 {
            parker.sleep_unless(|| port.has_done(), None);
        }
    }
    all
}

#[test]
fn every_job_is_collected_once_under_back_pressure() {
    const JOBS: u64 = if cfg!(miri) { 40 } else { 2_000 };
    for idle in [IdlePolicy::Event, IdlePolicy::Poll, IdlePolicy::Adaptive { spin: 10 }] {
        let pool = WorkerPool::new(&config(2, 4, idle), |n: u64| n * n).unwrap();
        let mut parker = Parker::new(Wake::Thread);
        let mut port = pool.attach_shard(&parker.signal());
        let (mut sent, mut collected, mut refused) = (0u64, BTreeMap::new(), 0);
        while collected.len() < JOBS as usize {
            while sent < JOBS {
                match port.dispatch(sent, sent + 7) {
                    Ok(()) => sent += 1,
                    Err(back) => {
                        assert_eq!(back, (sent, sent + 7));
                        assert_eq!(port.outstanding(), 8, "refused only when every ring is full");
                        refused += 1;
                        break;
                    }
                }
            }
            if port.collect(64, |key, result| assert!(collected.insert(key, result).is_none())) == 0 {
                parker.sleep_unless(|| port.has_done(), None);
            }
        }
        assert!(refused > 0);
        assert!(collected.into_iter().all(|(key, result)| result == Ok((key + 7) * (key + 7))));
        assert_eq!(port.outstanding(), 0);
    }
}

#[test]
fn shards_that_share_workers_get_their_own_results() {
    let pool = WorkerPool::new(&config(1, 8, IdlePolicy::default()), |n: u64| n + 1).unwrap();
    let shards: Vec<_> = (0..2u64)
        .map(|shard| {
            let mut parker = Parker::new(Wake::Thread);
            let mut port = pool.attach_shard(&parker.signal());
            std::thread::spawn(move || {
                for round in 0..if cfg!(miri) { 10 } else { 500 } {
                    for key in 0..8 {
                        port.dispatch(key, shard * 1_000_000 + round * 10 + key).unwrap();
                    }
                    for (key, result) in collect_all(&mut port, &mut parker) {
                        assert_eq!(result, Ok(shard * 1_000_000 + round * 10 + key + 1));
                    }
                }
            })
        })
        .collect();
    shards.into_iter().for_each(|shard| shard.join().unwrap());
}

#[test]
fn a_panic_of_a_job_is_its_result_and_the_worker_continues() {
    let pool = WorkerPool::new(&config(1, 8, IdlePolicy::Event), |n: u64| match n {
        0 => panic!("constant"),
        1 => panic!("number {n}"),
        2 => std::panic::panic_any(n),
        _ => n,
    })
    .unwrap();
    let mut parker = Parker::new(Wake::Thread);
    let mut port = pool.attach_shard(&parker.signal());
    (0..4).for_each(|n| port.dispatch(n, n).unwrap());
    let collected = collect_all(&mut port, &mut parker);
    assert_eq!(collected[&0], Err(JobError::Panicked("constant".into())));
    assert_eq!(collected[&1], Err(JobError::Panicked("number 1".into())));
    assert_eq!(collected[&2].as_ref().unwrap_err().to_string(), "the job panicked: (the panic value is not a string)");
    assert_eq!(collected[&3], Ok(3));
}

#[test]
fn jobs_go_to_the_worker_with_the_fewest() {
    let gate = Arc::new(Mutex::new(()));
    let (closed_gate, started) = (gate.lock().unwrap(), AtomicUsize::new(0));
    let running = Arc::new(started);
    let (at_gate, in_job) = (Arc::clone(&gate), Arc::clone(&running));
    let pool = WorkerPool::new(&config(2, 4, IdlePolicy::Event), move |n: u64| {
        in_job.fetch_add(1, Ordering::Release);
        if n == 0 {
            drop(at_gate.lock().unwrap());
        }
    })
    .unwrap();
    let mut parker = Parker::new(Wake::Thread);
    let mut port = pool.attach_shard(&parker.signal());
    port.dispatch(0, 0).unwrap();
    // Job 0 stays on one worker; the others run on the other one, which has fewer each time.
    for key in 1..=5 {
        port.dispatch(key, key).unwrap();
        let mut done = None;
        while done.is_none() {
            if port.collect(1, |key, _| done = Some(key)) == 0 {
                parker.sleep_unless(|| port.has_done(), None);
            }
        }
        assert_eq!(done, Some(key));
    }
    while running.load(Ordering::Acquire) < 6 {
        std::thread::yield_now();
    }
    assert!(port.outstanding() == 1 && !port.has_done(), "the other five jobs passed job 0");
    drop(closed_gate);
    assert_eq!(collect_all(&mut port, &mut parker).len(), 1);
}

#[test]
fn a_stop_finishes_dispatched_jobs_and_refuses_new_ones() {
    let ran = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&ran);
    let pool = WorkerPool::new(&config(2, 64, IdlePolicy::Event), move |n: u64| {
        counter.fetch_add(1, Ordering::Relaxed);
        n
    })
    .unwrap();
    let mut parker = Parker::new(Wake::Thread);
    let mut port = pool.attach_shard(&parker.signal());
    (0..100).for_each(|n| port.dispatch(n, n).unwrap());
    drop(pool);
    assert_eq!(ran.load(Ordering::Relaxed), 100, "the drop joins the workers after every job");
    assert_eq!(port.dispatch(200, 200), Err((200, 200)));
    let collected = collect_all(&mut port, &mut parker);
    assert!(collected.len() == 100 && collected.into_iter().all(|(key, result)| result == Ok(key)));
}

/// Dispatches jobs while the pool stops. Each job is run, reported as stopped, or refused.
#[test]
fn jobs_dispatched_during_a_stop_are_all_collected() {
    for round in 0..if cfg!(miri) { 5 } else { 200 } {
        let pool = WorkerPool::new(&config(1, 4, IdlePolicy::Event), |n: u64| n).unwrap();
        let mut parker = Parker::new(Wake::Thread);
        let mut port = pool.attach_shard(&parker.signal());
        let (ready, go) = mpsc::channel();
        let shard = std::thread::spawn(move || {
            let mut key = 0;
            ready.send(()).unwrap();
            let mut ended = 0;
            loop {
                let refused = port.dispatch(key, key).is_err();
                key += u64::from(!refused);
                ended += port.collect(8, |_, result| assert!(matches!(result, Ok(_) | Err(JobError::Stopped))));
                if refused && port.pairs[0].jobs.is_closed() {
                    ended += collect_all(&mut port, &mut parker).len();
                    return (key, ended as u64);
                }
            }
        });
        go.recv().unwrap();
        (0..round).for_each(|_| std::hint::spin_loop());
        drop(pool);
        let (dispatched, ended) = shard.join().unwrap();
        assert_eq!(dispatched, ended);
    }
}

#[test]
fn a_job_that_a_worker_left_is_reported_as_stopped() {
    let pool = WorkerPool::new(&config(1, 4, IdlePolicy::Event), |n: u64| n).unwrap();
    let mut port = pool.attach_shard(&Parker::new(Wake::Thread).signal());
    drop(pool);
    // This is the state after the worker has closed the ring between the port's check and its push.
    let pair = &mut port.pairs[0];
    pair.jobs.push((5, 5)).unwrap();
    pair.outstanding += 1;
    assert!(port.has_done());
    let mut collected = Vec::new();
    assert_eq!(port.collect(8, |key, result| collected.push((key, result))), 1);
    assert_eq!(collected, [(5, Err(JobError::Stopped))]);
    assert_eq!((port.outstanding(), JobError::Stopped.to_string()), (0, "the worker pool has stopped".into()));
}

#[test]
fn a_port_may_be_dropped_before_the_pool() {
    let token = Arc::new(());
    let pool = WorkerPool::new(&config(1, 8, IdlePolicy::Event), |token: Arc<()>| token).unwrap();
    let mut port = pool.attach_shard(&Parker::new(Wake::Thread).signal());
    (0..8).for_each(|n| port.dispatch(n, Arc::clone(&token)).unwrap());
    drop(port);
    drop(pool);
    assert_eq!(Arc::strong_count(&token), 1, "jobs and results are dropped, once");
}

#[test]
fn workers_are_pinned_one_to_a_core() {
    let cores = allowed_cores().to_vec();
    let config = WorkerConfig { count: cores.len(), cores: Some(cores.clone()), ..WorkerConfig::default() };
    let pool = WorkerPool::new(&config, |_: ()| {
        let set = sched_getaffinity(None).unwrap();
        (set.count(), (0..rustix::thread::CpuSet::MAX_CPU).find(|&core| set.is_set(core)).unwrap())
    })
    .unwrap();
    let mut parker = Parker::new(Wake::Thread);
    let mut port = pool.attach_shard(&parker.signal());
    (0..cores.len() as u64).for_each(|key| port.dispatch(key, ()).unwrap());
    let mut pinned: Vec<_> = collect_all(&mut port, &mut parker).into_values().map(Result::unwrap).collect();
    pinned.sort_unstable();
    assert_eq!(pinned, cores.iter().map(|&core| (1, core)).collect::<Vec<_>>());
}

#[test]
fn invalid_configurations_are_refused_by_name_value_and_range() {
    let refuse = |count, cores| {
        let config = WorkerConfig { count, cores, ..WorkerConfig::default() };
        WorkerPool::<(), (), ()>::new(&config, |()| ()).err().unwrap()
    };
    let none = refuse(0, None);
    assert!(none.to_string().starts_with("invalid WorkerConfig::count `0`: expected 1 to 1024, or "), "{none}");
    assert_eq!(refuse(1025, None).to_string(), "invalid WorkerConfig::count `1025`: expected 1 to 1024");
    for ring_capacity in [0, 65537, usize::MAX] {
        let config = WorkerConfig { ring_capacity, ..WorkerConfig::default() };
        let refused = WorkerPool::<(), (), ()>::new(&config, |()| ()).err().expect("too few, or too many");
        let expected = format!("invalid WorkerConfig::ring_capacity `{ring_capacity}`: expected 1 to 65536");
        assert_eq!(refused.to_string(), expected);
    }
    let few = refuse(3, Some(vec![0]));
    assert!(few.to_string().starts_with("invalid WorkerConfig::cores `1 cores`: expected 3, one for "), "{few}");
    let foreign = refuse(1, Some(vec![100_000]));
    assert!(foreign.kind() == crate::StartErrorKind::Core && foreign.to_string() == "cannot pin worker 0");
    let text = std::error::Error::source(&foreign).expect("the refused core").to_string();
    assert!(text.starts_with("core 100000 is not allowed for this process (allowed: "), "{text}");
}
