//! RPC headers: calls, replies, and the credentials in them.
#![no_main]

use libfuzzer_sys::fuzz_target;
use rpcrdma::wire::invariants;

fuzz_target!(|data: &[u8]| {
    let [mode, bytes @ ..] = data else { return };
    match mode & 1 {
        0 => invariants::rpc_message(bytes),
        _ => invariants::auth_sys(bytes),
    }
});
