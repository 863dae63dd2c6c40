//! Each rule of RFC 4506 §6 and RFC 5531 §12, the extensions, and errors.

use xdrgen::Schema;
use xdrgen::schema::{Form, Type, TypeId};

fn schema(text: &str) -> Schema {
    crate::schema(text, None)
}

fn errors(text: &str) -> String {
    crate::errors(text, None)
}

fn titles(text: &str) -> Vec<String> {
    crate::titles(text, None)
}

/// The form of a named type.
fn form<'s>(schema: &'s Schema, name: &str) -> &'s Form {
    &schema.types.iter().find(|def| def.name.text == name).unwrap_or_else(|| panic!("no {name}")).form
}

/// The types of a structure's fields.
fn fields(text: &str) -> Vec<Type> {
    let schema = schema(&format!("const N = 3; struct other {{ int i; }}; struct t {{ {text} }};"));
    match form(&schema, "t") {
        Form::Struct { fields, .. } => fields.iter().map(|field| field.ty.clone()).collect(),
        other => panic!("{other:?}"),
    }
}

fn field(text: &str) -> Type {
    let mut fields = fields(text);
    assert_eq!(fields.len(), 1);
    fields.remove(0)
}

const OTHER: TypeId = TypeId(0);

#[test]
fn integer_types_are_parsed() {
    let expected = [
        ("int x;", Type::Int),
        ("unsigned int x;", Type::UnsignedInt),
        ("hyper x;", Type::Hyper),
        ("unsigned hyper x;", Type::UnsignedHyper),
        ("float x;", Type::Float),
        ("double x;", Type::Double),
        ("bool x;", Type::Bool),
    ];
    for (text, ty) in expected {
        assert_eq!(field(text), ty, "{text}");
    }
}

#[test]
fn integer_types_of_c_are_parsed() {
    let words = ["char x;", "short x;", "long x;", "int32_t x;"];
    assert!(words.iter().all(|text| field(text) == Type::Int));
    let words = ["unsigned x;", "unsigned char x;", "unsigned short x;", "unsigned long x;", "u_int x;", "uint32_t x;"];
    assert!(words.iter().all(|text| field(text) == Type::UnsignedInt));
    assert_eq!(fields("bool_t a; int64_t b; u_quad_t c;"), [Type::Bool, Type::Hyper, Type::UnsignedHyper]);
    let own = schema("typedef hyper u_int; typedef u_int x;");
    assert!(
        matches!(form(&own, "x"), Form::Alias(Type::Named(TypeId(0)))),
        "a definition takes precedence over a type of C"
    );
}

#[test]
fn opaque_and_string_types_are_parsed() {
    assert_eq!(field("opaque x[N];"), Type::FixedOpaque(3));
    assert_eq!(field("opaque x[0];"), Type::FixedOpaque(0));
    assert_eq!(field("opaque x<0x10>;"), Type::Opaque { max: Some(16), is_bulk: false });
    assert_eq!(field("opaque x<>;"), Type::Opaque { max: None, is_bulk: false });
    assert_eq!(field("string x<010>;"), Type::Text { max: Some(8), is_bulk: false });
    assert_eq!(field("string x<>;"), Type::Text { max: None, is_bulk: false });
}

#[test]
fn arrays_and_optional_data_are_parsed() {
    let other = || Box::new(Type::Named(OTHER));
    assert_eq!(field("other x[N];"), Type::FixedArray(other(), 3));
    assert_eq!(field("other x<N>;"), Type::Array(other(), Some(3)));
    assert_eq!(field("other x<>;"), Type::Array(other(), None));
    assert_eq!(field("other *x;"), Type::Optional(other()));
    assert_eq!(field("struct other x;"), Type::Named(OTHER));
    assert_eq!(fields("void;"), []);
}

