//! A second producer or consumer would break the ring, so its ends are not `Clone`.

fn main() {
    let (producer, consumer) = rpcrdma::handoff::spsc::ring::<u8>(4);
    let _ = producer.clone();
    let _ = consumer.clone();
}
