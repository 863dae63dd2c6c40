//! What the compiler must refuse: bytes of buffers that the device has, two owners, pools that change
//! threads.
#![cfg(not(loom))]

#[test]
fn misuse_does_not_compile() {
    trybuild::TestCases::new().compile_fail("tests/ui/*.rs");
}
