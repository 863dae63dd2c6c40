fn read_while_lent(lent: rpcrdma_mempool::Lent) -> u8 {
    let bytes: &[u8] = &lent;
    bytes[0]
}

fn main() {}
