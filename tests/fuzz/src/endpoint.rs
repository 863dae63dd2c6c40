//! An iWARP connection without its socket, whose peer says anything; see `story`.

use rpcrdma::fabric::iwarp::fuzz::story;

/// Runs one input.
pub fn run(data: &[u8]) {
    story(data);
}
