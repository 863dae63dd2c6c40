//! Compiles `every.x` and the files of rpcsvc-proto, with a table of their types.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::{env, fs};

use xdrgen::{Options, Source, generate, parse};

fn main() {
    println!("cargo::rerun-if-changed=every.x\ncargo::rerun-if-changed=every.placement.toml");
    let mut paths = vec![PathBuf::from("every.x")];
    if let Ok(dir) = fs::read_dir("/usr/include/rpcsvc") {
        println!("cargo::rerun-if-changed=/usr/include/rpcsvc");
        let others = dir.flatten().map(|entry| entry.path());
        let others = others.filter(|path| path.extension().is_some_and(|extension| extension == "x"));
        // Its types are those of nis.x, which it includes in C only.
        paths.extend(others.filter(|path| !path.ends_with("nis_callback.x")));
    }
    paths[1..].sort();
    let (mut code, mut table) = (String::new(), String::new());
    for path in &paths {
        let name = path.file_stem().and_then(|stem| stem.to_str()).expect("a name");
        let text = text(path);
        code += &module(name, &text);
        let _ = writeln!(table, "File {{ name: {name:?}, text: {text:?}, types: {name}::TYPES }},");
    }
    let _ = write!(code, "/// All files.\npub const FILES: &[File] = &[\n{table}];\n");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("set by Cargo")).join("files.rs");
    fs::write(out, code).expect("written");
}

/// A file and what it includes.
fn text(path: &Path) -> String {
    let file = fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let line = |line: &str| match line.strip_prefix("#include \"").and_then(|rest| rest.strip_suffix('"')) {
        Some(other) => text(&path.with_file_name(other)),
        None => format!("{line}\n"),
    };
    file.lines().map(line).collect()
}

/// The module of a file.
fn module(name: &str, text: &str) -> String {
    let source = Source { name: name.into(), text: text.into() };
    let placement = fs::read_to_string(format!("{name}.placement.toml")).ok();
    let placement = placement.map(|text| Source { name: name.into(), text });
    let schema = parse(&source, placement.as_ref()).unwrap_or_else(|errors| panic!("{errors}"));
    let code = generate(&schema, &Options::types_only());
    let mut types = String::new();
    // Items are in the order of the schema's types.
    let is_type = |line: &&str| ["pub struct ", "pub enum ", "pub type "].iter().any(|item| line.starts_with(item));
    let items = code.lines().filter(is_type).enumerate().take(schema.types.len());
    for (index, line) in items.filter(|(_, line)| !line.starts_with("pub type ")) {
        let rust = line.split([' ', '<', '(', ';']).nth(2).expect("a name");
        let life = if line.contains("<'a>") { "<'_>" } else { "" };
        let _ = writeln!(types, "({index}, |bytes| crate::again::<{rust}{life}>(bytes)),");
    }
    format!(
        "/// `{name}.x`\npub mod {name} {{\n{code}\n/// Types.\npub const TYPES: &[crate::Case] = &[{types}];\n}}\n"
    )
}