#[test]
fn constants_have_their_values() {
    let schema = schema(
        "const A = 10; const B = -0x1F; const C = 017; const D = Z; const Z = 10; const T = \"text\";
#define no\n#define E 5 /* five */
#define F A2 + 1\n#define G E + 1\n enum e { H = A, I = -1, J, };",
    );
    let values: Vec<_> = schema.constants.iter().map(|found| (found.name.text.as_str(), found.value)).collect();
    assert_eq!(values, [("A", 10), ("B", -31), ("C", 15), ("D", 10), ("Z", 10), ("E", 5), ("G", 6)]);
    let Form::Enum(values) = form(&schema, "e") else { panic!() };
    assert_eq!(values.iter().map(|value| value.value).collect::<Vec<_>>(), [10, -1, 0]);
}

#[test]
fn nested_types_have_names() {
    let schema = schema(
        "struct a { enum { X = 1 } kind; union switch (bool b) { case TRUE: struct { int i; } c; default: void; } u; };
        typedef enum { Y = 2 } named; typedef struct { int i; } many<5>;",
    );
    let names: Vec<_> = schema.types.iter().map(|def| def.name.text.as_str()).collect();
    assert_eq!(names, ["a_kind", "a_u_c", "a_u", "a", "named", "many_item", "many"]);
}

#[test]
fn unions_have_arms_and_a_default() {
    let schema = schema(
        "enum e { A, B, C }; typedef e alias;
        union u switch (alias tag) { case A: case 1: int x; case C: void; };
        union v switch (int tag) { case 0: default: hyper y; };
        union w switch (unsigned tag) { case 0xffffffff: int x; default: void; };",
    );
    let Form::Union(u) = form(&schema, "u") else { panic!() };
    let cases: Vec<_> = u.arms[0].cases.iter().map(|case| (case.name.text.as_str(), case.value)).collect();
    assert_eq!(cases, [("A", 0), ("1", 1)]);
    assert!(u.arms[1].field.is_none() && u.default.is_none());
    let Form::Union(v) = form(&schema, "v") else { panic!() };
    let default = v.default.as_ref().and_then(Option::as_ref).expect("a default");
    assert_eq!((v.arms.len(), &default.ty), (1, &Type::Hyper));
    let Form::Union(w) = form(&schema, "w") else { panic!() };
    assert!(matches!(w.default, Some(None)));
}

#[test]
fn pointers_to_the_own_structure_are_lists() {
    let own = "struct node { int i; node *next; }; struct t { node *nodes; };";
    let typedef = "typedef struct node *list; struct node { int i; list next; }; struct t { list nodes; };";
    let rfc1833 = "struct *list { int i; list next; }; struct t { list nodes; };";
    for text in [own, typedef, rfc1833] {
        let schema = schema(text);
        let lists: Vec<_> =
            schema.types.iter().filter(|def| matches!(def.form, Form::Struct { is_list: true, .. })).collect();
        assert_eq!(lists.len(), 1, "{text}");
        assert!(matches!(&lists[0].form, Form::Struct { fields, .. } if fields.len() == 1), "{text}");
        let Form::Struct { fields, .. } = form(&schema, "t") else { panic!() };
        assert!(matches!(schema.resolve(&fields[0].ty), Type::List(_)), "{text}");
    }
}

#[test]
fn recursion_that_is_not_a_list_is_a_recursive_type() {
    let recursive = |id| Type::Recursive(TypeId(id));
    let first_field = |text: &str, name: &str| {
        let schema = schema(text);
        match form(&schema, name) {
            Form::Struct { fields, is_list: false } => fields[0].ty.clone(),
            Form::Union(union) => union.arms[0].field.clone().expect("an arm").ty,
            Form::Alias(ty) => ty.clone(),
            other => panic!("{other:?}"),
        }
    };
    let pointer = |id| Type::Optional(Box::new(recursive(id)));
    assert_eq!(first_field("struct a { a *first; int i; };", "a"), pointer(0));
    assert_eq!(first_field("struct a { b x; }; struct b { a *x; int i; };", "b"), pointer(0));
    // A structure with two pointers is a tree, not a list.
    assert_eq!(first_field("struct tree { tree *left; tree *right; };", "tree"), pointer(0));
    assert_eq!(first_field("struct a { a x<>; };", "a"), Type::Array(Box::new(recursive(0)), None));
    // A typedef of a pointer stays a pointer.
    assert_eq!(first_field("typedef struct a *p; struct a { p x; int i; };", "p"), pointer(1));
    assert_eq!(
        first_field("union a switch (int i) { case 1: b x; default: void; }; struct b { a y; };", "b"),
        recursive(0)
    );
    let by_value = schema("struct a { int i; a *next; }; struct b { a x; }; typedef a c<>;");
    assert!(by_value.warnings[0].contains("at most 64 of them can follow each other"), "{:?}", by_value.warnings);
    assert!(matches!(form(&by_value, "a"), Form::Struct { is_list: false, .. }));
}

