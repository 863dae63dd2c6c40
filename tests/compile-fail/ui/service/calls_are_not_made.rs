//! Nobody but the engine makes a call.

fn main() {
    let _ = rpcrdma::ServerCall::default();
}
