fn elsewhere(pool: &'static rpcrdma_mempool::Pool) {
    std::thread::spawn(move || pool.alloc(1));
}

fn main() {}
