//! The public API of crate `rpcrdma`: list, size, requirements on items.
//!
//! The list in `engine/api.txt` is derived from rustdoc's JSON with the stable features. Inherent methods count as
//! items, trait implementations do not. Public fields and variants count separately.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

use rpcrdma_tests::source::{read, root};
use serde_json::Value;

/// The crates that export items. The first is the checked one.
const CRATES: [&str; 4] = ["rpcrdma", "rpcrdma-proto", "rpcrdma-fabric", "rpcrdma-mempool"];
/// Maximum modules, types, traits, functions, constants and methods.
const MOST_ITEMS: usize = 356;
/// Maximum fields and variants.
const MOST_FIELDS: usize = 219;
const LIST: &str = "engine/api.txt";

/// rustdoc's JSON of one crate.
struct Crate {
    json: Value,
}

impl Crate {
    fn of(package: &str, target: &str) -> Self {
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

    /// Kind and contents of an item.
    fn inner(item: &Value) -> (&str, &Value) {
        let object = item["inner"].as_object().expect("an item has one kind");
        object.iter().next().map(|(kind, inner)| (kind.as_str(), inner)).expect("of one entry")
    }
}

/// One line of the list.
struct Entry<'a> {
    /// Index of the crate in `CRATES`.
    of: usize,
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
    fn of(crates: &'a [Crate]) -> Self {
        let mut api = Self { crates, entries: BTreeMap::new(), seen: BTreeSet::new() };
        let first = &crates[0];
        let items = &Crate::inner(first.item(&first.json["root"]).expect("a root")).1["items"];
        api.walk_all(0, items, "");
        api
    }

    fn walk_all(&mut self, of: usize, items: &'a Value, path: &str) {
        for id in items.as_array().expect("a list") {
            self.walk(of, id, path);
        }
    }

    /// The description of an item of another crate.
    fn in_other_crate(&self, of: usize, id: &Value) -> Option<(usize, &'a Value)> {
        let crates: &'a [Crate] = self.crates;
        let path = crates[of].json["paths"].get(id.to_string())?.get("path")?;
        let name = path.as_array()?.first()?.as_str()?.replace('_', "-");
        let of = CRATES.iter().position(|one| *one == name)?;
        let paths = crates[of].json["paths"].as_object()?;
        let (id, _) = paths.iter().find(|(_, entry)| entry["crate_id"] == 0 && entry["path"] == *path)?;
        Some((of, crates[of].json["index"].get(id)?))
    }

    fn walk(&mut self, of: usize, id: &Value, path: &str) {
        let crates: &'a [Crate] = self.crates;
        let Some(item) = crates[of].item(id) else { return };
        let (kind, inner) = Crate::inner(item);
        if kind != "use" {
            if item["visibility"] == "public" || item["visibility"] == "default" {
                self.add(of, item, &join(path, item["name"].as_str().expect("a name")));
            }
            return;
        }
        // The types of rpcrdma-xdr are described in that crate.
        if inner["source"] == "rpcrdma_xdr" {
            return;
        }
        let target = crates[of].item(&inner["id"]).map(|item| (of, item));
        let (of, item) = target.or_else(|| self.in_other_crate(of, &inner["id"])).expect("what is exported is ours");
        self.add(of, item, &join(path, inner["name"].as_str().expect("a name")));
    }

    fn add(&mut self, of: usize, item: &'a Value, path: &str) {
        if is_hidden(item) || !self.seen.insert((of, item["id"].to_string())) {
            return;
        }
        let (kind, inner) = Crate::inner(item);
        self.entries.insert(path.to_owned(), Entry { of, kind, item });
        match kind {
            "module" | "trait" => self.walk_all(of, &inner["items"], path),
            "struct" => {
                let fields = inner["kind"]["plain"].get("fields").or_else(|| inner["kind"].get("tuple"));
                self.members(of, fields, path);
                self.methods(of, inner, path);
            }
            "enum" => {
                self.members(of, inner.get("variants"), path);
                self.methods(of, inner, path);
            }
            _ => {}
        }
    }

