//! Peers killed with SIGKILL, at any instruction, while others go on.

use rpcrdma::Address;

pub(crate) fn child(role: &str, address: &Address) {
    let _ = (role, address);
}
