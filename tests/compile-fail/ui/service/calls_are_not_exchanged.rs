//! A handler cannot answer one call with another kept call.

fn main() {
    let held = std::sync::Mutex::new(None::<rpcrdma::service::DeferredCall>);
    rpcrdma::Procedure::new(move |call| {
        if let Some(other) = held.lock().unwrap().as_mut() {
            std::mem::swap(call, &mut **other);
        }
        Ok(())
    });
}
