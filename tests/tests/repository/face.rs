//! The public API of the crate `rpcrdma`: its list, its size, and rules for its items.
//!
//! The list in `engine/api.txt` is derived from rustdoc's JSON with the stable features. Inherent methods count as
//! items, trait implementations do not. Public fields and variants count separately.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

use rpcrdma_tests::source::{read, root};
use serde_json::Value;

/// The crate whose API is checked, and the crates whose items it exports.
const CRATES: [&str; 4] = ["rpcrdma", "rpcrdma-proto", "rpcrdma-fabric", "rpcrdma-mempool"];
/// Maximum number of modules, types, traits, functions, constants and methods.
const MAX_ITEMS: usize = 356;
/// Maximum number of fields and variants.
const MAX_FIELDS: usize = 219;
/// Path of the recorded list.
const LIST: &str = "engine/api.txt";

/// rustdoc's JSON of one crate.
struct Crate {
    json: Value,
}

impl Crate {
    /// Runs rustdoc on a package and reads its JSON.
    fn document(package: &str, target: &str) -> Self {
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(["rustdoc", "--quiet", "--locked", "--lib", "-p", package]).current_dir(root());
        cargo.args(["--target-dir", target, "--", "-Zunstable-options", "--output-format=json"]);
        cargo.env("RUSTDOC", root().join("tests/rustdoc"));
        assert!(cargo.status().expect("cargo runs").success(), "cargo rustdoc -p {package}");
        let path = format!("{target}/doc/{}.json", package.replace('-', "_"));
        let text = std::fs::read_to_string(&path).expect(&path);
        Self { json: serde_json::from_str(&text).expect("JSON") }
    }

    fn item(&self, id: &Value) -> Option<&Value> {
        self.json["index"].get(id.to_string())
    }

    /// The kind and contents of an item.
    fn inner(item: &Value) -> (&str, &Value) {
        let object = item["inner"].as_object().expect("`inner` is an object");
        object.iter().next().map(|(kind, inner)| (kind.as_str(), inner)).expect("`inner` has one entry")
    }
}

/// One line of the list.
struct Entry<'a> {
    /// Index of the crate in `CRATES`.
    krate: usize,
    kind: &'a str,
    item: &'a Value,
}

/// Items reachable from the root of the first crate, by path.
struct PublicApi<'a> {
    crates: &'a [Crate],
    entries: BTreeMap<String, Entry<'a>>,
    seen: BTreeSet<(usize, String)>,
}

impl<'a> PublicApi<'a> {
    fn collect(crates: &'a [Crate]) -> Self {
        let mut api = Self { crates, entries: BTreeMap::new(), seen: BTreeSet::new() };
        let first = &crates[0];
        let items = &Crate::inner(first.item(&first.json["root"]).expect("the index has the root module")).1["items"];
        api.walk_all(0, items, "");
        api
    }

    fn walk_all(&mut self, krate: usize, items: &'a Value, path: &str) {
        for id in items.as_array().expect("`items` is an array") {
            self.walk(krate, id, path);
        }
    }

    /// Finds the documentation of an item that `krate` exports from another crate of [`CRATES`].
    fn find_in_other_crate(&self, krate: usize, id: &Value) -> Option<(usize, &'a Value)> {
        let crates: &'a [Crate] = self.crates;
        let path = crates[krate].json["paths"].get(id.to_string())?.get("path")?;
        let name = path.as_array()?.first()?.as_str()?.replace('_', "-");
        let krate = CRATES.iter().position(|known| *known == name)?;
        let paths = crates[krate].json["paths"].as_object()?;
        let (id, _) = paths.iter().find(|(_, entry)| entry["crate_id"] == 0 && entry["path"] == *path)?;
        Some((krate, crates[krate].json["index"].get(id)?))
    }

    fn walk(&mut self, krate: usize, id: &Value, path: &str) {
        let crates: &'a [Crate] = self.crates;
        let Some(item) = crates[krate].item(id) else { return };
        let (kind, inner) = Crate::inner(item);
        if kind != "use" {
            if item["visibility"] == "public" || item["visibility"] == "default" {
                self.add(krate, item, &join(path, item["name"].as_str().expect("a name")));
            }
            return;
        }
        // The API of rpcrdma-xdr is not part of this list.
        if inner["source"] == "rpcrdma_xdr" {
            return;
        }
        let target = crates[krate].item(&inner["id"]).map(|item| (krate, item));
        let (krate, item) = target
            .or_else(|| self.find_in_other_crate(krate, &inner["id"]))
            .expect("an exported item is from one of CRATES");
        self.add(krate, item, &join(path, inner["name"].as_str().expect("a name")));
    }

