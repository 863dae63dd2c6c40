//! Two threads cannot push through one shared producer.

fn main() {
    let (producer, _consumer) = rpcrdma::cross_thread::spsc::ring::<u8>(4);
    std::thread::scope(|scope| {
        scope.spawn(|| (&producer).push(1));
        scope.spawn(|| (&producer).push(2));
    });
}
