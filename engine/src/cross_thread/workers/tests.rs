#![cfg(not(loom))]
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, Mutex};

use rustix::thread::sched_getaffinity;

use crate::cross_thread::idle::IdlePolicy;
use crate::cross_thread::parker::{Sleeper, Wake};
use crate::cross_thread::pin::allowed_cores;
use crate::cross_thread::workers::{JobError, JobResult, ShardPort, WorkerConfig, WorkerPool};

fn config(count: usize, ring_capacity: usize, idle: IdlePolicy) -> WorkerConfig {
    WorkerConfig { count, cores: None, ring_capacity, idle }
}

/// Collects until no job is outstanding; sleeps in between.
fn collect_all<J, D>(port: &mut ShardPort<u64, J, D>, sleeper: &mut Sleeper) -> BTreeMap<u64, JobResult<D>> {
    let mut all = BTreeMap::new();
    while port.outstanding() > 0 {
        if port.collect(3, |key, result| assert!(all.insert(key, result).is_none(), "twice: {key}")) == 0 {
            sleeper.sleep_unless(|| port.has_done(), None);
        }
    }
    all
}

#[test]
fn every_job_comes_back_once_under_back_pressure() {
    const JOBS: u64 = if cfg!(miri) { 40 } else { 2_000 };
    for idle in [IdlePolicy::Event, IdlePolicy::Poll, IdlePolicy::Adaptive { spin: 10 }] {
        let pool = WorkerPool::new(&config(2, 4, idle), |n: u64| n * n).unwrap();
        let mut sleeper = Sleeper::new(Wake::Thread);
        let mut port = pool.attach_shard(&sleeper.signal());
        let (mut sent, mut got, mut refused) = (0u64, BTreeMap::new(), 0);
        while got.len() < JOBS as usize {
            while sent < JOBS {
                match port.dispatch(sent, sent + 7) {
                    Ok(()) => sent += 1,
                    Err(back) => {
                        assert_eq!(back, (sent, sent + 7));
                        assert_eq!(port.outstanding(), 8, "refused only when every ring has its fill");
                        refused += 1;
                        break;
                    }
                }
            }
            if port.collect(64, |key, result| assert!(got.insert(key, result).is_none())) == 0 {
                sleeper.sleep_unless(|| port.has_done(), None);
            }
        }
        assert!(refused > 0);
        assert!(got.into_iter().all(|(key, result)| result == Ok((key + 7) * (key + 7))));
        assert_eq!(port.outstanding(), 0);
    }
}

#[test]
fn two_shards_share_the_workers_and_get_their_own_results() {
    let pool = WorkerPool::new(&config(1, 8, IdlePolicy::default()), |n: u64| n + 1).unwrap();
    let shards: Vec<_> = (0..2u64)
        .map(|shard| {
            let mut sleeper = Sleeper::new(Wake::Thread);
            let mut port = pool.attach_shard(&sleeper.signal());
            std::thread::spawn(move || {
                for round in 0..if cfg!(miri) { 10 } else { 500 } {
                    for key in 0..8 {
                        port.dispatch(key, shard * 1_000_000 + round * 10 + key).unwrap();
                    }
                    for (key, result) in collect_all(&mut port, &mut sleeper) {
                        assert_eq!(result, Ok(shard * 1_000_000 + round * 10 + key + 1));
                    }
                }
            })
        })
        .collect();
    shards.into_iter().for_each(|shard| shard.join().unwrap());
}

#[test]
fn a_panic_is_a_result_and_the_worker_lives_on() {
    let pool = WorkerPool::new(&config(1, 8, IdlePolicy::Event), |n: u64| match n {
        0 => panic!("plain"),
        1 => panic!("number {n}"),
        2 => std::panic::panic_any(n),
        _ => n,
    })
    .unwrap();
    let mut sleeper = Sleeper::new(Wake::Thread);
    let mut port = pool.attach_shard(&sleeper.signal());
    (0..4).for_each(|n| port.dispatch(n, n).unwrap());
    let got = collect_all(&mut port, &mut sleeper);
    assert_eq!(got[&0], Err(JobError::Panicked("plain".into())));
    assert_eq!(got[&1], Err(JobError::Panicked("number 1".into())));
    assert_eq!(got[&2].as_ref().unwrap_err().to_string(), "the job panicked: (the panic value is not a string)");
    assert_eq!(got[&3], Ok(3));
}

#[test]
fn jobs_go_to_the_worker_with_the_fewest() {
    let gate = Arc::new(Mutex::new(()));
    let (held, started) = (gate.lock().unwrap(), AtomicUsize::new(0));
    let running = Arc::new(started);
    let (at_gate, in_job) = (Arc::clone(&gate), Arc::clone(&running));
    let pool = WorkerPool::new(&config(2, 4, IdlePolicy::Event), move |n: u64| {
        in_job.fetch_add(1, Ordering::Release);
        if n == 0 {
            drop(at_gate.lock().unwrap());
        }
    })
    .unwrap();
    let mut sleeper = Sleeper::new(Wake::Thread);
    let mut port = pool.attach_shard(&sleeper.signal());
    port.dispatch(0, 0).unwrap();
    // Job 0 stays on one worker; the others run on the other one, which has fewer each time.
    for key in 1..=5 {
        port.dispatch(key, key).unwrap();
        let mut done = None;
        while done.is_none() {
            if port.collect(1, |key, _| done = Some(key)) == 0 {
                sleeper.sleep_unless(|| port.has_done(), None);
            }
        }
        assert_eq!(done, Some(key));
    }
    while running.load(Ordering::Acquire) < 6 {
        std::thread::yield_now();
    }
    assert!(port.outstanding() == 1 && !port.has_done(), "the other five went past it");
    drop(held);
    assert_eq!(collect_all(&mut port, &mut sleeper).len(), 1);
}

