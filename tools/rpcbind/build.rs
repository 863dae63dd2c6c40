//! Compiles the protocol.

fn main() {
    xdrgen::compile_or_exit("rpcbind.x", &xdrgen::Options::types_only());
}
