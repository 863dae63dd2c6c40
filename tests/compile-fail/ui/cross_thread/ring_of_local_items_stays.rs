//! A ring of items without `Send` stays on its thread.

fn main() {
    let (producer, _consumer) = rpcrdma::cross_thread::spsc::ring::<std::rc::Rc<u8>>(4);
    std::thread::spawn(move || drop(producer));
}
