fn keep_a_slice(buf: rpcrdma_mempool::Buf) {
    let bytes = &buf[..];
    let _lent = buf.lend();
    println!("{}", bytes.len());
}

fn main() {}
