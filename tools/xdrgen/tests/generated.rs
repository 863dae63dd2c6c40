//! Tests of the text of generated code, and of the program `xdrgen`.
//!
//! This command records changed code: `xdrgen tools/xdrgen/tests/golden/small.x -o tools/xdrgen/tests/golden/small.rs`.

use std::fs::{self, OpenOptions, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
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
fn generated_code_equals_the_recorded_code() {
    for _ in 0..2 {
        let code = code(X, PLACEMENT, &Options::default());
        let differs = code.lines().zip(GOLDEN.lines()).position(|(new, old)| new != old);
        assert_eq!((differs, code.len()), (None, GOLDEN.len()), "the first line that differs, and the length");
    }
}

#[test]
fn paths_of_crates_come_from_the_options() {
    let types = code(X, PLACEMENT, &Options::types_only().xdr("crate::deep::xdr"));
    assert!(types.contains("impl crate::deep::xdr::Encode for Status {"), "{types}");
    assert!(!types.contains("rpcrdma") && !types.contains("pub mod"), "{types}");
    let all = code(X, PLACEMENT, &Options::default().engine("other"));
    assert!(all.contains("use other::typed::{self, Signature};"), "{all}");
}

#[test]
fn reserved_and_repeated_names_get_an_underscore() {
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
fn a_typedef_is_one_type_for_all_its_uses() {
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
fn comments_are_escaped_for_markdown() {
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
    let output = xdrgen(&[&x, "--placement", &placement, "-o", &out]);
    assert!(output.status.success(), "{output:?}");
    assert_eq!(fs::read_to_string(&out).expect("written"), GOLDEN);

    let output = xdrgen(&[&x, "--types-only"]);
    let types = String::from_utf8(output.stdout).expect("text");
    assert!(output.status.success() && types.contains("pub struct Pair<'a>"), "{types}");

    fs::write(path("other.placement.toml"), "").expect("written");
    let output = xdrgen(&[&x, "--types-only"]);
    let warnings = String::from_utf8(output.stderr).expect("text");
    assert!(
        output.status.success() && warnings.starts_with("warning: ") && warnings.contains("other.pl"),
        "{warnings}"
    );

    fs::write(&x, "struct a { b c; };").expect("written");
    let output = xdrgen(&[&x]);
    let errors = String::from_utf8(output.stderr).expect("text");
    assert!(!output.status.success() && errors.contains("small.x:1:12") && errors.contains("^"), "{errors}");
    let output = xdrgen(&[&path("none.x")]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("none.x: No such file"), "{output:?}");
}

#[test]
fn output_beyond_rlimit_fsize_is_an_error_that_names_it() {
    let dir = tempfile::tempdir().expect("a directory");
    let (x, out) = (dir.path().join("small.x"), dir.path().join("out.rs"));
    fs::write(&x, X).expect("written");
    let limited = || {
        let mut command = Command::new("bash");
        command.args(["-c", "ulimit -f 1 && exec \"$@\"", "bash", env!("CARGO_BIN_EXE_xdrgen")]).arg(&x);
        command
    };
    let to_file = limited().arg("-o").arg(&out).output().expect("it was built");
    let to_output = limited().stdout(fs::File::create(&out).expect("made")).output().expect("it was built");
    for (output, file) in [(to_file, "out.rs: "), (to_output, "standard output: ")] {
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        let limit = "(RLIMIT_FSIZE; `ulimit -f unlimited` lifts it)";
        assert!(errors.contains(&format!("{file}File too large")) && errors.contains(limit), "{errors}");
    }
}

#[test]
fn a_file_is_replaced_as_a_whole_or_not_at_all() {
    let dir = tempfile::tempdir().expect("a directory");
    let (x, out, link) = (dir.path().join("small.x"), dir.path().join("out.rs"), dir.path().join("link.rs"));
    let files = || fs::read_dir(dir.path()).expect("a directory").count();
    fs::write(&x, X).expect("written");
    fs::write(&out, "last").expect("written");
    fs::set_permissions(&out, Permissions::from_mode(0o640)).expect("set");
    symlink("out.rs", &link).expect("made");
    let run = |limit, out: &Path| {
        let arguments = ["-c", "ulimit -f $0 && exec \"$@\"", limit, env!("CARGO_BIN_EXE_xdrgen")];
        Command::new("bash").args(arguments).arg(&x).arg("-o").arg(out).output().expect("it was built")
    };
    for path in [&out, &link, &dir.path().join("new.rs")] {
        assert_eq!(run("1", path).status.code(), Some(1));
        assert_eq!((fs::read_to_string(&out).expect("a file").as_str(), files()), ("last", 3), "{path:?}");
    }
    assert!(run("unlimited", &link).status.success());
    assert!(fs::read_to_string(&out).expect("a file").contains("pub struct Pair") && link.is_symlink());
    assert_eq!((fs::metadata(&out).expect("a file").permissions().mode() & 0o777, files()), (0o640, 3));
    for device in ["/dev/stdout", "/dev/stderr"] {
        let output = run("unlimited", Path::new(device));
        assert_eq!([output.stdout, output.stderr].concat(), fs::read(&out).expect("a file"), "{device}");
    }
}

#[test]
fn output_that_is_not_written_is_an_error() {
    let dir = tempfile::tempdir().expect("a directory");
    let x = dir.path().join("small.x");
    fs::write(&x, X).expect("written");
    let x = x.to_str().expect("a path");
    let full = || OpenOptions::new().write(true).open("/dev/full").expect("a device");
    let to_output = Command::new(env!("CARGO_BIN_EXE_xdrgen")).arg(x).stdout(full()).output().expect("it was built");
    for (output, place) in [(to_output, "standard output"), (xdrgen(&[x, "-o", "/dev/full"]), "/dev/full")] {
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        assert!(errors.starts_with(&format!("{place}: No space left on device")), "{errors}");
    }
}

/// Writes files to a new directory, and compiles the first one. Returns the code, or standard error.
fn compile(files: &[(&str, &str)], arguments: &[&str]) -> Result<String, String> {
    let dir = tempfile::tempdir().expect("a directory");
    for (name, text) in files {
        let path = dir.path().join(name);
        fs::create_dir_all(path.parent().expect("a directory")).expect("made");
        fs::write(path, text).expect("written");
    }
    let path = dir.path().join(files[0].0);
    let output = xdrgen(&[&["--types-only", path.to_str().expect("a path")], arguments].concat());
    let text = |bytes| String::from_utf8(bytes).expect("text");
    if output.status.success() { Ok(text(output.stdout)) } else { Err(text(output.stderr)) }
}

#[test]
fn included_specifications_are_part_of_the_one_that_includes_them() {
    let files = [
        (
            "main.x",
            "%#include \"main.h\"\n#include \"sub/a.x\"\n#include \"b.x\"\nstruct m { a one; b two[SIZE]; c *d; };",
        ),
        ("sub/a.x", "/* Of a. */\n#include \"../b.x\"\nstruct a { b x; };\n"),
        (
            "b.x",
            "#ifndef B\n#define B\n#define SIZE 3\ntypedef opaque b[SIZE];\n#endif\n#ifdef RPC_HDR\n%#include \"c.h\"\n#endif",
        ),
        ("c.x", "#include \"c.h\"\nstruct c { int y; };"),
    ];
    let code = compile(&files, &[]).expect("code");
    for item in ["pub struct A {", "pub type B = ", "pub struct C {", "pub struct M {", "pub const SIZE: u32 = 3;"] {
        assert_eq!(code.matches(item).count(), 1, "{item}: {code}");
    }
    assert!(code.contains("pub two: [B; 3],"), "{code}");
}

#[test]
fn errors_name_the_included_file_and_its_line() {
    for (files, message, place) in [
        (
            &[("m.x", "\n#include \"a.x\"\n"), ("a.x", "\n\nstruct a { none x; };")][..],
            "unknown type `none`",
            "a.x:3:12",
        ),
        (
            &[("m.x", "#include \"a.x\"\nstruct m { none x; };"), ("a.x", "const A = 1;\n")],
            "unknown type `none`",
            "m.x:2:12",
        ),
        (&[("m.x", "\n#include \"none.x\"\n")], "cannot include `none.x`", "m.x:2:1"),
        (&[("m.x", "#include \".\"\n#include \"d.x\"\n"), ("d.x/a", "")], "d.x: not a regular file", "m.x:2:1"),
        (
            &[("m.x", "#include \"a.x\"\n"), ("a.x", "\n#include \"m.x\"\n")],
            "`m.x` includes itself, directly or by other files",
            "a.x:2:1",
        ),
        (&[("m.x", "#include \"a.x\"\n#endif"), ("a.x", "\n#if 1\n")], "this condition has no `#endif`", "a.x:2:1"),
        (
            &[("m.x", "#include \"a.x\"\n\nconst A = 2;"), ("a.x", "\nconst A = 1;\n")],
            "`A` is defined twice",
            "a.x:2:7",
        ),
    ] {
        let errors = compile(files, &[]).expect_err("no specification");
        assert!(errors.contains(message) && errors.contains(place), "{message} at {place}: {errors}");
    }
    let names: Vec<_> = (0..20).map(|i| (format!("f{i}.x"), format!("#include \"f{}.x\"\n", i + 1))).collect();
    let mut files: Vec<_> = names.iter().map(|(name, text)| (&**name, &**text)).collect();
    files.push(("f20.x", ""));
    let errors = compile(&files, &[]).expect_err("too deep");
    assert!(errors.contains("including `f16.x` exceeds 16 nested files"), "{errors}");
    let long = " ".repeat(9 << 20);
    let errors = compile(&[("m.x", &format!("#include \"a.x\"\n{long}")), ("a.x", &long)], &[]).expect_err("too long");
    assert!(errors.contains("a.x: a specification and its included files exceed 16777216 bytes"), "{errors}");
}

#[test]
fn names_are_defined_by_options() {
    let file = [(
        "m.x",
        "#ifdef WIDE\ntypedef opaque a[LEN];\n#else\ntypedef int a;\n#endif\n#if LEVEL\nstruct b { a x; };\n#endif\n",
    )];
    let code = compile(&file, &["-D", "WIDE", "-DLEN=0x10", "-D", "LEVEL=0"]).expect("code");
    assert!(code.contains("pub type A = [u8; 16];") && !code.contains("LEN") && !code.contains("struct B"), "{code}");
    assert!(compile(&file, &["-DLEVEL"]).expect("code").contains("pub x: A,"));
}

#[test]
fn definitions_of_options_are_names_and_numbers() {
    let file = [("m.x", "#define SIZE 3\nconst LEN = 4;\n%#define HIDDEN 5\ntypedef opaque a[HIDDEN];\n")];
    for (define, reason) in [
        ("=5", "`` is not a name"),
        ("", "`` is not a name"),
        ("1X=3", "`1X` is not a name"),
        ("FOO BAR=3", "`FOO BAR` is not a name"),
        ("LEN=4u", "`4u` is not an integer of 64 bits"),
        ("LEN=", "`` is not an integer of 64 bits"),
        ("LEN=18446744073709551616", "`18446744073709551616` is not an integer of 64 bits"),
        ("X=2", "another definition of `X` is 1"),
    ] {
        let errors = compile(&file, &["-D", "X", "-D", define]).expect_err("invalid");
        let error = format!("error: invalid value '{define}' for '-D <NAME[=VALUE]>': {reason}\n\nUsage: xdrgen ");
        assert!(errors.starts_with(&error), "{errors}");
    }
    for (define, name, place) in [("LEN=5", "LEN", "m.x:2:7"), ("SIZE", "SIZE", "m.x:1:1"), ("a=1", "a", "m.x:4:16")] {
        let errors = compile(&file, &["-D", define]).expect_err("defined twice");
        let error = format!("error: `{name}` is also defined by the option `-D {define}`\n");
        assert!(errors.starts_with(&error) && errors.contains(place), "{errors}");
    }
    let code = compile(&file, &["-DHIDDEN=7", "-DX", "-DX=1"]).expect("code");
    assert!(code.contains("pub type A = [u8; 7];"), "{code}");
    let file = [("m.x", "typedef opaque a[LEN];\n#undef LEN\n#ifndef LEN\nconst LEN = 4;\n#endif\n")];
    let code = compile(&file, &["-DLEN=7"]).expect("code");
    assert!(code.contains("pub type A = [u8; 7];") && code.contains("pub const LEN: u32 = 4;"), "{code}");
}
