//! Placement files: limits of procedures, eligible items, and errors.

use xdrgen::schema::{Eligible, Form, Placement, Procedure, Run, Type};

use crate::{errors, schema, titles};

const XDR: &str = "\
typedef string name<>;
struct attributes { unsigned hyper size; int mode; };
union maybe switch (bool known) { case TRUE: attributes value; case FALSE: void; };
struct read_args { name file; unsigned int count; };
struct read_ok { maybe attributes; opaque data<>; };
union read_results switch (int status) { case 0: read_ok ok; default: maybe failed; };
struct write_args { name file; opaque first<8192>; opaque second<4096>; int after; };
struct entry { name file; entry *next; };
program FILES {
    version FILES_V1 {
        read_results READ(read_args) = 1;
        void WRITE(write_args) = 2;
        entry_list LIST(void) = 3;
    } = 1;
} = 400000;
typedef entry *entry_list;
";

const PLACEMENT: &str = "\
eligible = ['read_ok.data', 'write_args.first', 'write_args.second']
[bounds]
name = 255
'read_ok.data' = 1_048_576
[FILES_V1.READ]
max_inline_result = 3940
run = 'workers'
[FILES_V1.WRITE]
cached = true
max_call = 200
run = 'deferred'
[FILES_V1.LIST]
max_reply = 8192
";

/// Limits of READ and LIST.
const LIMITS: &str = "[FILES_V1.READ]\nmax_reply = 99\n[FILES_V1.LIST]\nmax_reply = 99\n";

fn procedures(xdr: &str, placement: Option<&str>) -> Vec<Procedure> {
    schema(xdr, placement)
        .programs
        .into_iter()
        .flat_map(|program| program.versions)
        .flat_map(|version| version.procedures)
        .collect()
}

#[test]
fn limits_come_from_types_and_the_placement_file() {
    let found: Vec<Placement> = procedures(XDR, Some(PLACEMENT)).into_iter().map(|found| found.placement).collect();
    let maybe = 4 + 12;
    let read = Placement {
        results: Some(Eligible { count: 1, max_len: 1 << 20 }),
        max_inline_result: Some(3940),
        max_call: 4 + 256 + 4,
        max_reply: 4 + maybe + 4,
        head: 4 + maybe + 4,
        run: Run::Workers,
        ..Placement::default()
    };
    let write = Placement {
        arguments: Some(Eligible { count: 2, max_len: 8192 }),
        max_call: 200,
        cached: true,
        run: Run::Deferred,
        ..Placement::default()
    };
    let list = Placement { max_reply: 8192, ..Placement::default() };
    assert_eq!(found, [read, write, list]);
}

#[test]
fn limits_have_defaults_without_a_placement_file() {
    let found: Vec<_> = procedures(XDR, None).into_iter().map(|found| found.placement).collect();
    let limits: Vec<_> = found.iter().map(|found| (found.max_call, found.max_reply)).collect();
    assert_eq!(limits, [(65536, 65536), (65536, 0), (0, 65536)]);
    assert!(found.iter().all(|found| found.arguments.is_none() && found.results.is_none()));
}

/// The first eligible item follows a union that may also have one.
#[test]
fn the_head_includes_a_union_without_its_item() {
    let xdr = "union u switch (int i) { case 0: opaque a<8>; default: int b[5]; };
        struct r { u first; int c; opaque d<8>; };
        program P { version V { r F(void) = 1; } = 1; } = 1;";
    let found = procedures(xdr, Some("eligible = ['u.a', 'r.d']"));
    assert_eq!(found[0].placement.results, Some(Eligible { count: 2, max_len: 8 }));
    assert_eq!((found[0].placement.head, found[0].placement.max_reply), (4 + 20 + 4 + 4, 4 + 20 + 4 + 4));
    let found = procedures(xdr, Some("eligible = ['u.a']"));
    assert_eq!((found[0].placement.head, found[0].placement.max_reply), (4 + 4, 4 + 20 + 4 + 12));
}

