//! Generates the types of rpcperf's program.

fn main() {
    xdrgen::compile_or_exit("rpcperf.x", &xdrgen::Options::default());
}
