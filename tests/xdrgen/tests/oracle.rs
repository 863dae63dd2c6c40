//! Comparison with rpcgen: random values of each type are decoded and encoded by Rust and by C.

use std::fmt::Write as _;
use std::fs::{self, File as InputFile};
use std::path::Path;
use std::process::{Command, Stdio};

use rpcrdma_xdrgen_tests::{FILES, File};
use xdrgen::schema::{Arm, Field, Form, Schema, Type, TypeId, Union};
use xdrgen::{Source, parse};

/// Number of values of each type.
const VALUES: usize = 10_000;
/// Number of values of each type of a random file.
const FEWER_VALUES: usize = 200;
/// Number of random files that are compared with C. Each comparison takes about a second.
const COMPARED_FILES: usize = 8;
/// Files for which rpcgen generates C code that does not compile.
///
/// libtirpc itself declares the types of `rpcbind`. `circular` has typedefs that are impossible in C, and a union with
/// an array of itself, for which rpcgen generates invalid code.
const NOT_IN_C: [&str; 2] = ["rpcbind", "circular"];

#[test]
fn rust_and_c_encode_each_value_of_each_type_the_same() {
    let missing = find_missing_program();
    if let Some(reason) = missing {
        println!("not run: {reason}");
    }
    let mut randoms = 0;
    for file in FILES {
        let is_random = file.name.starts_with("random_");
        let source = Source { name: file.name.into(), text: file.text.into() };
        let schema = parse(&source, None).expect("build.rs has parsed the file");
        let is_narrow = ["char", "short"].iter().any(|ty| file.text.contains(ty));
        let mut random = Random { schema: &schema, rng: fastrand::Rng::with_seed(1), is_narrow, depth: 0 };
        let mut values = Vec::new();
        for (index, round_trip) in file.types {
            let name = &schema.types[*index].name.text;
            for _ in 0..if is_random { FEWER_VALUES } else { VALUES } {
                let mut bytes = Vec::new();
                random.named(TypeId(*index), &mut bytes);
                assert_eq!(round_trip(&bytes).as_ref(), Ok(&bytes), "{name} of {}", file.name);
                values.push((*index, bytes));
            }
        }
        randoms += usize::from(is_random);
        if missing.is_none() && randoms <= COMPARED_FILES && !NOT_IN_C.contains(&file.name) {
            compare(file, &schema, &values);
        }
    }
}

/// Returns a message about a required program or library that is not installed.
fn find_missing_program() -> Option<&'static str> {
    let runs = |program: &str| Command::new(program).arg("--version").output().is_ok();
    match () {
        () if !runs("gcc") => Some("needs gcc"),
        () if !runs("rpcgen") => Some("needs rpcgen"),
        () if !Path::new("/usr/include/tirpc/rpc/xdr.h").exists() => Some("needs libtirpc-dev"),
        () => None,
    }
}

/// Generates encoded random values, by the rules of RFC 4506 alone.
struct Random<'s> {
    schema: &'s Schema,
    rng: fastrand::Rng,
    /// True if the file has C types that are narrower than a word, so that values must be small.
    is_narrow: bool,
    /// Number of values of recursive types around the current value.
    depth: usize,
}

impl Random<'_> {
    fn word(&mut self, word: u32, to: &mut Vec<u8>) {
        to.extend_from_slice(&word.to_be_bytes());
    }

    /// True if the nesting of recursive values must end here.
    fn is_deep(&self, ty: &Type) -> bool {
        matches!(ty, Type::Recursive(_)) && self.depth >= 6
    }

    /// Chooses a number of elements up to `max`, and up to `limit` to keep values short.
    fn count(&mut self, max: Option<u32>, limit: u32) -> u32 {
        self.rng.u32(0..=max.unwrap_or(limit).min(limit))
    }

    fn bytes(&mut self, len: u32, to: &mut Vec<u8>) {
        // C strings cannot contain zero bytes, so no value does.
        to.extend((0..len).map(|_| self.rng.u8(1..)));
        to.resize(to.len().next_multiple_of(4), 0);
    }

    fn named(&mut self, TypeId(index): TypeId, to: &mut Vec<u8>) {
        match &self.schema.types[index].form {
            Form::Enum(values) => {
                let value = self.rng.choice(values).expect("an enum has values").value;
                self.word(value as u32, to);
            }
            Form::Struct { fields, .. } => fields.iter().for_each(|field| self.value(&field.ty, to)),
            Form::Union(union) => self.union(union, to),
            Form::Alias(ty) => self.value(ty, to),
        }
    }

    fn union(&mut self, union: &Union, to: &mut Vec<u8>) {
        let at = to.len();
        self.value(&union.switch.ty, to);
        let cases = |arm: &Arm| arm.cases.iter().map(|case| case.value as u32).collect::<Vec<_>>();
        let word = u32::from_be_bytes(to[at..].try_into().expect("a word"));
        let mut arm = union.arms.iter().find(|arm| cases(arm).contains(&word));
        // A random number is rarely a case of the union, but a union without a default arm needs a case.
        if arm.is_none() && (union.default.is_none() || self.rng.bool()) {
            arm = self.rng.choice(&union.arms);
            let case = arm.and_then(|arm| self.rng.choice(cases(arm))).expect("a union has cases");
            to.truncate(at);
            self.word(case, to);
        }
        let field = arm.map_or(union.default.as_ref().and_then(Option::as_ref), |arm| arm.field.as_ref());
        if let Some(Field { ty, .. }) = field {
            self.value(ty, to);
        }
    }

    fn value(&mut self, ty: &Type, to: &mut Vec<u8>) {
        match ty {
            Type::Void => {}
            Type::Int | Type::UnsignedInt | Type::Float => {
                let word = if self.is_narrow { self.rng.u32(0..128) } else { self.rng.u32(..) };
                self.word(word, to);
            }
            Type::Hyper | Type::UnsignedHyper | Type::Double => to.extend(self.rng.u64(..).to_be_bytes()),
            Type::Bool => {
                let word = self.rng.u32(0..2);
                self.word(word, to);
            }
            Type::FixedOpaque(len) => self.bytes(*len, to),
            Type::Opaque { max, .. } | Type::Text { max, .. } => {
                let len = self.count(*max, 20);
                self.word(len, to);
                self.bytes(len, to);
            }
            Type::FixedArray(of, count) => (0..*count).for_each(|_| self.value(of, to)),
            Type::Array(of, max) => {
                let count = if self.is_deep(of) { 0 } else { self.count(*max, 3) };
                self.word(count, to);
                (0..count).for_each(|_| self.value(of, to));
            }
            Type::Optional(of) => {
                let is_some = !self.is_deep(of) && self.rng.bool();
                self.word(is_some.into(), to);
                if is_some {
                    self.value(of, to);
                }
            }
            Type::List(id) => {
                for _ in 0..self.count(None, 3) {
                    self.word(1, to);
                    self.named(*id, to);
                }
                self.word(0, to);
            }
            Type::Named(id) => self.named(*id, to),
            Type::Recursive(id) => {
                self.depth += 1;
                self.named(*id, to);
                self.depth -= 1;
            }
        }
    }
}

