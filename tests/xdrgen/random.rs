//! Random specifications, which both xdrgen and rpcgen accept.

use std::fmt::Write as _;

use fastrand::Rng;

/// Maximum bytes of a type's values, which keeps nested arrays short.
const MAX_VALUE_BYTES: usize = 600;

/// A type that later definitions may use.
struct KnownType {
    name: String,
    /// Approximate bytes of a value.
    bytes: usize,
}

struct Writer {
    rng: Rng,
    known: Vec<KnownType>,
    text: String,
}

/// Generates a specification, which depends only on the seed.
pub(crate) fn specification(seed: u64) -> String {
    let mut writer = Writer { rng: Rng::with_seed(seed), known: Vec::new(), text: String::new() };
    for index in 0..writer.rng.usize(4..10) {
        match writer.rng.u32(0..10) {
            0..2 => writer.values(index),
            2..4 => writer.typedef(index),
            4..7 => writer.structure(index),
            _ => writer.union(index),
        }
    }
    writer.text
}

impl Writer {
    /// Chooses a type. Returns its name and its bytes. The type is never `bool`, because rpcgen's code for arrays of
    /// `bool` does not compile.
    fn choose_type(&mut self) -> (String, usize) {
        let basic = [("int", 4), ("unsigned int", 4), ("hyper", 8), ("unsigned hyper", 8), ("double", 8)];
        match self.rng.choice(&self.known) {
            Some(known) if self.rng.bool() => (known.name.clone(), known.bytes),
            _ => {
                let (name, bytes) = basic[self.rng.usize(..basic.len())];
                (name.into(), bytes)
            }
        }
    }

    /// A declaration, and the bytes of its values.
    fn declaration(&mut self, name: &str) -> (String, usize) {
        let len = self.rng.usize(1..9);
        let (base, bytes) = self.choose_type();
        let fits = bytes * len <= MAX_VALUE_BYTES;
        match self.rng.u32(0..9) {
            0 => (format!("opaque {name}[{len}]"), len + 3),
            1 => (format!("opaque {name}<{len}>"), len + 7),
            2 => (format!("string {name}<{len}>"), len + 7),
            3 => (format!("opaque {name}<>"), 20),
            4 if fits => (format!("{base} {name}[{len}]"), bytes * len),
            5 if fits => (format!("{base} {name}<{len}>"), bytes * len + 4),
            6 if fits => (format!("{base} *{name}"), bytes + 4),
            _ => (format!("{base} {name}"), bytes),
        }
    }

    fn add_known(&mut self, name: String, bytes: usize) {
        if bytes <= MAX_VALUE_BYTES {
            self.known.push(KnownType { name, bytes });
        }
    }

    fn values(&mut self, index: usize) {
        let first = self.rng.i32(-5..5);
        let values: Vec<_> = (0..self.rng.i32(1..5)).map(|n| format!("E{index}_{n} = {}", first + 3 * n)).collect();
        let _ = writeln!(self.text, "enum e{index} {{ {} }};", values.join(", "));
        self.add_known(format!("e{index}"), 4);
    }

    fn typedef(&mut self, index: usize) {
        let (declaration, bytes) = self.declaration(&format!("t{index}"));
        let _ = writeln!(self.text, "typedef {declaration};");
        self.add_known(format!("t{index}"), bytes);
    }

    fn structure(&mut self, index: usize) {
        let (mut fields, mut sum) = (String::new(), 0);
        for field in 0..self.rng.usize(1..6) {
            let (declaration, bytes) = self.declaration(&format!("f{field}"));
            let _ = write!(fields, " {declaration};");
            sum += bytes;
        }
        // Every fourth structure is an element of a list.
        if self.rng.u32(..4) == 0 {
            let _ = write!(fields, " s{index} *next;");
            let _ = writeln!(self.text, "struct s{index} {{{fields} }};\ntypedef s{index} *l{index};");
            return self.add_known(format!("l{index}"), 4 * sum);
        }
        let _ = writeln!(self.text, "struct s{index} {{{fields} }};");
        self.add_known(format!("s{index}"), sum);
    }

    fn union(&mut self, index: usize) {
        let (mut arms, mut max_bytes) = (String::new(), 0);
        let mut arm = |writer: &mut Self, label: &str, name: &str| {
            let (declaration, bytes) = match writer.rng.u32(..4) {
                0 => ("void".into(), 0),
                _ => writer.declaration(name),
            };
            let _ = write!(arms, " {label}: {declaration};");
            max_bytes = bytes.max(max_bytes);
        };
        for case in 0..self.rng.usize(1..4) {
            arm(self, &format!("case {}", 2 * case), &format!("a{case}"));
        }
        if self.rng.bool() {
            arm(self, "default", "other");
        }
        let switch = ["int", "unsigned int"][self.rng.usize(..2)];
        let _ = writeln!(self.text, "union u{index} switch ({switch} which) {{{arms} }};");
        self.add_known(format!("u{index}"), 4 + max_bytes);
    }
}
