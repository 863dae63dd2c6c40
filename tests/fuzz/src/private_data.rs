//! Private data of connect messages, embedded in arbitrary bytes.

use rpcrdma::wire::invariants;
use rpcrdma::wire::private_data::FORMAT;

pub fn run(data: &[u8]) {
    let [mode, rest @ ..] = data else { return };
    if mode & 1 == 0 {
        return invariants::connect_message(rest);
    }
    // Inserts the format word at any position.
    let (front, back) = rest.split_at(usize::from(mode >> 1).min(rest.len()));
    invariants::connect_message(&[front, &FORMAT.to_be_bytes(), back].concat());
}
