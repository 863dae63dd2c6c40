//! Links and tables of the documents match the files and the code.

use std::collections::BTreeSet;

use rpcrdma::service::duplicate_requests::DuplicateRequestCacheStats;
use rpcrdma::stats::ShardStats;
use rpcrdma::wire::properties::PropertyId;
use rpcrdma::wire::{ErrorBody, HeaderType, Revision, Version};
use rpcrdma_tests::document::{COMMANDS, Runner, blocks, rows, section};
use rpcrdma_tests::source::{code, files, is_test, read, root, test_names, words};

/// Structs whose fields are options. `tuning.md` has a section for each, with a table of its fields.
const KNOBS: &[(&str, &str)] = &[
    ("MemoryConfig", "engine/src/config/groups.rs"),
    ("LimitsConfig", "engine/src/config/groups.rs"),
    ("TimeoutConfig", "engine/src/config/groups.rs"),
    ("WireConfig", "engine/src/config/groups.rs"),
    ("PollConfig", "engine/src/config/groups.rs"),
    ("DeviceConfig", "engine/src/config/groups.rs"),
    ("IwarpConfig", "engine/src/config/groups.rs"),
    ("ConnectConfig", "engine/src/config/groups.rs"),
    ("AcceptConfig", "engine/src/config/groups.rs"),
    ("ServerConfig", "engine/src/server/mod.rs"),
    ("WorkerConfig", "engine/src/cross_thread/workers.rs"),
    ("DuplicateRequestCacheConfig", "engine/src/service/duplicate_requests.rs"),
];

/// Fields of [`KNOBS`] that are not options: nested groups, and objects that only a program can supply.
const NOT_OPTIONS: &[&str] = &["shard", "accept", "workers", "more_addresses", "peers"];
/// Maximum number of options in `tuning.md`.
const MAX_OPTIONS: usize = 60;

/// The public fields of a struct, in order. The struct is written out or declared by the macro `knobs!`.
fn fields(file: &str, name: &str) -> Vec<String> {
    let code = code(&read(file));
    let start = code.find(&format!("pub struct {name} {{")).or_else(|| code.find(&format!("pub struct {name}, ")));
    let start = start.unwrap_or_else(|| panic!("{file} has no struct {name}"));
    let body = &code[start..];
    let body = &body[..body.find("\n}").expect("the struct has a closing brace")];
    let field = |line: &str| Some(line.trim().strip_prefix("pub ")?.split_once(':')?.0.to_owned());
    body.lines().skip(1).filter_map(field).collect()
}

fn parse_number(text: &str) -> u32 {
    match text.strip_prefix("0x") {
        Some(hex) => u32::from_str_radix(hex, 16),
        None => text.parse(),
    }
    .unwrap_or_else(|_| panic!("invalid number {text:?}"))
}

#[test]
fn tuning_lists_exactly_the_knobs() {
    let document = read("tuning.md");
    let mut options = 0;
    for &(name, file) in KNOBS {
        let mut fields = fields(file, name);
        fields.retain(|field| !NOT_OPTIONS.contains(&field.as_str()));
        options += fields.len();
        assert!(fields.len() >= 2, "expected at least two options in {name}: {fields:?}");
        let rows = rows(&section(&document, &format!("### `{name}`")));
        let named: Vec<String> = rows.iter().map(|row| row[0].trim_matches('`').to_owned()).collect();
        assert_eq!(named, fields, "the table of {name} in tuning.md (left) and its fields, in order (right)");
        for row in rows {
            assert!(row.len() >= 5 && row.iter().all(|cell| !cell.is_empty()), "a cell of {name} is empty: {row:?}");
        }
    }
    assert!((40..=MAX_OPTIONS).contains(&options), "{options} options, expected 40 to {MAX_OPTIONS}");
}

