//! Messages: compares fast-path decoding by fixed layouts with the complete decoder.

use rpcrdma::wire::{Revision, invariants};

pub fn run(data: &[u8]) {
    let [revision, message @ ..] = data else { return };
    invariants::message(message, Revision::ALL[usize::from(revision & 1)]);
}
