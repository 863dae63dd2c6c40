fn change(mut frozen: rpcrdma_mempool::Frozen) {
    frozen[0] = 1;
}

fn main() {}