/// The debug group has one paragraph, which names each of its knobs.
#[test]
fn tuning_names_every_debug_knob_in_one_paragraph() {
    let section = section(&read("tuning.md"), "### Debug");
    let paragraphs: Vec<&str> = section.trim().split("\n\n").filter(|text| !text.starts_with('#')).collect();
    assert_eq!(paragraphs.len(), 1, "the section Debug has one paragraph: {paragraphs:?}");
    for field in fields("engine/src/config/groups.rs", "DebugConfig") {
        let named = [format!("`{field}`"), format!("`{field} = ")];
        assert!(named.iter().any(|name| paragraphs[0].contains(name)), "the section Debug does not name `{field}`");
    }
}

/// Each row maps a symptom to a counter and a knob. The test that provokes the symptom quotes it after `The row: `.
#[test]
fn every_symptom_in_tuning_has_a_test() {
    let listed = rows(&section(&read("tuning.md"), "### When calls are slow"));
    let listed: Vec<String> = listed
        .into_iter()
        .filter(|row| !row[1].contains("(no test provokes this)"))
        .map(|row| row[0].clone())
        .collect();
    assert!(listed.len() > 10, "expected more than ten symptoms: {listed:?}");
    let tests = read("tools/tests/it/top/symptoms.rs");
    let provoked: Vec<String> = tests
        .split("\n/// The row: ")
        .skip(1)
        .map(|rest| {
            let (row, following) = rest.split_once('\n').expect("a function follows the comment");
            assert!(following.starts_with("#[test]\nfn "), "{row}: expected a test below this comment");
            row.to_owned()
        })
        .collect();
    assert_eq!(
        provoked, listed,
        "the tests of tools/tests/it/top/symptoms.rs (left), and the rows of tuning.md (right)"
    );
}

/// The variants of an enum, in order.
fn variants(file: &str, name: &str) -> Vec<String> {
    let code = code(&read(file));
    let start = code.find(&format!("pub enum {name} {{")).unwrap_or_else(|| panic!("{file} has no enum {name}"));
    let body = &code[start..];
    let body = &body[..body.find("\n}").expect("the enum has a closing brace")];
    let variant = |line: &str| {
        let name = line.strip_prefix("    ")?.split([',', '(', ' ']).next()?;
        name.starts_with(|first: char| first.is_ascii_uppercase()).then(|| name.to_owned())
    };
    body.lines().skip(1).filter_map(variant).collect()
}

#[test]
fn every_error_of_a_call_and_of_a_start_is_documented() {
    let rows = rows(&section(&read("engine/README.md"), "## Errors"));
    let documented: BTreeSet<String> = rows.iter().map(|row| row[0].trim_matches('`').to_owned()).collect();
    let mut variants_in_code = BTreeSet::new();
    for (name, file) in
        [("CallError", "engine/proto/src/call_error.rs"), ("StartErrorKind", "engine/src/start_error.rs")]
    {
        variants_in_code.extend(variants(file, name).into_iter().map(|variant| format!("{name}::{variant}")));
    }
    assert!(variants_in_code.len() >= 20, "expected at least 20 variants: {variants_in_code:?}");
    assert_eq!(
        documented, variants_in_code,
        "the table of errors in engine/README.md (left), and the variants (right)"
    );
}

/// Methods of the feature `unstable-internals` that `engine/PROTOCOL.md` names.
const UNSTABLE: &[&str] =
    &["LocalClient::request_change", "LocalClient::take_changes", "LocalClient::set_remote_invalidation"];