#[test]
fn recursion_without_end_or_of_large_types_is_refused() {
    for text in ["struct a { a x; };", "struct a { b x; }; struct b { a y[2]; };", "typedef a b; typedef b a;"] {
        let titles = titles(text);
        assert!(titles.iter().all(|title| title.ends_with("contains another one")), "{text}: {titles:?}");
    }
    let large = "struct a { opaque x[2000]; a *left; a *right; };";
    let title = &titles(large)[0];
    assert!(
        title.starts_with("`a` contains itself, and with the types in it takes ") && title.contains("2048"),
        "{title}"
    );
}

#[test]
fn dialects_of_other_compilers_are_parsed() {
    let text = "namespace one { typedef string key; struct ahead; } pragma header nfs4; pragma big_endian a;
        namespace two { struct a { zcopaque data<9>; zcopaque rest; zcopaque id[4]; key name; };
        union cb switch (unsigned flavor) { case AUTH_NONE: void; case AUTH_SYS: authsys_parms sys;
        case RPCSEC_GSS: int gss; };
        program P { version V { int getport() = 1; void f() = 2; int add(int a, unsigned hyper b) = 3;
        string name(string from<5>, opaque to<>, opaque<4> with, key *last) = 4; } = 1; } = 1; };";
    let schema = schema(text);
    let bulk = |max| Type::Opaque { max, is_bulk: true };
    let Form::Struct { fields, .. } = form(&schema, "a") else { panic!() };
    let types: Vec<_> = fields.iter().map(|field| field.ty.clone()).collect();
    assert_eq!(types[..3], [bulk(Some(9)), bulk(None), Type::FixedOpaque(4)]);
    let Form::Struct { fields, .. } = form(&schema, "authsys_parms") else { panic!() };
    assert_eq!(fields[1].ty, Type::Text { max: Some(255), is_bulk: false });
    let Form::Union(cb) = form(&schema, "cb") else { panic!() };
    assert_eq!(cb.arms.iter().map(|arm| arm.cases[0].value).collect::<Vec<_>>(), [0, 1, 6]);
    let arguments: Vec<_> =
        schema.programs[0].versions[0].procedures.iter().map(|procedure| procedure.arguments.clone()).collect();
    assert_eq!(arguments[..3], [vec![], vec![], vec![Type::Int, Type::UnsignedHyper]]);
    let opaque = |max| Type::Opaque { max, is_bulk: false };
    assert_eq!(arguments[3][..3], [Type::Text { max: Some(5), is_bulk: false }, opaque(None), opaque(Some(4))]);
    assert!(matches!(arguments[3][3], Type::Optional(_)));
}

#[test]
fn zero_copy_opaque_of_elements_stays_in_the_message() {
    let schema = schema("struct a { zcopaque x<4>; }; struct b { a many<3>; a *one; }; struct c { zcopaque y<4>; };");
    for (name, is_bulk) in [("a", false), ("c", true)] {
        let Form::Struct { fields, .. } = form(&schema, name) else { panic!() };
        assert_eq!(fields[0].ty, Type::Opaque { max: Some(4), is_bulk }, "{name}");
    }
}

#[test]
fn names_of_two_namespaces_must_differ() {
    let text = "namespace one { struct a { int x; }; }\nnamespace two { struct a { int x; }; }";
    assert_eq!(titles(text), ["`a` is defined twice"]);
    assert_eq!(titles("namespace one {"), ["this namespace has no `}`"]);
    assert_eq!(titles("}"), ["expected a definition, found `}`"]);
    assert!(titles(&"namespace a {".repeat(20_000)).len() == 1);
}

