//! Messages as they come: the decoders that most of them meet, held against the view that takes all.

use rpcrdma::wire::{Revision, invariants};

/// Runs one input.
pub fn run(data: &[u8]) {
    let [revision, message @ ..] = data else { return };
    invariants::message(message, Revision::ALL[usize::from(revision & 1)]);
}