/// Each `Type::member` that a document names for a public type is in `engine/api.txt`.
#[test]
fn public_names_in_documents_exist() {
    let list = read("engine/api.txt");
    let items: Vec<(&str, &str)> = list
        .lines()
        .filter_map(|line| line.split_once(' '))
        .map(|(kind, rest)| (kind, rest.split(' ').next().unwrap_or_default().trim_end_matches(':')))
        .collect();
    let last_parts = |path: &str, parts: usize| {
        let names: Vec<&str> = path.split("::").collect();
        names[names.len().saturating_sub(parts)..].join("::")
    };
    let types = items.iter().filter(|item| ["struct", "enum", "trait"].contains(&item.0));
    let types: BTreeSet<String> = types.map(|item| last_parts(item.1, 1)).collect();
    let members: BTreeSet<String> = items.iter().map(|item| last_parts(item.1, 2)).collect();
    let mut seen = 0;
    for document in files(".", ".md") {
        // The change log also has names that only earlier versions had.
        if document.ends_with("CHANGELOG.md") {
            continue;
        }
        let text = read(&document);
        let spans =
            text.lines().filter(|line| !line.starts_with("```")).flat_map(|line| line.split('`').skip(1).step_by(2));
        let is_name = |c: char| c.is_alphanumeric() || c == '_' || c == ':';
        for path in spans.flat_map(|span| span.split(|c| !is_name(c))).filter(|path| path.contains("::")) {
            let name = last_parts(path, 2);
            if types.contains(name.split("::").next().expect("split yields at least one part")) {
                seen += 1;
                let known = members.contains(&name) || UNSTABLE.contains(&name.as_str());
                assert!(known, "{document} names {path}, which is not in engine/api.txt");
            }
        }
    }
    assert!(seen > 80, "expected more than 80 names, found {seen}");
}

/// Adds the keys of a JSON value and of all values in it to `all`.
fn collect_keys(value: &serde_json::Value, all: &mut BTreeSet<String>) {
    match value {
        serde_json::Value::Array(list) => list.iter().for_each(|value| collect_keys(value, all)),
        serde_json::Value::Object(object) => object.iter().for_each(|(key, value)| {
            all.insert(key.clone());
            collect_keys(value, all);
        }),
        _ => {}
    }
}

/// Counters in the columns `check` and `counter` of `tuning.md` are JSON fields of the statistics socket or of
/// `rpcperf`, or metrics of the duplicate request cache.
#[test]
fn counters_of_tuning_exist() {
    let mut stats = ShardStats::default();
    stats.procedures.push(Default::default());
    stats.peers.push(Default::default());
    stats.pool.classes.push(Default::default());
    let mut known: BTreeSet<String> = ["preemptions", "busy"].map(String::from).into();
    collect_keys(&serde_json::to_value(stats).expect("statistics are encodable as JSON"), &mut known);
    known.extend(DuplicateRequestCacheStats::default().metrics().map(|metric| metric.name.to_owned()));
    let mut seen = 0;
    let mut column = None;
    for line in read("tuning.md").lines() {
        let cells: Vec<&str> = line.split(" | ").map(|cell| cell.trim_matches(['|', ' '])).collect();
        if !line.starts_with('|') {
            column = None;
        } else if cells.iter().any(|cell| ["check", "counter"].contains(cell)) {
            column = cells.iter().position(|cell| ["check", "counter"].contains(cell));
        } else if let Some(cell) = column.and_then(|column| cells.get(column)) {
            for name in cell.split('`').skip(1).step_by(2) {
                let is_identifier = name.bytes().all(|b| b.is_ascii_lowercase() || b"_*".contains(&b));
                // `rpcperf` and `top` are programs, and `c` is a key of `top`.
                if is_identifier && !["rpcperf", "top", "c"].contains(&name) {
                    seen += 1;
                    let found = match name.strip_suffix('*') {
                        Some(start) => known.iter().any(|known| known.starts_with(start)),
                        None => known.contains(name),
                    };
                    assert!(found, "tuning.md names {name}, which is not a counter: {line}");
                }
            }
        }
    }
    assert!(seen > 40, "expected more than 40 counters, found {seen}");
}