#[test]
fn a_stop_finishes_dispatched_jobs_and_refuses_others() {
    let ran = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&ran);
    let pool = WorkerPool::new(&config(2, 64, IdlePolicy::Event), move |n: u64| {
        counter.fetch_add(1, Ordering::Relaxed);
        n
    })
    .unwrap();
    let mut sleeper = Sleeper::new(Wake::Thread);
    let mut port = pool.attach_shard(&sleeper.signal());
    (0..100).for_each(|n| port.dispatch(n, n).unwrap());
    drop(pool);
    assert_eq!(ran.load(Ordering::Relaxed), 100, "joined: every job has run");
    assert_eq!(port.dispatch(200, 200), Err((200, 200)));
    let got = collect_all(&mut port, &mut sleeper);
    assert!(got.len() == 100 && got.into_iter().all(|(key, result)| result == Ok(key)));
}

/// Dispatches while the pool stops: each job ends, run or refused.
#[test]
fn jobs_that_meet_the_stop_come_back() {
    for round in 0..if cfg!(miri) { 5 } else { 200 } {
        let pool = WorkerPool::new(&config(1, 4, IdlePolicy::Event), |n: u64| n).unwrap();
        let mut sleeper = Sleeper::new(Wake::Thread);
        let mut port = pool.attach_shard(&sleeper.signal());
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
                    ended += collect_all(&mut port, &mut sleeper).len();
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
    let mut port = pool.attach_shard(&Sleeper::new(Wake::Thread).signal());
    drop(pool);
    // As if the worker had closed between the check and the push.
    let pair = &mut port.pairs[0];
    pair.jobs.push((5, 5)).unwrap();
    pair.outstanding += 1;
    assert!(port.has_done());
    let mut got = Vec::new();
    assert_eq!(port.collect(8, |key, result| got.push((key, result))), 1);
    assert_eq!(got, [(5, Err(JobError::Stopped))]);
    assert_eq!((port.outstanding(), JobError::Stopped.to_string()), (0, "the worker pool has stopped".into()));
}

#[test]
fn a_port_may_go_first() {
    let token = Arc::new(());
    let pool = WorkerPool::new(&config(1, 8, IdlePolicy::Event), |token: Arc<()>| token).unwrap();
    let mut port = pool.attach_shard(&Sleeper::new(Wake::Thread).signal());
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
    let mut sleeper = Sleeper::new(Wake::Thread);
    let mut port = pool.attach_shard(&sleeper.signal());
    (0..cores.len() as u64).for_each(|key| port.dispatch(key, ()).unwrap());
    let mut seen: Vec<_> = collect_all(&mut port, &mut sleeper).into_values().map(Result::unwrap).collect();
    seen.sort_unstable();
    assert_eq!(seen, cores.iter().map(|&core| (1, core)).collect::<Vec<_>>());
}

#[test]
fn impossible_configurations_are_refused_with_the_reason() {
    let refuse = |count, cores| {
        let config = WorkerConfig { count, cores, ..WorkerConfig::default() };
        WorkerPool::<(), (), ()>::new(&config, |()| ()).err().unwrap()
    };
    let none = refuse(0, None);
    assert!(none.to_string().starts_with("0 workers "), "{none:?}");
    assert!(none.to_string().starts_with("0 workers (WorkerConfig::count"), "{none}");
    assert_eq!(refuse(1025, None).to_string(), "WorkerConfig::count is 1025: 1 to 1024");
    for ring_capacity in [0, 65537, usize::MAX] {
        let config = WorkerConfig { ring_capacity, ..WorkerConfig::default() };
        let refused = WorkerPool::<(), (), ()>::new(&config, |()| ()).err().expect("too few, or too many");
        assert_eq!(refused.to_string(), format!("WorkerConfig::ring_capacity is {ring_capacity}: 1 to 65536"));
    }
    let few = refuse(3, Some(vec![0]));
    assert!(few.to_string().starts_with("`WorkerConfig::count` is 3, `WorkerConfig::cores` names 1 cores"), "{few}");
    let foreign = refuse(1, Some(vec![100_000]));
    assert!(foreign.kind() == crate::StartErrorKind::Core && foreign.to_string() == "cannot pin worker 0");
    assert_eq!(foreign.to_string(), "cannot pin worker 0");
    let text = std::error::Error::source(&foreign).expect("why").to_string();
    assert!(text.starts_with("core 100000 is not allowed to this process (allowed: "), "{text}");
}