#[test]
fn programs_have_versions_and_procedures() {
    let schema = schema(
        "/* P's. */\nprogram P {\n version V1 { void NULL(void) = 0; int ADD(int, unsigned hyper) = 1; } = 1;
        version V2 { string NAME(string) = 7; opaque RAW(opaque<5>) = 8; a A(struct a) = 9; } = 0x2;\n} = 0x20000000;
        struct a { int i; };",
    );
    let program = &schema.programs[0];
    assert_eq!((program.number, program.name.doc.as_slice()), (0x2000_0000, &["P's.".to_owned()][..]));
    let [v1, v2] = program.versions.as_slice() else { panic!() };
    assert_eq!((v1.number, v2.number), (1, 2));
    assert_eq!(v1.procedures[0].arguments, []);
    assert_eq!(v1.procedures[0].results, Type::Void);
    assert_eq!(v1.procedures[1].arguments, [Type::Int, Type::UnsignedHyper]);
    let text = Type::Text { max: None, is_bulk: false };
    assert_eq!((&v2.procedures[0].arguments[0], &v2.procedures[0].results), (&text, &text));
    assert_eq!(v2.procedures[1].arguments, [Type::Opaque { max: Some(5), is_bulk: false }]);
    assert_eq!(v2.procedures[2].results, Type::Named(OTHER));
}

#[test]
fn comments_are_documentation() {
    let schema = schema(
        "/* A licence. */\n\n/*\n * Two\n * lines.\n */\nstruct a { /* not this */\n  int x; /* after x */\n  /* before y */\n  \
        int y;\n\n  /* apart */\n\n  int z;\n};\nenum e { /* of e */\n A = 1, // first\n B = 2 /* last */\n};",
    );
    assert_eq!(schema.types[0].name.doc, ["Two", "lines."]);
    let Form::Struct { fields, .. } = &schema.types[0].form else { panic!() };
    let docs: Vec<_> = fields.iter().map(|field| field.name.doc.join("|")).collect();
    assert_eq!(docs, ["after x", "before y", ""]);
    assert_eq!(schema.types[1].name.doc, ["of e"]);
    let Form::Enum(values) = &schema.types[1].form else { panic!() };
    assert_eq!([&values[0].name.doc[0], &values[1].name.doc[0]], ["first", "last"]);
}

#[test]
fn conditions_select_definitions() {
    let text = "%#define HIDDEN 4\n%#define SUM HIDDEN+1\n#include <a.h>\n#ifdef RPC_HDR\n%junk\n$ junk\n#else\ntypedef int a;\n#endif
#define ON 1\n#if ON\n#ifndef OFF\ntypedef int b[SUM];\n#elif 1\njunk\n#endif\n#if !defined(ON)\n#if 1\njunk\n#endif\n#endif
#else\njunk\n#endif\n#if 0\njunk\n#elif !OFF\ntypedef int c;\n#endif\n";
    let schema = schema(text);
    let names: Vec<_> = schema.types.iter().map(|def| def.name.text.as_str()).collect();
    assert_eq!(names, ["a", "b", "c"]);
    assert!(matches!(form(&schema, "b"), Form::Alias(Type::FixedArray(_, 5))));
    assert_eq!(schema.constants.len(), 1, "hidden constants are not in the schema");
    assert_eq!(
        titles("#endif\n#if A > 1\n#endif\n#ifdef B\n#foo\n"),
        ["`#endif` without `#if`", "unsupported condition", "this condition has no `#endif`",]
    );
}