#[test]
fn documented_error_codes_equal_those_of_the_codec() {
    let all = [
        ErrorBody::Vers { low: 0, high: 0 },
        ErrorBody::BadXdr,
        ErrorBody::InvalHtype,
        ErrorBody::InvalFlag,
        ErrorBody::ReadChunks { max: 0 },
        ErrorBody::WriteChunks { max: 0 },
        ErrorBody::Segments { max: 0 },
        ErrorBody::WriteResource { chunk_index: 0, length_needed: 0 },
        ErrorBody::ReplyResource { length_needed: 0 },
        ErrorBody::System,
    ];
    let rows = rows(&section(&read("engine/PROTOCOL.md"), "## Error codes"));
    assert_eq!(rows.len(), all.len(), "rows of the table and errors of the codec");
    for (row, error) in rows.iter().zip(all) {
        let code = |revision| error.code(Version::V2, revision);
        assert_eq!(row[0], error.name());
        assert_eq!(parse_number(&row[1]), code(Revision::Ietf00), "{row:?}");
        assert_eq!(parse_number(&row[2]), code(Revision::Cel09), "{row:?}");
    }
}

#[test]
fn documented_properties_equal_those_of_the_codec() {
    let rows = rows(&section(&read("engine/PROTOCOL.md"), "## Properties"));
    assert_eq!(rows.len(), PropertyId::ALL.len(), "rows of the table and properties of the codec");
    for (row, property) in rows.iter().zip(PropertyId::ALL) {
        let code = |cell: &String| (cell != "–").then(|| parse_number(cell));
        assert_eq!(row[0], property.name());
        assert_eq!(code(&row[1]), property.which(Revision::Ietf00), "{row:?}");
        assert_eq!(code(&row[2]), property.which(Revision::Cel09), "{row:?}");
    }
}

#[test]
fn documented_header_types_equal_those_of_the_codec() {
    let rows = rows(&section(&read("engine/PROTOCOL.md"), "## Headers"));
    let rows: Vec<_> = rows.iter().filter(|row| HeaderType::ALL.iter().any(|htype| htype.name() == row[1])).collect();
    assert_eq!(rows.len(), HeaderType::ALL.len(), "rows of the table and header types of the codec");
    for (row, htype) in rows.iter().zip(HeaderType::ALL) {
        assert_eq!((parse_number(&row[0]), row[1].as_str()), (htype.code(), htype.name()));
        let has = |version| HeaderType::of_version(htype.code(), version).is_some();
        let versions = match (has(Version::V1), has(Version::V2)) {
            (true, true) => "both",
            (true, false) => "1",
            _ => "2",
        };
        assert_eq!(row[2], versions, "{htype}");
    }
}

#[test]
fn engine_rules_name_existing_tests() {
    let tests = test_names();
    assert!(
        tests.contains("engine_rules_name_existing_tests"),
        "this test is not among the {} tests found",
        tests.len()
    );
    let rows = rows(&section(&read("engine/REQUIREMENTS.md"), "## Tests of engine-specific rules"));
    assert!(rows.len() >= 25, "expected at least 25 rules, found {}", rows.len());
    for row in rows {
        let named: Vec<&str> = row[2].split(", ").map(|name| name.trim_matches('`')).collect();
        assert!(!named.is_empty() && !row[0].is_empty() && !row[1].is_empty(), "a cell is empty: {row:?}");
        for name in named {
            assert!(tests.contains(name), "the test {name:?} does not exist; it would prove: {}", row[1]);
        }
    }
}

/// A name of five or more words is taken for a test. Knobs and functions have fewer words.
#[test]
fn tests_that_documents_name_exist() {
    let tests = test_names();
    let mut seen = 0;
    for document in ["tests/peers.md", "tests/vm/README.md"] {
        let text = read(document);
        let is_name = |text: &&str| text.bytes().all(|byte| byte == b'_' || byte.is_ascii_alphanumeric());
        for name in text.split('`').filter(is_name).filter(|name| name.matches('_').count() >= 4) {
            seen += 1;
            assert!(tests.contains(name), "{document} names the test {name}, which does not exist");
        }
    }
    assert!(seen > 80, "expected more than 80 names, found {seen}");
}

