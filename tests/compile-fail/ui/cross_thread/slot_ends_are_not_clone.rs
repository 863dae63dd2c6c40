//! Each call has one ticket and one completer.

fn main() {
    let mut table = rpcrdma::cross_thread::slot::SlotTable::<u8>::new(1);
    let (ticket, completer) = table.acquire().unwrap();
    let _ = ticket.clone();
    let _ = completer.clone();
}
