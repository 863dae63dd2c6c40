//! An iWARP connection without its socket, whose peer says anything; see `story`.
#![no_main]

use libfuzzer_sys::fuzz_target;
use rpcrdma::fabric::iwarp::fuzz::story;

fuzz_target!(|data: &[u8]| story(data));
