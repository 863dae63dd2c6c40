//! Compiles the specifications of this repository and of rpcsvc-proto, and random specifications.
//!
//! Writes a table of their types. `XDRGEN_SCHEMAS` is the number of random specifications, 8 by default.

mod random;

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::{env, fs};

use xdrgen::{Options, Source, generate, parse};

/// The specifications of this repository: module name and path.
const REPOSITORY_FILES: [(&str, &str); 9] = [
    ("every", "every.x"),
    ("circular", "circular.x"),
    ("nfs3", "../../tools/nfs3d/nfs3.x"),
    ("mount3", "../../tools/nfs3d/mount.x"),
    ("nfs41", "../src/bin/nfs41c/nfs41.x"),
    ("rpcbind", "../../tools/rpcbind/rpcbind.x"),
    ("blockstore", "../../tools/blockstore/blockstore.x"),
    ("rpcperf", "../../bench/rpcperf.x"),
    ("kv", "../embed/kv.x"),
];

fn main() {
    let mut paths: Vec<_> = REPOSITORY_FILES.map(|(name, path)| (name.to_owned(), PathBuf::from(path))).into();
    if let Ok(dir) = fs::read_dir("/usr/include/rpcsvc") {
        println!("cargo::rerun-if-changed=/usr/include/rpcsvc");
        let others = dir.flatten().map(|entry| entry.path());
        let others = others.filter(|path| path.extension().is_some_and(|extension| extension == "x"));
        // nis_callback.x needs types of nis.x, but includes only its C header.
        let others = others.filter(|path| !path.ends_with("nis_callback.x"));
        paths
            .extend(others.map(|path| {
                (path.file_stem().and_then(|stem| stem.to_str()).expect("a file has a name").into(), path)
            }));
    }
    paths[REPOSITORY_FILES.len()..].sort();
    println!("cargo::rerun-if-env-changed=XDRGEN_SCHEMAS\ncargo::rerun-if-changed=random.rs");
    let count = env::var("XDRGEN_SCHEMAS").map_or(8, |count| count.parse().expect("XDRGEN_SCHEMAS is a number"));
    let written = paths.iter().map(|(name, path)| (name.clone(), read_text(path), read_placement(path)));
    let random = (0..count).map(|seed| (format!("random_{seed}"), random::specification(seed), None));
    let (mut code, mut table) = (String::new(), String::new());
    for (name, text, placement) in written.chain(random) {
        code += &generate_module(&name, &text, placement);
        let _ = writeln!(table, "File {{ name: {name:?}, text: {text:?}, types: {name}::TYPES }},");
    }
    let _ = write!(code, "/// All files.\npub const FILES: &[File] = &[\n{table}];\n");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("Cargo sets OUT_DIR")).join("files.rs");
    fs::write(out, code).expect("the table is written");
}

/// Reads a file, with the files that it includes.
fn read_text(path: &Path) -> String {
    println!("cargo::rerun-if-changed={}", path.display());
    let file = fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let line = |line: &str| match line.strip_prefix("#include \"").and_then(|rest| rest.strip_suffix('"')) {
        Some(other) => read_text(&path.with_file_name(other)),
        None => format!("{line}\n"),
    };
    file.lines().map(line).collect()
}

/// Reads the placement file of a specification, if it has one.
fn read_placement(path: &Path) -> Option<String> {
    let path = path.with_extension("placement.toml");
    // Only an existing file is watched. For a missing one, Cargo would run this program each time.
    let text = fs::read_to_string(&path).ok()?;
    println!("cargo::rerun-if-changed={}", path.display());
    Some(text)
}

/// Generates the module of a file, with a table of its types.
fn generate_module(name: &str, text: &str, placement: Option<String>) -> String {
    let source = Source { name: name.into(), text: text.into() };
    let placement = placement.map(|text| Source { name: name.into(), text });
    let schema = parse(&source, placement.as_ref()).unwrap_or_else(|errors| panic!("{errors}"));
    let code = generate(&schema, &Options::types_only());
    let mut types = String::new();
    // Items are in the order of the schema's types.
    let is_type = |line: &&str| ["pub struct ", "pub enum ", "pub type "].iter().any(|item| line.starts_with(item));
    let items = code.lines().filter(is_type).enumerate().take(schema.types.len());
    for (index, line) in items.filter(|(_, line)| !line.starts_with("pub type ")) {
        let rust = line.split([' ', '<', '(', ';']).nth(2).expect("an item has a name");
        let life = if line.contains("<'a>") { "<'_>" } else { "" };
        let _ = writeln!(types, "({index}, |bytes| crate::round_trip::<{rust}{life}>(bytes)),");
    }
    format!(
        "/// `{name}.x`\npub mod {name} {{\n{code}\n/// Types.\npub const TYPES: &[crate::TypeCase] = &[{types}];\n}}\n"
    )
}
