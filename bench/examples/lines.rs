//! Time to move the cache lines of a call and its reply between two threads, without any call.
//!
//! ```sh
//! cargo run --release -p rpcrdma-bench --example lines
//! ```
//!
//! The example uses cores 0 and 1, which must be otherwise idle. `bench/measurements.md` has the figures.
#![forbid(unsafe_code)]

use std::error::Error;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use rustix::thread::{CpuSet, sched_setaffinity};

/// The cores of the two threads.
const CORES: [usize; 2] = [1, 0];
/// Outstanding calls of each connection.
const DEPTH: usize = 32;
/// Cache lines of the record of a call or a reply in the ring: 144 or 128 bytes, and a header of 16.
const RECORD: usize = 3;
/// Words of a cache line.
const LINE: usize = 8;

fn main() -> Result<(), Box<dyn Error>> {
    for connections in [1, 1000] {
        println!("{connections} x {DEPTH}: {:.1} ns a call", time_per_call(connections)?);
    }
    Ok(())
}

/// Nanoseconds per call.
///
/// Each connection has its own memory for [`DEPTH`] records in each direction, and for as many copies at each end. The
/// connections take turns in an order that hardware cannot predict.
fn time_per_call(connections: usize) -> Result<f64, Box<dyn Error>> {
    let words = connections * DEPTH * RECORD * LINE;
    let memory = || (0..words).map(|_| AtomicU64::new(0)).collect::<Vec<_>>();
    let (calls, replies) = (memory(), memory());
    let rounds = (2_000_000 / (connections * DEPTH)).max(2) as u64;
    // 7919 is coprime to the numbers of connections used here.
    let order = || (0..connections).map(|n| n * 7919 % connections * DEPTH);
    let records = |connection| (connection..connection + DEPTH).map(|call| call * RECORD * LINE);
    let write_record = |to: &[AtomicU64], at: usize, round: u64| {
        let record = &to[at..][..RECORD * LINE];
        record[1..].iter().for_each(|word| word.store(round, Ordering::Relaxed));
        record[0].store(round, Ordering::Release); // pairs with the Acquire load in `read_record`
    };
    let read_record = |from: &[AtomicU64], into: &mut [u64], at: usize, round: u64| {
        let record = &from[at..][..RECORD * LINE];
        while record[0].load(Ordering::Acquire) != round {
            std::hint::spin_loop();
        }
        into[at..].iter_mut().zip(record).for_each(|(to, word)| *to = word.load(Ordering::Relaxed));
    };
    // Both cores are tried here, because the other thread would wait forever for a thread that ended early.
    pin(CORES[0])?;
    pin(CORES[1])?;
    std::thread::scope(|scope| {
        let server = scope.spawn(|| {
            pin(CORES[0])?;
            let mut copies = vec![0; words];
            for round in 1..=rounds {
                for at in order().flat_map(records) {
                    read_record(&calls, &mut copies, at, round);
                    write_record(&replies, at, round);
                }
            }
            Ok::<_, rustix::io::Errno>(())
        });
        let mut copies = vec![0; words];
        let start = Instant::now();
        order().flat_map(records).for_each(|at| write_record(&calls, at, 1));
        for round in 1..=rounds {
            for connection in order() {
                records(connection).for_each(|at| read_record(&replies, &mut copies, at, round));
                if round < rounds {
                    records(connection).for_each(|at| write_record(&calls, at, round + 1));
                }
            }
        }
        let took = start.elapsed().as_nanos() as f64;
        server.join().map_err(|_| "the other thread panicked")??;
        Ok(took / (rounds * (connections * DEPTH) as u64) as f64)
    })
}

fn pin(core: usize) -> Result<(), rustix::io::Errno> {
    let mut cores = CpuSet::new();
    cores.set(core);
    sched_setaffinity(None, &cores)
}
