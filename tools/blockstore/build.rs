//! Compiles the protocol.

fn main() {
    xdrgen::compile_or_exit("blockstore.x", &xdrgen::Options::default());
}