#[test]
fn undef_ends_a_definition() {
    let text = "#define L 4\nstruct s { opaque x[L]; };\n#undef L\n#ifdef L\njunk\n#elifndef L\n#define L 6\n#endif
typedef opaque t[L];\n#undef L\n#undef NONE\n#define M 1\n#define SUM M+1\n#undef M\n#define M 1\n#undef SUM\n#define L 8\n
typedef opaque u[L];\nenum e { SUM = L };\n#if L\n#undef L\n#else\njunk\n#endif\nconst L = 9;\ntypedef opaque v[L];\n";
    let schema = schema(text);
    let Form::Struct { fields, .. } = form(&schema, "s") else { panic!() };
    assert_eq!(fields[0].ty, Type::FixedOpaque(4));
    for (name, len) in [("t", 6), ("u", 8), ("v", 9)] {
        assert!(
            matches!(form(&schema, name), Form::Alias(Type::FixedOpaque(found)) if *found == len),
            "{name}: {schema:?}"
        );
    }
    let Form::Enum(values) = form(&schema, "e") else { panic!() };
    assert_eq!(values[0].value, 8);
    let constants: Vec<_> = schema.constants.iter().map(|found| (&*found.name.text, found.value)).collect();
    assert_eq!(constants, [("M", 1), ("L", 9)]);

    for (text, title) in [
        ("#define L 4\n#undef L\ntypedef opaque a[L];", "unknown constant `L`"),
        ("#define L 4\n#define L 6\n", "`L` is defined twice"),
        (
            "#define L 4\n#define M L+1\n#undef L\n#define L 6\n",
            "`L` has a new value, but another `#define` line uses the last one",
        ),
    ] {
        assert_eq!(titles(text), [title], "{text}");
    }
}

#[test]
fn preprocessor_lines_have_an_effect_or_are_reported() {
    for (text, title) in [
        ("#ifndef X\n  # error X is \\\n needed: http://x\n#endif\n", "#error X is needed: http://x"),
        ("#undef 1X\n", "invalid name `1X` in `#undef`"),
        ("#define 1X 3\n", "`#define` without a name"),
        ("#define A 18446744073709551615\n#define B A + 1\n", "value of `B` exceeds 64 bits"),
        ("#define A -9223372036854775808\n#define B A + -1\n", "value of `B` exceeds 64 bits"),
        ("#define A 99999999999999999999999999999999999999999\n", "value of `A` exceeds 64 bits"),
        ("#define A (1)\n#if A\n#endif\n", "unsupported condition"),
        ("#if 99999999999999999999\n#endif\n", "unsupported condition"),
        ("#if 4u\n#endif\n", "unsupported condition"),
        ("#ifdef\n#endif\n", "unsupported condition"),
    ] {
        assert_eq!(titles(text), [title], "{text}");
    }
    let text = "#pragma once\n#ident \"a\"\n#pragma pack(1)\n#line 3 \"a\"\n#warning old\n
#if 0\n#error no\n#line 1\n#elifdef X\n#error no\n#elif 1\n#else\n#error no\n#endif\n%#error C\n#define A 18446744073709551615+-1\n";
    let warnings = ["t.x:3: `#pragma pack(1)` is ignored", "t.x:4: `#line 3 \"a\"` is ignored", "t.x:5: #warning old"];
    assert_eq!(schema(text).warnings, warnings);
}

#[test]
fn syntax_errors_name_the_expected_token() {
    let cases = [
        ("typedef quadruple q;", "`quadruple` is not supported: Rust has no such type"),
        ("typedef void;", "a named item cannot be `void`"),
        ("typedef string s[3];", "expected `<`, found `[`"),
        ("typedef opaque s;", "expected `[` or `<`, found `;`"),
        ("typedef int struct;", "expected a name, found `struct`"),
        ("typedef int x[];", "expected a number or constant, found `]`"),
        ("typedef int x[1 2];", "expected `]`, found `2`"),
        ("const A = 0x10000000000000000;", "`0x10000000000000000` is not an integer of 64 bits"),
        ("const A = 09;", "`09` is not an integer of 64 bits"),
        ("const A = ;", "expected a number or constant, found `;`"),
        ("const A = 1", "expected `;`, found the end of the file"),
        ("enum e { };", "expected a name, found `}`"),
        ("enum e { A B };", "expected `,` or `}`, found `B`"),
        ("union u switch (int i) { int x; };", "expected `case`, `default` or `}`, found `int`"),
        ("union u (int i) { };", "expected `switch`, found `(`"),
        ("program p { int x; } = 1;", "expected `version`, found `int`"),
        ("program p { version v { void f(int, void) = 1; } = 1; } = 1;", "`void` cannot follow another argument"),
        ("program p { version v { void f(void, int) = 1; } = 1; } = 1;", "expected `)`, found `,`"),
        (
            "program p { version v { void f(struct { int i; }) = 1; } = 1; } = 1;",
            "arguments and results need a type with a name",
        ),
        (&format!("const {} = 1;", "a".repeat(256)), "name is longer than 255 bytes"),
        ("int x;", "expected a definition, found `int`"),
        ("/* ", "unterminated comment"),
        ("const A = \"", "unterminated string"),
        ("@", "unexpected character `@`"),
    ];
    for (text, title) in cases {
        assert_eq!(titles(text)[0], title, "{text}");
    }
}