    fn members(&mut self, of: usize, ids: Option<&'a Value>, path: &str) {
        for id in ids.and_then(Value::as_array).into_iter().flatten() {
            self.walk(of, id, path);
        }
    }

    fn methods(&mut self, of: usize, inner: &'a Value, path: &str) {
        let crates: &'a [Crate] = self.crates;
        for id in inner["impls"].as_array().into_iter().flatten() {
            if let Some(item) = crates[of].item(id) {
                let inherent = &item["inner"]["impl"];
                if inherent["trait"].is_null() {
                    self.members(of, inherent.get("items"), path);
                }
            }
        }
    }

    /// This project's types in an item's declaration that users of the first crate cannot name.
    fn unnameable(&self, entry: &Entry<'_>) -> BTreeSet<String> {
        let (kind, inner) = Crate::inner(entry.item);
        let mut types = Vec::new();
        match kind {
            "function" => types_in(&inner["sig"], &mut types),
            "struct_field" => types_in(inner, &mut types),
            "variant" => {
                let fields = inner["kind"].get("tuple").or_else(|| inner["kind"]["struct"].get("fields"));
                let fields = fields.and_then(Value::as_array).into_iter().flatten();
                fields
                    .filter_map(|id| self.crates[entry.of].item(id))
                    .filter(|field| !is_hidden(field))
                    .for_each(|field| types_in(field, &mut types));
            }
            _ => {}
        }
        let named = |one: &&Value| {
            let id = &one["id"];
            let path = &self.crates[entry.of].json["paths"][id.to_string()]["path"][0];
            let ours = path.as_str().is_none_or(|name| CRATES.contains(&&*name.replace('_', "-")));
            let here = self.seen.contains(&(entry.of, id.to_string()));
            let there = || self.in_other_crate(entry.of, id).is_some_and(|(of, item)| self.is_seen(of, item));
            !ours || here || there()
        };
        types.iter().filter(|one| !named(one)).map(|one| one["path"].to_string()).collect()
    }

    fn is_seen(&self, of: usize, item: &Value) -> bool {
        self.seen.contains(&(of, item["id"].to_string()))
    }

    /// Names of the traits that a type implements, auto traits included.
    fn traits(&self, entry: &Entry<'_>) -> BTreeSet<&'a str> {
        let crates: &'a [Crate] = self.crates;
        let impls = entry.item["inner"][entry.kind]["impls"].as_array();
        let of = |id| crates[entry.of].item(id);
        let named = |item: &'a Value| {
            let one = &item["inner"]["impl"];
            let path = one["trait"]["path"].as_str()?;
            (one["is_negative"] != true).then(|| path.rsplit("::").next().unwrap_or(path))
        };
        impls.into_iter().flatten().filter_map(of).filter_map(named).collect()
    }
}

fn is_hidden(item: &Value) -> bool {
    item["attrs"].as_array().is_some_and(|all| all.iter().any(|one| one.to_string().contains("hidden")))
}

/// The named types within a type or signature.
fn types_in<'a>(value: &'a Value, types: &mut Vec<&'a Value>) {
    match value {
        Value::Object(object) => {
            types.extend(object.get("resolved_path"));
            object.values().for_each(|one| types_in(one, types));
        }
        Value::Array(all) => all.iter().for_each(|one| types_in(one, types)),
        _ => {}
    }
}

fn join(path: &str, name: &str) -> String {
    if path.is_empty() { name.to_owned() } else { format!("{path}::{name}") }
}

fn is_member(kind: &str) -> bool {
    kind == "struct_field" || kind == "variant"
}

