//! Ring ends are not `Clone`: a second one would break the ring.

fn main() {
    let (producer, consumer) = rpcrdma::cross_thread::spsc::ring::<u8>(4);
    let _ = producer.clone();
    let _ = consumer.clone();
}
