//! Only the engine makes a server call.

fn main() {
    let _ = rpcrdma::ServerCall::default();
}
