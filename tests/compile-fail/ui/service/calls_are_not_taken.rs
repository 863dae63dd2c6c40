//! A handler cannot leave something else in the place of its call.

fn main() {
    rpcrdma::Procedure::new(|call| {
        let _ = std::mem::take(call);
        Ok(())
    });
}
