//! Private data of connect messages, embedded in arbitrary bytes.

use rpcrdma::wire::invariants;
use rpcrdma::wire::private_data::FORMAT;

pub fn run(data: &[u8]) {
    let [mode, rest @ ..] = data else { return };
    if mode & 1 == 0 {
        return invariants::connect_message(rest);
    }
    // The format word, at any position in the rest.
    let (front, behind) = rest.split_at(usize::from(mode >> 1).min(rest.len()));
    invariants::connect_message(&[front, &FORMAT.to_be_bytes(), behind].concat());
}
