//! An iWARP connection without a socket, with an arbitrary peer; see `story`.

use rpcrdma::fabric::iwarp::fuzz::story;

pub fn run(data: &[u8]) {
    story(data);
}
