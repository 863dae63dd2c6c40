//! Generates the types of NFS and MOUNT.

fn main() {
    for file in ["nfs3.x", "mount.x"] {
        xdrgen::compile_or_exit(file, &xdrgen::Options::default());
    }
}
