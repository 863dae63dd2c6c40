fn clonable<T: Clone>() {}

fn main() {
    clonable::<rpcrdma_mempool::Posted>();
}