/// Decodes and encodes values by rpcgen's code, and compares the results.
fn compare(file: &File, schema: &Schema, values: &[(usize, Vec<u8>)]) {
    let (dir, name) = (tempfile::tempdir().expect("a directory"), file.name);
    let path = |name: &str| dir.path().join(name);
    let mut program = format!("#include \"{name}.h\"\n{HEAD}");
    let mut input = Vec::new();
    let mut expected = Vec::new();
    for (index, encoded) in values {
        // In C, the structure of a list also has the pointer to the next element.
        let end: &[u8] = match schema.types[*index].form {
            Form::Struct { is_list: true, .. } => &[0; 4],
            _ => &[],
        };
        let bytes = [encoded, end].concat();
        input.extend([*index as u32, bytes.len() as u32].map(u32::to_ne_bytes).as_flattened());
        input.extend(&bytes);
        expected.extend((bytes.len() as u32).to_ne_bytes());
        expected.extend(&bytes);
    }
    for (index, _) in file.types {
        let ty = &schema.types[*index].name.text;
        let _ = writeln!(program, "case {index}: return round_trip((xdrproc_t)xdr_{ty}, sizeof({ty}));");
    }
    program += TAIL;
    fs::write(path("main.c"), program).expect("the file is written");
    // rpcgen does not accept continued lines, which nis.x has.
    fs::write(path(&format!("{name}.x")), file.text.replace("\\\n", " ")).expect("the file is written");
    fs::write(path("input"), input).expect("the file is written");
    let build = format!(
        "rpcgen -h -o {name}.h {name}.x && rpcgen -c -o {name}.c {name}.x && \
         gcc -w -O1 -I/usr/include/tirpc -o main main.c {name}.c -ltirpc"
    );
    let built = Command::new("sh").args(["-c", &build]).current_dir(&dir).output().expect("sh runs");
    assert!(built.status.success(), "{name}: {}", String::from_utf8_lossy(&built.stderr));
    let input = Stdio::from(InputFile::open(path("input")).expect("the input exists"));
    let output = Command::new(path("main")).stdin(input).output().expect("the C program runs");
    assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
    if output.stdout != expected {
        let at = output.stdout.iter().zip(&expected).take_while(|(c, rust)| c == rust).count();
        let mut end = 0;
        let is_mismatch = |(_, bytes): &&(usize, Vec<u8>)| {
            end += 4 + bytes.len();
            end > at
        };
        let (index, bytes) = values.iter().find(is_mismatch).expect("one of the values");
        panic!("{name}: C and Rust encode {} differently: {bytes:02x?}", schema.types[*index].name.text);
    }
}

/// Start of the C program, up to the types.
const HEAD: &str = r#"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char in[1 << 20], out[1 << 20];
static u_int len;

static int round_trip(xdrproc_t proc, size_t size) {
    XDR from, to;
    void *value = calloc(1, size);
    xdrmem_create(&from, in, len, XDR_DECODE);
    xdrmem_create(&to, out, sizeof(out), XDR_ENCODE);
    if (!proc(&from, value) || xdr_getpos(&from) != len) return 1;
    if (!proc(&to, value)) return 2;
    len = xdr_getpos(&to);
    xdr_free(proc, value);
    free(value);
    fwrite(&len, sizeof(len), 1, stdout);
    fwrite(out, 1, len, stdout);
    return 0;
}

static int round_trip_type(u_int type) {
    switch (type) {
"#;

/// End of the C program.
const TAIL: &str = r#"
    }
    return 3;
}

int main(void) {
    u_int type;
    while (fread(&type, sizeof(type), 1, stdin) == 1) {
        if (fread(&len, sizeof(len), 1, stdin) != 1 || len > sizeof(in) || fread(in, 1, len, stdin) != len) return 4;
        int failed = round_trip_type(type);
        if (failed) {
            fprintf(stderr, "type %u: %d\n", type, failed);
            return failed;
        }
    }
    return 0;
}
"#;
