fn use_after_post(mut buf: rpcrdma_mempool::Buf) {
    let _posted = buf.post();
    buf[0] = 1;
}

fn main() {}