#[test]
fn items_are_marked_through_typedefs() {
    let xdr = "typedef opaque data<>; typedef data same; struct a { same x; data y; int z<>; };";
    let schema = schema(xdr, Some("eligible = ['same']\nbounds = { data = 9, same = 5, 'a.z' = 7 }"));
    let Form::Struct { fields, .. } = &schema.types[2].form else { panic!() };
    assert_eq!(schema.resolve(&fields[0].ty), &Type::Opaque { max: Some(5), is_bulk: true });
    assert_eq!(schema.resolve(&fields[1].ty), &Type::Opaque { max: Some(9), is_bulk: false });
    assert_eq!(fields[2].ty, Type::Array(Box::new(Type::Int), Some(7)));
    // A field with its own placement would need another Rust type.
    for placement in ["eligible = ['a.x']\nbounds.data = 9", "bounds = { 'a.x' = 5 }"] {
        let found = errors(xdr, Some(placement));
        assert!(found.contains("`a.x` has the type `same`, which is one Rust type in all places"), "{found}");
        assert!(found.contains("help: name the typedef, `same`"), "{found}");
    }
    let schema = crate::schema(xdr, Some("eligible = ['data']\nbounds.data = 9"));
    assert_eq!(schema.resolve(&Type::Named(xdrgen::schema::TypeId(1))), &Type::Opaque { max: Some(9), is_bulk: true });
}

#[test]
fn a_bound_of_the_specification_is_narrowed_by_both_numbers() {
    let narrowed = "[bounds]\n'write_args.first' = { from = 8192, to = 64 }\nname = 9\n";
    let schema = schema(XDR, Some(&(narrowed.to_owned() + LIMITS)));
    let def = schema.types.iter().find(|def| def.name.text == "write_args").expect("a type");
    let Form::Struct { fields, .. } = &def.form else { panic!() };
    assert_eq!(fields[1].ty, Type::Opaque { max: Some(64), is_bulk: false });
}

#[test]
fn an_arm_that_is_also_the_default_has_one_placement() {
    let xdr = "union u switch (int i) { case 0: default: opaque a<>; };";
    let schema = schema(xdr, Some("eligible = ['u.a']\nbounds = { 'u.a' = 9 }"));
    let Form::Union(union) = &schema.types[0].form else { panic!() };
    for arm in [&union.arms[0].field, union.default.as_ref().expect("a default")] {
        let ty = arm.as_ref().map(|field| &field.ty);
        assert_eq!(ty, Some(&Type::Opaque { max: Some(9), is_bulk: true }));
    }
}

#[test]
fn one_way_procedures_have_no_results() {
    let placement = "[bounds]\nname = 9\n[FILES_V1.WRITE]\none_way = true\n".to_owned() + LIMITS;
    let one_way: Vec<_> =
        procedures(XDR, Some(&placement)).iter().map(|procedure| procedure.placement.one_way).collect();
    assert_eq!(one_way, [false, true, false]);
}

#[test]
fn invalid_placement_files_are_refused() {
    let cases = [
        ("eligible = ['none']", "unknown type `none`"),
        ("eligible = ['maybe.none']", "`maybe` has no field `none`"),
        ("eligible = ['attributes']", "`attributes` is not a typedef: name a field as `attributes.field`"),
        ("eligible = ['attributes.mode']", "`attributes.mode` is not an opaque or string of variable length"),
        ("eligible = ['read_ok.data']", "`read_ok.data` has no bound: give one in `[bounds]`"),
        ("eligible = ['name']\n[bounds]\nname = 5", "`name` cannot be eligible inside an array, list or optional data"),
        ("eligible = 'name'", "invalid type: string \"name\", expected a sequence"),
        ("[bounds]\n'attributes.mode' = 4", "`attributes.mode` is not an opaque, string or array of variable length"),
        ("[bounds]\n'write_args.first' = 8193", "8193 exceeds 8192, the specification's bound"),
        ("[bounds]\nname = -1", "expected a number, or `{ from = the specification's bound, to = a smaller one }`"),
        ("[bounds]\n'write_args.first' = 64", "`write_args.first` has the bound 8192 in the specification"),
        (
            "[bounds]\n'write_args.first' = { from = 4096, to = 64 }",
            "`write_args.first` has the bound 8192 in the specification, not 4096",
        ),
        (
            "[bounds]\n'write_args.first' = { from = 8192, to = 8192 }",
            "8192 is not less than 8192, the specification's bound",
        ),
        ("[bounds]\nname = { from = 9, to = 5 }", "`name` has no bound in the specification, not 9"),
        ("[FILES_V1.READ]\none_way = true", "a one-way procedure has no results"),
        ("[FILES_V1.WRITE]\none_way = true\ncached = true", "a one-way procedure has no cached replies"),
        (
            "eligible = ['write_args.first']\n[FILES_V1.WRITE]\none_way = true",
            "a one-way procedure has no eligible arguments",
        ),
        ("[FILES_V2.READ]", "unknown key `FILES_V2`: expected `eligible`, `bounds`, a version or a program"),
        ("[FILES_V1.REED]", "`FILES_V1` has no procedure `REED`"),
        (
            "[FILES_V1.READ]\nmax = 1",
            "unknown field `max`, expected one of `max_call`, `max_reply`, `max_inline_result`, `cached`, `one_way`, `run`",
        ),
        (
            "[FILES_V1.READ]\nrun = 'here'",
            "unknown variant `here`, expected one of `shard`, `workers`, `deferred`, `async`",
        ),
        ("[FILES_V1.WRITE]\nmax_reply = 1", "1 exceeds 0, the types' bound"),
        ("[FILES_V1.READ]\nmax_call = 3", "3 is less than 8, the shortest of all calls"),
        ("[FILES_V1.READ]\nmax_inline_result = 1", "1 exceeds 0, all eligible results"),
        ("[bounds]\nname = 4\n[FILES_V1.READ]\n", "replies of `READ` have no limit: `read_ok.data` has no bound"),
        ("[bounds]\n'read_ok.data' = 4", "calls of `READ` have no limit: `name` has no bound"),
        ("", "replies of `LIST` have no limit: list of `entry` has no bound"),
        (
            "eligible = ['read_ok.data']\n[bounds]\n'read_ok.data' = 9\n[FILES_V1.READ]\ncached = true",
            "a procedure with eligible results cannot be cached",
        ),
        ("eligible = [", "unclosed array, expected `]`"),
    ];
    for (placement, title) in cases {
        let titles = titles(XDR, Some(placement));
        assert!(titles.iter().any(|found| found == title), "{placement}: {titles:#?}");
    }
    let five = "struct a { opaque a<1>; opaque b<1>; opaque c<1>; opaque d<1>; opaque e<1>; };
        program P { version V { void F(a) = 1; } = 1; } = 1;";
    let titles = titles(five, Some("eligible = ['a.a', 'a.b', 'a.c', 'a.d', 'a.e']"));
    assert_eq!(titles, ["calls of `F` have 5 eligible items, limit 4"]);
}

