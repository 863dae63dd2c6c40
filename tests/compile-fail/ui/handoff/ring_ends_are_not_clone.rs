//! A second producer or consumer would break the ring: the ends cannot be copied.

fn main() {
    let (producer, consumer) = rpcrdma::handoff::spsc::ring::<u8>(4);
    let _ = producer.clone();
    let _ = consumer.clone();
}
