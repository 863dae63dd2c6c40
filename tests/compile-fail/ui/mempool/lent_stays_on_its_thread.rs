fn elsewhere(lent: rpcrdma_mempool::Lent) {
    std::thread::spawn(move || drop(lent));
}

fn main() {}
