//! Compiles the definition of the rpcbind protocol.

fn main() {
    xdrgen::compile_or_exit("rpcbind.x", &xdrgen::Options::types_only());
}