#[test]
fn links_have_existing_targets() {
    let mut seen = 0;
    for document in files(".", ".md") {
        let document = document.trim_start_matches("./");
        let text = read(document);
        let directory = root().join(document).parent().expect("a file is in a directory").to_owned();
        for link in text.split("](").skip(1).filter_map(|rest| rest.split_once(')')).map(|(link, _)| link) {
            if link.contains("://") {
                continue;
            }
            seen += 1;
            let (file, heading) = link.split_once('#').unwrap_or((link, ""));
            let target = if file.is_empty() { root().join(document) } else { directory.join(file) };
            assert!(target.exists(), "{document} links to {link}, which does not exist");
            if !heading.is_empty() {
                let text = std::fs::read_to_string(&target).expect("a link with a heading leads to a text file");
                assert!(
                    text.lines().any(|line| anchor(line).as_deref() == Some(heading)),
                    "{document}: no heading matches the link {link}"
                );
            }
        }
    }
    assert!(seen > 10, "expected more than ten links, found {seen}");
}

/// `tests/documents.rs` runs each block of commands, unless the block states why it is not run.
#[test]
fn commands_in_documents_are_run_or_give_a_reason() {
    let mut documents = vec!["README.md".to_owned()];
    documents.extend(["tools", "deploy"].iter().flat_map(|directory| files(directory, ".md")));
    let (mut run, mut outputs) = (0, 0);
    for document in &documents {
        assert!(
            COMMANDS.contains(&document.as_str()),
            "{document} is missing in COMMANDS, so its commands would not run"
        );
        let mut preceding_block_runs = false;
        for block in blocks(&read(document)) {
            let kind = block.info.split(' ').next().expect("split yields at least one part");
            assert!(
                matches!(kind, "sh" | "text" | "rust"),
                "{document}:{}: a block is sh, text or rust, not {kind:?}",
                block.line
            );
            let runner = block.runner();
            run += usize::from(runner.is_some_and(|runner| runner != Runner::NotRun));
            if block.info == "text output" {
                assert!(preceding_block_runs, "{document}:{}: no executed block precedes this output", block.line);
                outputs += 1;
            }
            preceding_block_runs = runner.is_some_and(|runner| runner != Runner::NotRun);
        }
    }
    assert!(run > 20 && outputs > 5, "expected more than 20 blocks and 5 outputs: {run} blocks, {outputs} outputs");
}

/// The anchor that GitHub derives from a heading. `None` if the line is not a heading.
fn anchor(line: &str) -> Option<String> {
    let text = line.strip_prefix('#')?.trim_start_matches('#').trim().to_lowercase();
    let is_kept = |c: char| c.is_alphanumeric() || c == ' ' || c == '-' || c == '_';
    Some(text.chars().filter(|&c| is_kept(c)).map(|c| if c == ' ' { '-' } else { c }).collect())
}

/// Each function in the tables of a call exists in the file that its row names before the function.
#[test]
fn call_tables_name_existing_functions() {
    let readme = read("engine/README.md");
    let tables = ["## One inline call", "## One bulk call"].map(|heading| rows(&section(&readme, heading)));
    for table in &tables {
        assert!((8..=12).contains(&table.len()), "expected 8 to 12 steps, found {}", table.len());
    }
    let mut seen = 0;
    for row in tables.iter().flatten() {
        let mut file = String::new();
        let text = row[1..].join(" ");
        for name in text.split('`').skip(1).step_by(2) {
            if name.ends_with(".rs") {
                file = code(&read(format!("engine/{name}")));
            } else if name.chars().all(|c| c.is_ascii_lowercase() || c == '_') {
                let names: Vec<&str> = words(&file).collect();
                let defined = names.windows(2).any(|pair| pair == ["fn", name]);
                // In "`function` of `file`", the file follows the function.
                let elsewhere = text.split_once(&format!("`{name}` of `")).and_then(|(_, rest)| rest.split_once('`'));
                let elsewhere = elsewhere.is_some_and(|(path, _)| {
                    let text = read(format!("engine/{path}"));
                    ['(', '<'].iter().any(|end| text.contains(&format!("fn {name}{end}")))
                });
                assert!(defined || elsewhere, "step {} names the function {name}, which does not exist", row[0]);
                seen += 1;
            }
        }
    }
    assert!(seen > 20, "expected more than 20 functions, found {seen}");
}

