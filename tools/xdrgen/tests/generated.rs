//! The text of generated code, and the program that writes it.
//!
//! After a change: `xdrgen tools/xdrgen/tests/golden/small.x -o tools/xdrgen/tests/golden/small.rs`.

use std::fs;
use std::process::{Command, Output};

use xdrgen::{Options, Source, generate, parse};

const X: &str = include_str!("golden/small.x");
const PLACEMENT: &str = include_str!("golden/small.placement.toml");
const GOLDEN: &str = include_str!("golden/small.rs");

fn code(x: &str, placement: &str, options: &Options) -> String {
    let source = |text: &str| Source { name: "test".into(), text: text.into() };
    generate(&parse(&source(x), Some(&source(placement))).unwrap_or_else(|errors| panic!("{errors}")), options)
}

fn xdrgen(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_xdrgen")).args(arguments).output().expect("it was built")
}

#[test]
fn code_is_as_recorded_each_time() {
    for _ in 0..2 {
        let code = code(X, PLACEMENT, &Options::default());
        let differs = code.lines().zip(GOLDEN.lines()).position(|(new, old)| new != old);
        assert_eq!((differs, code.len()), (None, GOLDEN.len()), "the first line that differs, and bytes");
    }
}

#[test]
fn paths_are_those_of_the_options() {
    let types = code(X, PLACEMENT, &Options::types_only().xdr("crate::deep::xdr"));
    assert!(types.contains("impl crate::deep::xdr::Encode for Status {"), "{types}");
    assert!(!types.contains("rpcrdma") && !types.contains("pub mod"), "{types}");
    let all = code(X, PLACEMENT, &Options::default().engine("other"));
    assert!(all.contains("use other::typed::{self, Signature};"), "{all}");
}

#[test]
fn names_that_rust_cannot_have_or_has_twice_get_an_underscore() {
    let types = code(
        "struct foo_bar { int crate; int fooBar; int foo_bar; int type; }; struct fooBar { int x; }; struct result { int x; };",
        "",
        &Options::types_only(),
    );
    for name in ["crate_: i32", "foo_bar: i32", "foo_bar_: i32", "r#type: i32", "struct FooBar_ {", "struct Result_ {"]
    {
        assert!(types.contains(&format!("pub {name}")), "{name}: {types}");
    }
}

#[test]
fn a_typedef_is_one_type_whatever_uses_it() {
    let typedefs = "typedef opaque data<9>; typedef data same; typedef string text<>; typedef int list<7>;
        typedef int number; typedef list lists<2>;
        union maybe switch (bool some) { case TRUE: data value; case FALSE: void; };";
    let uses = [
        "",
        "struct a { data one; text two; list three; same four; data *five; };",
        "struct a { data one<>; text two[2]; list three<3>; same four<>; };",
        "program P { version V { data F(text) = 1; list G(data, same) = 2; maybe H(lists) = 3; } = 1; } = 1;",
        "struct netobj_user { netobj one; }; program P { version V { netobj F(netobj) = 1; } = 1; } = 1;",
    ];
    for used in uses {
        let text = code(&format!("{typedefs} {used}"), "eligible = ['text']\nbounds.text = 5", &Options::default());
        for item in [
            "pub struct Data<'a>(pub &'a [u8]);",
            "pub type Same<'a> = Data<'a>;",
            "pub struct Text<'a>(pub rpcrdma::xdr::Bulk<'a>);",
            "pub struct List<'a>(pub rpcrdma::xdr::Array<'a, i32>);",
            "pub struct Lists<'a>(pub rpcrdma::xdr::Array<'a, List<'a>>);",
            "pub type Number = i32;",
            "pub type Maybe<'a> = Option<Data<'a>>;",
        ] {
            assert!(text.contains(item), "{item} with {used}: {text}");
        }
        if used.contains("netobj") {
            let item = "pub struct Netobj<'a>(pub &'a [u8]);";
            assert!(text.contains(item) && text.contains("pub one: Netobj<'a>"), "{text}");
            assert!(text.contains("type Args<'a> = super::Netobj<'a>;"), "{text}");
        }
    }
}

#[test]
fn versions_of_two_programs_are_two_modules() {
    let program = |name, number| format!("program {name} {{ version V1 {{ void NULL(void) = 0; }} = 1; }} = {number};");
    let all = code(&[program("A", 1), program("B", 2)].concat(), "", &Options::default());
    assert!(all.contains("pub mod a_v1 {") && all.contains("pub mod b_v1 {"), "{all}");
}

#[test]
fn comments_show_as_they_are() {
    let types = code("/* - <T> [x] *\n * 1. `#`\n */\nstruct a { int x; };", "", &Options::types_only());
    assert!(types.contains("/// \\- \\<T\\> \\[x\\]"), "{types}");
}

#[test]
fn the_program_writes_a_file_or_shows_errors() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = |name: &str| dir.path().join(name).to_str().expect("a path").to_owned();
    let (x, placement, out) = (path("small.x"), path("other.toml"), path("out.rs"));
    fs::write(&x, X).expect("written");
    fs::write(&placement, PLACEMENT).expect("written");
    let done = xdrgen(&[&x, "--placement", &placement, "-o", &out]);
    assert!(done.status.success(), "{done:?}");
    assert_eq!(fs::read_to_string(&out).expect("written"), GOLDEN);

    let done = xdrgen(&[&x, "--types-only"]);
    let types = String::from_utf8(done.stdout).expect("text");
    assert!(done.status.success() && types.contains("pub struct Pair<'a>"), "{types}");

    fs::write(path("other.placement.toml"), "").expect("written");
    let done = xdrgen(&[&x, "--types-only"]);
    let warnings = String::from_utf8(done.stderr).expect("text");
    assert!(done.status.success() && warnings.starts_with("warning: ") && warnings.contains("other.pl"), "{warnings}");

    fs::write(&x, "struct a { b c; };").expect("written");
    let done = xdrgen(&[&x]);
    let errors = String::from_utf8(done.stderr).expect("text");
    assert!(!done.status.success() && errors.contains("small.x:1:12") && errors.contains("^"), "{errors}");
    let done = xdrgen(&[&path("none.x")]);
    assert!(String::from_utf8_lossy(&done.stderr).contains("none.x: No such file"), "{done:?}");
}