/// The source of a declaration, on one line, without its body.
fn declaration(entry: &Entry<'_>) -> String {
    let span = &entry.item["span"];
    let number = |value: &Value| value.as_u64().expect("a number") as usize;
    let file = read(span["filename"].as_str().expect("a file"));
    let lines =
        file.lines().skip(number(&span["begin"][0]) - 1).take(number(&span["end"][0]) + 1 - number(&span["begin"][0]));
    let mut text: Vec<&str> =
        lines.map(str::trim).filter(|line| !line.starts_with("//") && !line.starts_with("#[")).collect();
    if text.first().is_some_and(|line| line.starts_with("knobs!") || line.starts_with("with_defaults!")) {
        // The span of a knob is its whole group, and that of a field with a default its whole struct.
        let start = format!("pub {}: ", entry.item["name"].as_str().expect("a name"));
        let knob = text.iter().find(|line| line.starts_with(&start)).and_then(|line| line.split(" = ").next());
        // Without its unit in configuration files.
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

fn crates() -> Vec<Crate> {
    // In the test program's own target directory, dependencies are built already.
    let program = std::env::current_exe().expect("a path");
    let target = program.ancestors().nth(3).expect("target/debug/deps").to_str().expect("UTF-8").to_owned();
    CRATES.iter().map(|package| Crate::of(package, &target)).collect()
}

/// Each change of the public API changes this list. `FACE=write` rewrites it.
#[test]
fn the_public_api_is_as_listed() {
    let crates = crates();
    let api = PublicApi::of(&crates);
    let mut list = String::new();
    for (path, entry) in &api.entries {
        let declared = match entry.kind {
            "function" | "struct_field" => format!(": {}", declaration(entry)),
            _ => String::new(),
        };
        list.push_str(&format!("{} {path}{declared}\n", entry.kind.trim_start_matches("struct_")));
    }
    let fields = api.entries.values().filter(|entry| is_member(entry.kind)).count();
    let items = api.entries.len() - fields;
    println!("{items} items, {fields} fields and variants");
    if std::env::var_os("FACE").is_some_and(|value| value == "write") {
        std::fs::write(root().join(LIST), &list).expect("it is written");
    }
    let listed = read(LIST);
    for line in list.lines().filter(|line| !listed.lines().any(|one| one == *line)) {
        println!("not in {LIST}: {line}");
    }
    for line in listed.lines().filter(|line| !list.lines().any(|one| one == *line)) {
        println!("gone, but in {LIST}: {line}");
    }
    assert!(list == listed, "the public API differs from {LIST}: FACE=write writes it");
    assert!(items > 100 && items <= MOST_ITEMS, "{items} items, at most {MOST_ITEMS}");
    assert!(fields > 50 && fields <= MOST_FIELDS, "{fields} fields and variants, at most {MOST_FIELDS}");
}

/// First lines have at most twelve words, types are nameable and `Debug`, and errors may cross threads.
#[test]
fn public_items_have_short_first_lines_debug_and_error_traits() {
    let crates = crates();
    let api = PublicApi::of(&crates);
    let mut wrong = Vec::new();
    for (path, entry) in &api.entries {
        let docs = entry.item["docs"].as_str().unwrap_or_default();
        let first = docs.split("\n\n").next().unwrap_or_default().replace('\n', " ");
        let sentence = first.split(". ").next().unwrap_or_default();
        let words = sentence.split_whitespace().count();
        if words == 0 || words > 12 {
            wrong.push(format!("{path}: {words} words in its first line: {sentence}"));
        }
        for one in api.unnameable(entry) {
            wrong.push(format!("{path}: {one} cannot be named by users of the crate"));
        }
        if matches!(entry.kind, "struct" | "enum") {
            let traits = api.traits(entry);
            let error = path.ends_with("Error") || traits.contains("Error");
            for (wanted, needed) in [("Debug", true), ("Error", error), ("Send", error), ("Sync", error)] {
                if needed && !traits.contains(wanted) {
                    wrong.push(format!("{path} is not {wanted}"));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{} of {}:\n{}", wrong.len(), api.entries.len(), wrong.join("\n"));
}
