//! Each program of `ui/` is refused, for the reason in the file beside it.

/// Bytes of buffers that the device has, two owners, pools that change threads.
#[test]
fn misuse_of_the_pool_does_not_compile() {
    trybuild::TestCases::new().compile_fail("ui/mempool/*.rs");
}

/// Ends that are copied, or used on two threads.
#[test]
fn misuse_of_the_hand_off_does_not_compile() {
    trybuild::TestCases::new().compile_fail("ui/handoff/*.rs");
}

/// Calls that are made, exchanged, or taken out of a handler's hands.
#[test]
fn misuse_of_calls_does_not_compile() {
    trybuild::TestCases::new().compile_fail("ui/service/*.rs");
}
