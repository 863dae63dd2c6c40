//! Any text gives code or errors, but no panic.

use proptest::prelude::*;
use xdrgen::{Options, generate};

use crate::compile;

/// Pieces of specifications, from which many texts pass the lexer and the parser.
const PIECES: [&str; 66] = [
    "const",
    "typedef",
    "enum",
    "struct",
    "union",
    "program",
    "version",
    "switch",
    "case",
    "default",
    "void",
    "int",
    "unsigned",
    "hyper",
    "bool",
    "opaque",
    "string",
    "float",
    "double",
    "quadruple",
    "{",
    "}",
    "(",
    ")",
    "[",
    "]",
    "<",
    ">",
    ";",
    ":",
    ",",
    "=",
    "*",
    "a",
    "b",
    "c",
    "A",
    "B",
    "TRUE",
    "0",
    "1",
    "-1",
    "0x80000000",
    "99999999999",
    "18446744073709551615",
    "\"é\"",
    "/* é */",
    "/*",
    "// c\n",
    "\n",
    "\n#if 0\n",
    "\n#else\n",
    "\n#endif\n",
    "\n#elifdef A\n",
    "\n#define A 1\n",
    "\n#undef A\n",
    "\n#define B A+A\n",
    "\n%#define C 9223372036854775807+1\n",
    "\n% x\n",
    "é",
    "struct a { int i; a *next; };",
    "struct _1 { int _; };",
    "/* a\rb \u{202e} */ struct a { int _1[9000]; };",
    "union b switch (bool c) { case TRUE: string a<>; default: void; };",
    "typedef opaque c<>;",
    "program A { version B { a A(b, c) = 1; } = 1; } = 1;",
];

fn text() -> impl Strategy<Value = String> {
    let pieces = proptest::collection::vec(proptest::sample::select(&PIECES[..]), 0..60);
    prop_oneof![pieces.prop_map(|pieces| pieces.join(" ")), any::<String>()]
}

fn placement() -> impl Strategy<Value = String> {
    let pieces = [
        "eligible = ['b.a']\n",
        "eligible = ['c']\n",
        "eligible = ['a.i', 'é', 'b']\n",
        "[bounds]\n",
        "c = 5\n",
        "'b.a' = 0xffffffff\n",
        "'a.x' = 1\n",
        "c = -1\n",
        "[B.A]\n",
        "max_reply = 7\n",
        "max_call = 4294967296\n",
        "run = 'async'\n",
        "run = 'é'\n",
        "cached = true\n",
        "max_inline_result = 3\n",
        "é",
        "=",
        "[",
        "B = 3\n",
    ];
    let pieces = proptest::collection::vec(proptest::sample::select(pieces.to_vec()), 0..8);
    pieces.prop_map(|pieces| pieces.concat())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1024, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_text_gives_code_or_errors(text in text(), placement in proptest::option::of(placement())) {
        let shown = match compile(&text, placement.as_deref()) {
            Ok(schema) => generate(&schema, &Options::default()),
            Err(errors) => errors.to_string(),
        };
        prop_assert!(shown.starts_with("error: ") || shown.starts_with("// Generated"));
    }
}
