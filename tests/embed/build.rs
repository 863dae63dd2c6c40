//! Compiles the protocol.

fn main() {
    xdrgen::compile_or_exit("kv.x", &xdrgen::Options::default());
}