#[test]
fn unknown_names_and_invalid_numbers_are_errors() {
    let cases = [
        ("typedef a b;", "unknown type `a`"),
        ("typedef a a;", "unknown type `a`"),
        ("typedef int b[A];", "unknown constant `A`"),
        ("const A = B; typedef int b[A];", "unknown constant `B`"),
        ("const A = 1; typedef A b;", "`A` is a constant, not a type"),
        ("typedef int a; const A = a;", "`a` is a type, not a constant"),
        ("const A = \"a\"; typedef int b[A];", "`A` is a string, not a number"),
        ("const A = 1; typedef int A;", "`A` is defined twice"),
        ("enum a { A = 1 }; enum b { A = 1 };", "`A` is defined twice"),
        ("typedef int a<-1>;", "bound `-1` is not in 0..=4294967295"),
        ("const A = 0x100000000; typedef int a[A];", "length `A` (4294967296) is not in 0..=4294967295"),
        ("enum a { A = 0x80000000 };", "value of `A` is not in -2147483648..=2147483647"),
        ("enum a { A = 0x7fffffff, B };", "value of `B` is not in -2147483648..=2147483647"),
        ("struct a { int x; int x; };", "`x`: the field name is used twice"),
        ("union a switch (int i) { case 1: int x; case 2: int x; };", "`x`: the arm name is used twice"),
        ("union a switch (int i) { case 1: int x; case 1: int y; };", "case `1` is used twice"),
        ("union a switch (int i) { default: int x; default: int y; };", "the union on `i` has two default arms"),
        ("union a switch (int i) { default: int x; };", "union `a` has no case"),
        ("union a switch (bool i) { case 2: void; };", "`2` is not a value of `i`"),
        ("union a switch (unsigned i) { case -1: void; };", "`-1` is not a value of `i`"),
        ("enum e { A }; union a switch (e i) { case 1: void; };", "`1` is not a value of `i`"),
        ("union a switch (hyper i) { case 1: void; };", "union `a` cannot switch on `i`"),
        (
            "program a { version b { void c(void) = 1024; } = 1; } = 1;",
            "procedure number 1024 exceeds 1023, the engine's limit",
        ),
        ("program a { } = 1; program b { } = 1;", "`b`: the program number is used twice"),
        ("program a { version b { } = 1; version c { } = 1; } = 1;", "`c`: the version number is used twice"),
        (
            "program a { version b { void c(void) = 1; void d(void) = 1; } = 1; } = 1;",
            "`d`: the procedure number is used twice",
        ),
    ];
    for (text, title) in cases {
        assert_eq!(titles(text), [title], "{text}");
    }
}

