//! Messages as they come: the decoders that most of them meet, held against the view that takes all.
#![no_main]

use libfuzzer_sys::fuzz_target;
use rpcrdma::wire::{Revision, invariants};

fuzz_target!(|data: &[u8]| {
    let [revision, message @ ..] = data else { return };
    invariants::message(message, Revision::ALL[usize::from(revision & 1)]);
});
