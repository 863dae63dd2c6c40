//! Messages: the decoders of common forms against the complete view.

use rpcrdma::wire::{Revision, invariants};

pub fn run(data: &[u8]) {
    let [revision, message @ ..] = data else { return };
    invariants::message(message, Revision::ALL[usize::from(revision & 1)]);
}