#[test]
fn sizes_of_types_and_numbers_of_arguments_are_bounded() {
    let many =
        |count| format!("program p {{ version v {{ int f({}) = 1; }} = 1; }} = 1;", vec!["int"; count].join(", "));
    schema(&many(12));
    assert_eq!(titles(&many(13)), ["13 arguments exceed 12"]);
    schema("typedef int a[8192];");
    for (text, title) in [
        ("typedef int a[8193];", "`a` takes 32772 bytes by value, which exceeds 32768"),
        ("typedef opaque a[4096]; typedef a b[128];", "`b` takes 524288 bytes by value, which exceeds 32768"),
        ("typedef string s<>; struct a { s x[2000]; };", "`a` takes 48000 bytes by value, which exceeds 32768"),
        (
            "typedef opaque a[30000]; struct b { a x; }; struct c { b x; }; struct d { c x; };",
            "`d` with the types in it takes 150000 bytes by value, which exceeds 131072",
        ),
        (
            "typedef int a[5000]; program p { version v { void f(a, a) = 1; } = 1; } = 1;",
            "arguments of `f` take 40000 bytes by value, which exceeds 32768",
        ),
        ("typedef opaque a[0]; typedef a b<>;", "elements of `b` have an empty encoding"),
        (
            "struct e { opaque x[0]; }; union u switch (int i) { case 1: e b<5>; };",
            "elements of `b` have an empty encoding",
        ),
    ] {
        assert_eq!(titles(text), [title], "{text}");
    }
}

#[test]
fn constants_have_64_bits_with_or_without_sign() {
    let text =
        "const A = 0xFFFFFFFFFFFFFFFF;\nconst B = -0x8000000000000000;\n#define C A+0\n#define D 0x8000000000000000\n";
    let found: Vec<_> = schema(text).constants.iter().map(|constant| constant.value).collect();
    assert_eq!(found, [u64::MAX.into(), i64::MIN.into(), 1 << 63]);
    assert_eq!(titles("const A = -0x8000000000000001;"), ["`-0x8000000000000001` is not an integer of 64 bits"]);
}

#[test]
fn a_dropped_include_is_a_warning() {
    let text = "\n#include \"other.x\" /* its types */\n%#include <c.h>\n#ifdef RPC_HDR\n#include <d.h>\n#endif\n";
    let warning = "t.x:2: `#include \"other.x\"` is dropped: copy the definitions of that file into this one";
    assert_eq!(schema(text).warnings, [warning]);
}

#[test]
fn nesting_is_bounded() {
    let deep = "struct { ".repeat(20_000);
    assert_eq!(titles(&format!("struct a {{ {deep}")), ["types are nested more than 16 deep"]);
    let chain: String = (0..20_000).map(|i| format!("typedef t{} t{i};\n", i + 1)).collect();
    assert_eq!(titles(&(chain + "typedef int t20000;"))[0], "types in `t0` are nested more than 64 deep");
    assert_eq!(titles(&"$\n".repeat(20_000)).len(), 20);
    assert!(errors(&"$\n".repeat(20_000)).ends_with("\n\n19980 more errors"));
    assert!(titles(&"#if 1\n".repeat(20_000)).len() == 1);
}

#[test]
fn errors_show_the_line_and_mark_the_position() {
    let text = "/* Réseau */\nstruct a {\n\tint x\n};\nconst 5 = 1;\ntypedef int fine;\nprogram p {\n} = 1\n";
    let expected = "\
error: expected `;`, found `}`
 --> t.x:3:7
  |
3 |     int x
  |          ^

error: expected a name, found `5`
 --> t.x:5:7
  |
5 | const 5 = 1;
  |       ^

error: expected `;`, found the end of the file
 --> t.x:8:6
  |
8 | } = 1
  |      ^";
    assert_eq!(errors(text), expected);
    let text = "struct a {\n\tint x;\n\tmissing é;\n};\nstruct b { int i; };\n\n\n\n\nstruct a { int i; };\n";
    assert_eq!(titles(text), ["unexpected character `é`"]);
    let expected = "\
error: unknown type `missing`
 --> t.x:3:2
  |
3 |     missing y;
  |     ^^^^^^^

error: `a` is defined twice
  --> t.x:10:8
   |
 1 | struct a {
   |        - first here
...
10 | struct a { int i; };
   |        ^";
    assert_eq!(errors(&text.replace('é', "y")), expected);
    let expected = "\
error: every value of `tree` contains another one
 --> t.x:1:8
  |
1 | struct tree { tree left; int value; };
  |        ^^^^
  |
  = help: a pointer, an array of variable length or an arm without it ends the recursion";
    assert_eq!(errors("struct tree { tree left; int value; };"), expected);
}
