fn shareable<T: Sync>() {}

fn main() {
    shareable::<rpcrdma_mempool::Lent>();
}
