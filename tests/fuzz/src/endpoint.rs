//! An iWARP connection without a socket, with an arbitrary peer; see [`run_scenario`].

use rpcrdma::fabric::iwarp::fuzz::run_scenario;

pub fn run(data: &[u8]) {
    run_scenario(data);
}
