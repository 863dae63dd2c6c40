//! RPC messages, and AUTH_SYS credentials.

use rpcrdma::wire::invariants;

pub fn run(data: &[u8]) {
    let [mode, bytes @ ..] = data else { return };
    match mode & 1 {
        0 => invariants::rpc_message(bytes),
        _ => invariants::auth_sys(bytes),
    }
}
