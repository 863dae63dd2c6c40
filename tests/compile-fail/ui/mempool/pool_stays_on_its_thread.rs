fn elsewhere(pool: rpcrdma_mempool::Pool) {
    std::thread::spawn(move || drop(pool));
}

fn main() {}
