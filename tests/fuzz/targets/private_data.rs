//! The private data of connect messages, in whatever they are embedded.
#![no_main]

use libfuzzer_sys::fuzz_target;
use rpcrdma::wire::invariants;
use rpcrdma::wire::private_data::FORMAT;

fuzz_target!(|data: &[u8]| {
    let [mode, rest @ ..] = data else { return };
    if mode & 1 == 0 {
        return invariants::connect_message(rest);
    }
    // The word that is looked for, somewhere in the rest.
    let (front, behind) = rest.split_at(usize::from(mode >> 1).min(rest.len()));
    invariants::connect_message(&[front, &FORMAT.to_be_bytes(), behind].concat());
});