    fn add(&mut self, krate: usize, item: &'a Value, path: &str) {
        if is_hidden(item) || !self.seen.insert((krate, item["id"].to_string())) {
            return;
        }
        let (kind, inner) = Crate::inner(item);
        self.entries.insert(path.to_owned(), Entry { krate, kind, item });
        match kind {
            "module" | "trait" => self.walk_all(krate, &inner["items"], path),
            "struct" => {
                let fields = inner["kind"]["plain"].get("fields").or_else(|| inner["kind"].get("tuple"));
                self.walk_members(krate, fields, path);
                self.walk_methods(krate, inner, path);
            }
            "enum" => {
                self.walk_members(krate, inner.get("variants"), path);
                self.walk_methods(krate, inner, path);
            }
            _ => {}
        }
    }

    fn walk_members(&mut self, krate: usize, ids: Option<&'a Value>, path: &str) {
        for id in ids.and_then(Value::as_array).into_iter().flatten() {
            self.walk(krate, id, path);
        }
    }

    fn walk_methods(&mut self, krate: usize, inner: &'a Value, path: &str) {
        let crates: &'a [Crate] = self.crates;
        for id in inner["impls"].as_array().into_iter().flatten() {
            if let Some(item) = crates[krate].item(id) {
                let inherent = &item["inner"]["impl"];
                if inherent["trait"].is_null() {
                    self.walk_members(krate, inherent.get("items"), path);
                }
            }
        }
    }

    /// Types of this project that the item's declaration uses, but that users of the first crate cannot name.
    fn unnameable(&self, entry: &Entry<'_>) -> BTreeSet<String> {
        let (kind, inner) = Crate::inner(entry.item);
        let mut types = Vec::new();
        match kind {
            "function" => collect_types(&inner["sig"], &mut types),
            "struct_field" => collect_types(inner, &mut types),
            "variant" => {
                let fields = inner["kind"].get("tuple").or_else(|| inner["kind"]["struct"].get("fields"));
                let fields = fields.and_then(Value::as_array).into_iter().flatten();
                fields
                    .filter_map(|id| self.crates[entry.krate].item(id))
                    .filter(|field| !is_hidden(field))
                    .for_each(|field| collect_types(field, &mut types));
            }
            _ => {}
        }
        let is_nameable = |type_: &&Value| {
            let id = &type_["id"];
            let path = &self.crates[entry.krate].json["paths"][id.to_string()]["path"][0];
            let is_ours = path.as_str().is_none_or(|name| CRATES.contains(&&*name.replace('_', "-")));
            let is_here = self.seen.contains(&(entry.krate, id.to_string()));
            let is_in_other =
                || self.find_in_other_crate(entry.krate, id).is_some_and(|(krate, item)| self.is_exported(krate, item));
            !is_ours || is_here || is_in_other()
        };
        types.iter().filter(|type_| !is_nameable(type_)).map(|type_| type_["path"].to_string()).collect()
    }

    fn is_exported(&self, krate: usize, item: &Value) -> bool {
        self.seen.contains(&(krate, item["id"].to_string()))
    }

    /// Names of the traits that a type implements, auto traits included.
    fn traits(&self, entry: &Entry<'_>) -> BTreeSet<&'a str> {
        let crates: &'a [Crate] = self.crates;
        let impls = entry.item["inner"][entry.kind]["impls"].as_array();
        let item_of = |id| crates[entry.krate].item(id);
        let trait_name = |item: &'a Value| {
            let impl_ = &item["inner"]["impl"];
            let path = impl_["trait"]["path"].as_str()?;
            (impl_["is_negative"] != true).then(|| path.rsplit("::").next().unwrap_or(path))
        };
        impls.into_iter().flatten().filter_map(item_of).filter_map(trait_name).collect()
    }
}

fn is_hidden(item: &Value) -> bool {
    item["attrs"].as_array().is_some_and(|attrs| attrs.iter().any(|attr| attr.to_string().contains("hidden")))
}

/// Adds the named types in a type or signature to `types`.
fn collect_types<'a>(value: &'a Value, types: &mut Vec<&'a Value>) {
    match value {
        Value::Object(object) => {
            types.extend(object.get("resolved_path"));
            object.values().for_each(|value| collect_types(value, types));
        }
        Value::Array(values) => values.iter().for_each(|value| collect_types(value, types)),
        _ => {}
    }
}

fn join(path: &str, name: &str) -> String {
    if path.is_empty() { name.to_owned() } else { format!("{path}::{name}") }
}

fn is_member(kind: &str) -> bool {
    kind == "struct_field" || kind == "variant"
}

