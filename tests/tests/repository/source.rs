//! Tests of `rpcrdma_tests::source`, with which the other modules read source files.

use rpcrdma_tests::source::{code, code_without_tests, paths, words};

#[test]
fn code_excludes_comments_and_literals() {
    let source = "a // unsafe\n/* b /* c */ d */ e(\"f // \\\" g\", r#\"h \" i\"#, 'j', '\\'', '\\u{1F600}') <'k>";
    let found: Vec<_> = words(&code(source)).map(str::to_owned).collect();
    assert_eq!(found, ["a", "e", "k"]);
}

#[test]
fn code_without_tests_excludes_test_items() {
    let source = "a; #[cfg(test)] mod t { fn f() { x } } b; \
        #[cfg(all(test, not(loom)))] #[path = \"m\"] mod u; c; #[cfg(not(test))] d;";
    let found = code_without_tests(source);
    let found: Vec<_> = words(&found).collect();
    assert_eq!(found, ["a", "b", "c", "cfg", "not", "test", "d"]);
}

#[test]
fn paths_are_split_into_module_and_item() {
    let source =
        "use crate::a::{B, c::D, e::{F, G}}; use crate::{h::I, j}; crate::k::l(); mycrate::m; x::crate::n; crate::o;";
    let found = paths(source, "crate");
    let found: Vec<_> = found.iter().map(|(module, item)| format!("{module}/{item}")).collect();
    assert_eq!(found, ["a/B", "a/c", "a/e", "h/I", "j/", "k/l", "o/"]);
}
