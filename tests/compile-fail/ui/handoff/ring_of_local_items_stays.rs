//! Items that may not change threads keep their ring on one thread.

fn main() {
    let (producer, _consumer) = rpcrdma::handoff::spsc::ring::<std::rc::Rc<u8>>(4);
    std::thread::spawn(move || drop(producer));
}
