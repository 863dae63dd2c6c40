//! Generates the types of the tests' protocols.

fn main() {
    for file in ["typed.x", "src/bin/nfs41c/nfs41.x"] {
        xdrgen::compile_or_exit(file, &xdrgen::Options::default());
    }
}