/// Reads the source of a declaration as one line, without its body.
fn read_declaration(entry: &Entry<'_>) -> String {
    let span = &entry.item["span"];
    let number = |value: &Value| value.as_u64().expect("a line number") as usize;
    let file = read(span["filename"].as_str().expect("a span has a file"));
    let lines =
        file.lines().skip(number(&span["begin"][0]) - 1).take(number(&span["end"][0]) + 1 - number(&span["begin"][0]));
    let mut text: Vec<&str> =
        lines.map(str::trim).filter(|line| !line.starts_with("//") && !line.starts_with("#[")).collect();
    if text.first().is_some_and(|line| line.starts_with("knobs!") || line.starts_with("with_defaults!")) {
        // The span of a knob covers its whole group, and the span of a field with a default covers its whole struct.
        let start = format!("pub {}: ", entry.item["name"].as_str().expect("a name"));
        let knob = text.iter().find(|line| line.starts_with(&start)).and_then(|line| line.split(" = ").next());
        // Removes the unit that the knob has in configuration files.
        let knob = knob.and_then(|line| line.split(" as ").next());
        text = knob.into_iter().collect();
    }
    let text = text.join(" ").replace("pub const fn", "pub fn").replace("pub fn", "fn");
    let end = match entry.kind {
        "function" => text.find(" {").or_else(|| text.find(';')),
        "struct_field" => None,
        _ => text.find([' ', '(', '{', ',']).filter(|_| entry.kind == "variant"),
    };
    text[..end.unwrap_or(text.len())].trim_end_matches(',').to_owned()
}

/// Documents all of [`CRATES`].
fn document_crates() -> Vec<Crate> {
    // The target directory of this test program already has the dependencies.
    let program = std::env::current_exe().expect("the path of this program");
    let target = program
        .ancestors()
        .nth(3)
        .expect("the program is in target/debug/deps")
        .to_str()
        .expect("the path is UTF-8")
        .to_owned();
    CRATES.iter().map(|package| Crate::document(package, &target)).collect()
}

/// Any change of the public API must change the list. `FACE=write` rewrites the list.
#[test]
fn the_public_api_equals_the_recorded_list() {
    let crates = document_crates();
    let api = PublicApi::collect(&crates);
    let mut list = String::new();
    for (path, entry) in &api.entries {
        let declared = match entry.kind {
            "function" | "struct_field" => format!(": {}", read_declaration(entry)),
            _ => String::new(),
        };
        list.push_str(&format!("{} {path}{declared}\n", entry.kind.trim_start_matches("struct_")));
    }
    let fields = api.entries.values().filter(|entry| is_member(entry.kind)).count();
    let items = api.entries.len() - fields;
    println!("{items} items, {fields} fields and variants");
    if std::env::var_os("FACE").is_some_and(|value| value == "write") {
        std::fs::write(root().join(LIST), &list).expect("the list is written");
    }
    let listed = read(LIST);
    for line in list.lines().filter(|line| !listed.lines().any(|other| other == *line)) {
        println!("in the API, but not in {LIST}: {line}");
    }
    for line in listed.lines().filter(|line| !list.lines().any(|other| other == *line)) {
        println!("in {LIST}, but not in the API: {line}");
    }
    assert!(list == listed, "the public API differs from {LIST}: run this test with FACE=write to rewrite the list");
    assert!(items > 100 && items <= MAX_ITEMS, "{items} items, expected 101 to {MAX_ITEMS}");
    assert!(fields > 50 && fields <= MAX_FIELDS, "{fields} fields and variants, expected 51 to {MAX_FIELDS}");
}

/// First lines have at most twelve words, types are nameable and implement `Debug`, and errors are `Send` and `Sync`.
#[test]
fn public_items_have_short_first_lines_debug_and_error_traits() {
    let crates = document_crates();
    let api = PublicApi::collect(&crates);
    let mut wrong = Vec::new();
    for (path, entry) in &api.entries {
        let docs = entry.item["docs"].as_str().unwrap_or_default();
        let first = docs.split("\n\n").next().unwrap_or_default().replace('\n', " ");
        let sentence = first.split(". ").next().unwrap_or_default();
        let words = sentence.split_whitespace().count();
        if words == 0 || words > 12 {
            wrong.push(format!("{path}: {words} words in its first line: {sentence}"));
        }
        for name in api.unnameable(entry) {
            wrong.push(format!("{path}: users of the crate cannot name {name}"));
        }
        if matches!(entry.kind, "struct" | "enum") {
            let traits = api.traits(entry);
            let is_error = path.ends_with("Error") || traits.contains("Error");
            for (required, applies) in [("Debug", true), ("Error", is_error), ("Send", is_error), ("Sync", is_error)] {
                if applies && !traits.contains(required) {
                    wrong.push(format!("{path} does not implement {required}"));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{} of {}:\n{}", wrong.len(), api.entries.len(), wrong.join("\n"));
}
