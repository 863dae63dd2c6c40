//! Each program in `ui/` fails to compile with the adjacent error.

/// Device-owned buffers, double ownership, pools on other threads.
#[test]
fn misuse_of_the_pool_does_not_compile() {
    trybuild::TestCases::new().compile_fail("ui/mempool/*.rs");
}

/// Copied ends, ends on two threads.
#[test]
fn misuse_of_the_hand_off_does_not_compile() {
    trybuild::TestCases::new().compile_fail("ui/cross_thread/*.rs");
}

/// Calls that a handler makes, exchanges or keeps.
#[test]
fn misuse_of_calls_does_not_compile() {
    trybuild::TestCases::new().compile_fail("ui/service/*.rs");
}
