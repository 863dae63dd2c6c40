//! Completing a call consumes its completer.

fn main() {
    let mut table = rpcrdma::cross_thread::slot::SlotTable::<u8>::new(1);
    let (_ticket, completer) = table.acquire().unwrap();
    completer.complete(1);
    completer.complete(2);
}
