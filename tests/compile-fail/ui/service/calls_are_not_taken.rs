//! A handler cannot replace its call with another value.

fn main() {
    rpcrdma::Procedure::new(|call| {
        let _ = std::mem::take(call);
        Ok(())
    });
}
