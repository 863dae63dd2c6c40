//! The datagrams by which the software fabric makes connections, and shows memory.

use rpcrdma::fabric::software::fuzz;

/// Runs one input.
pub fn run(data: &[u8]) {
    let [mode, bytes @ ..] = data else { return };
    match mode & 1 {
        0 => fuzz::handshake(bytes),
        // Behind the magic word and the version, which are always the same.
        _ => fuzz::handshake(&[b"RPsf\x03\0", bytes].concat()),
    }
}