/// Files that must have a table of the files beside them.
const REQUIRED_TABLES: &[&str] =
    &["engine/proto/src/lib.rs", "engine/proto/src/wire/mod.rs", "engine/fabric/src/lib.rs", "engine/src/shard/mod.rs"];

/// A table of files lists exactly the modules in its directory, without tests.
#[test]
fn tables_of_files_are_complete() {
    let with_table = |path: &String| read(path).lines().any(|line| line.starts_with("//! | file | "));
    let pages: Vec<String> =
        ["bench", "engine", "mempool", "tests", "tools"].iter().flat_map(|crate_| files(crate_, ".rs")).collect();
    let pages: Vec<String> = pages.into_iter().filter(with_table).collect();
    for page in REQUIRED_TABLES {
        assert!(pages.iter().any(|path| path == page), "{page} has no table of its files");
    }
    let mut wrong = Vec::new();
    for page in &pages {
        let (directory, own) = page.rsplit_once('/').expect("a file is in a directory");
        // `a.rs` and all files in `a/` form module `a`.
        let module = |path: &String| {
            let inner = path.strip_prefix(directory)?.strip_prefix('/')?;
            let name = inner.split('/').next()?;
            (!is_test(&format!("{directory}/{name}"))).then(|| name.trim_end_matches(".rs").to_owned())
        };
        let mut existing: BTreeSet<String> = files(directory, ".rs").iter().filter_map(module).collect();
        existing.remove(own.trim_end_matches(".rs"));
        let text: Vec<String> =
            read(page).lines().map_while(|line| line.strip_prefix("//!")).map(|line| line.trim().into()).collect();
        let mut named = BTreeSet::new();
        for row in rows(&text.join("\n")) {
            for name in row[0].split(", ").map(|name| name.trim_matches(['[', ']', '`']).to_owned()) {
                if !named.insert(name.clone()) {
                    wrong.push(format!("{page} names {name} twice"));
                }
            }
        }
        wrong.extend(named.difference(&existing).map(|name| format!("{page} names {name}, which does not exist")));
        wrong.extend(existing.difference(&named).map(|name| format!("{page} does not name {name}")));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Rust files that documents name in backticks exist.
#[test]
fn files_named_in_documents_exist() {
    let mut seen = 0;
    for document in [
        "README.md",
        "tools/README.md",
        "deploy/README.md",
        "engine/README.md",
        "engine/PROTOCOL.md",
        "mempool/README.md",
        "tests/README.md",
        "tests/peers.md",
        "tests/fuzz/README.md",
        "tuning.md",
        "CONTRIBUTING.md",
        "bench/measurements.md",
    ] {
        let directory = root().join(document).parent().expect("a file is in a directory").to_owned();
        for name in read(document).split('`').skip(1).step_by(2) {
            let is_path = name.bytes().all(|b| b.is_ascii_alphanumeric() || b"_-./".contains(&b));
            if is_path && name.contains('/') && name.ends_with(".rs") {
                seen += 1;
                let found = [&directory, &directory.join("src"), &root()].iter().any(|base| base.join(name).exists());
                assert!(found, "{document} names {name}, which does not exist");
            }
        }
    }
    assert!(seen > 10, "expected more than ten file names, found {seen}");
}