#[test]
fn errors_show_the_line_and_mark_the_position() {
    let placement = "eligible = ['read_ok.data']\n\n[bounds]\nname = 255\n\n[FILES_V1.WRITE]\ncashed = true\n";
    let expected = "\
error: `read_ok.data` has no bound: give one in `[bounds]`
 --> t.placement.toml:1:13
  |
1 | eligible = ['read_ok.data']
  |             ^^^^^^^^^^^^^^

error: unknown field `cashed`, expected one of `max_call`, `max_reply`, `max_inline_result`, `cached`, `one_way`, `run`
 --> t.placement.toml:7:1
  |
7 | cashed = true
  | ^^^^^^";
    assert_eq!(errors(XDR, Some(placement)), expected);
    let expected = "\
error: replies of `LIST` have no limit: list of `entry` has no bound
  --> t.x:13:20
   |
13 |         entry_list LIST(void) = 3;
   |                    ^^^^
   |
   = help: give `max_reply` under `[FILES_V1.LIST]` in the placement file";
    let bounds = "bounds = { name = 255, 'read_ok.data' = 9 }\n";
    assert_eq!(errors(XDR, Some(bounds)), expected);
    let by_bound = errors(XDR, Some("[FILES_V1.LIST]\nmax_reply = 9"));
    assert!(by_bound.contains("`[FILES_V1.READ]` in the placement file, or `[bounds]`"), "{by_bound}");
}

#[test]
fn versions_of_one_name_are_distinguished_by_their_programs() {
    let xdr = "program A { version V { void F(int) = 1; } = 1; version W { void F(int) = 1; } = 2; } = 1;
        program B { version V { void F(int) = 1; } = 1; } = 2;";
    let workers =
        |placement| procedures(xdr, Some(placement)).iter().map(|f| f.placement.run == Run::Workers).collect();
    let found: Vec<bool> = workers("[B.V.F]\nrun = 'workers'\n[W.F]\nrun = 'workers'");
    assert_eq!(found, [false, true, true]);
    let found: Vec<bool> = workers("[A.V]\nF = { run = 'workers' }\n[A.W.F]\n");
    assert_eq!(found, [true, false, false]);
    let several = "`V` is a version of several programs: write `A.V` or `B.V`";
    assert_eq!(titles(xdr, Some("[V.F]\nrun = 'workers'")), [several]);
    assert_eq!(titles(xdr, Some("[B.W.F]")), ["program `B` has no version `W`"]);
    let twice = "`F` has two entries: by its version, and by its program and version";
    assert_eq!(titles(xdr, Some("[A.W.F]\n[W.F]")), [twice]);
}
