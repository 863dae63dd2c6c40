fn read_what_the_nic_may_write(posted: rpcrdma_mempool::Posted) -> u8 {
    posted[0]
}

fn main() {}
