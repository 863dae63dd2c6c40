//! Datagrams of the software fabric's connection set-up and memory exposure.

use rpcrdma::fabric::software::fuzz;

pub fn run(data: &[u8]) {
    let [mode, bytes @ ..] = data else { return };
    match mode & 1 {
        0 => fuzz::handshake(bytes),
        // Prepends the magic word and the version, which are constant.
        _ => fuzz::handshake(&[b"RPsf\x03\0", bytes].concat()),
    }
}
