//! What the compiler must refuse about the hand-off's ends.
#![cfg(not(loom))]

#[test]
fn ends_have_one_owner() {
    trybuild::TestCases::new().compile_fail("tests/compile_fail/handoff_*.rs");
}
