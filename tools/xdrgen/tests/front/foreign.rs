//! Specifications of other projects and of RFCs.

use std::path::{Path, PathBuf};

use xdrgen::{Schema, Source, parse};

fn parsed(name: &str, text: String) -> Schema {
    let source = Source { name: name.into(), text };
    parse(&source, None).unwrap_or_else(|errors| panic!("{errors}"))
}

/// Files of `rpcsvc-proto` that others include.
const INCLUDES: [(&str, &[&str]); 2] = [("nis.x", &["nis_object.x"]), ("nis_callback.x", &["nis_object.x", "nis.x"])];

#[test]
fn specifications_of_rpcsvc_compile() {
    let directory = Path::new("/usr/include/rpcsvc");
    let files = std::fs::read_dir(directory).into_iter().flatten().map(|entry| entry.unwrap().path());
    let mut files: Vec<PathBuf> = files.filter(|path| path.extension().is_some_and(|end| end == "x")).collect();
    files.sort();
    if files.is_empty() {
        return println!("not run: no {}/*.x (rpcsvc-proto, libnsl-dev)", directory.display());
    }
    for path in files {
        let name = path.file_name().unwrap().to_str().unwrap();
        let includes = INCLUDES.iter().find(|(file, _)| *file == name).map_or(&[] as &[_], |(_, includes)| includes);
        let read = |name| std::fs::read_to_string(directory.join(name)).unwrap();
        let text = includes.iter().copied().chain([name]).map(read).collect();
        assert!(!parsed(name, text).programs.is_empty() || name == "nis_object.x", "{name}");
    }
}

/// Returns the definitions of an RFC without page breaks: the lines from a keyword to the semicolon after all braces.
fn definitions(rfc: &str) -> String {
    let mut lines = Vec::new();
    for line in rfc.split('\u{c}').flat_map(|page| page.trim_matches('\n').lines()) {
        if !(line.starts_with("RFC ") || line.ends_with(']') && line.contains("[Page ")) {
            lines.push(line);
        }
    }
    let mut found = String::new();
    let mut lines = lines.into_iter().peekable();
    while let Some(line) = lines.next() {
        let words: Vec<&str> = line.split_whitespace().collect();
        let starts = match *words.as_slice() {
            ["const", _, "=", ..] | ["program", _, "{", ..] => true,
            ["typedef", ..] => line.contains(';'),
            ["enum" | "struct" | "union", ..] => line.contains('{') || line.contains("switch"),
            _ => false,
        };
        if !starts {
            continue;
        }
        let mut definition = String::new();
        let mut line = line;
        loop {
            definition += line;
            definition.push('\n');
            let code = line.split("/*").next().unwrap_or_default();
            let depth = definition.matches('{').count() - definition.matches('}').count();
            if depth == 0 && code.trim_end().ends_with(';') {
                break;
            }
            line = lines.next().unwrap_or_else(|| panic!("no end:\n{definition}"));
        }
        found += &definition;
    }
    found
}

/// A part of an RFC with definitions.
struct Spec {
    rfc: &'static str,
    start: &'static str,
    end: &'static str,
    /// Definitions that the RFC has only in prose or not at all.
    missing: &'static str,
    /// Names that the RFC spells in two ways.
    errata: &'static [(&'static str, &'static str)],
    /// Number of types and of procedures.
    found: (usize, usize),
}

const SPECS: [Spec; 7] = [
    Spec {
        rfc: "rfc1813",
        start: "\n2. RPC Information",
        end: "\n5.0 Appendix",
        missing: "const NFS3_FHSIZE = 64; const NFS3_COOKIEVERFSIZE = 8; const NFS3_CREATEVERFSIZE = 8;
            const NFS3_WRITEVERFSIZE = 8;\n",
        errata: &[("FSINFO3args", "FSINFOargs")],
        found: (131, 22),
    },
    Spec {
        rfc: "rfc1813",
        start: "\n5.0 Appendix",
        end: "\n6.0 Appendix",
        missing: "",
        errata: &[("case MNT_OK:", "case MNT3_OK:")],
        found: (12, 6),
    },
    Spec {
        rfc: "rfc1813",
        start: "\n6.0 Appendix",
        end: "\n7.0 Appendix",
        missing: "const LM_MAXSTRLEN = 1024; enum fsh4_mode { fsm_DN }; enum fsh4_access { fsa_NONE };\n",
        errata: &[],
        found: (10, 0),
    },
    Spec {
        rfc: "rfc1833",
        start: "\n2. RPCBIND Program",
        end: "\n3. Port Mapper",
        missing: "",
        errata: &[],
        found: (16, 20),
    },
    Spec { rfc: "rfc1833", start: "\n3. Port Mapper", end: "\nSecurity", missing: "", errata: &[], found: (5, 6) },
    Spec { rfc: "rfc4506", start: "\n7.  An Example", end: "\n8.  Security", missing: "", errata: &[], found: (3, 0) },
    Spec { rfc: "rfc5531", start: "\n8.  RPC", end: "\n13.  IANA", missing: "", errata: &[], found: (16, 3) },
];

#[test]
fn specifications_in_rfcs_compile() {
    let Some(directory) = std::env::var_os("RPCRDMA_SPECS").map(PathBuf::from) else {
        return println!("not run: RPCRDMA_SPECS does not name a directory with RFCs");
    };
    for spec in SPECS {
        let text = std::fs::read_to_string(directory.join(spec.rfc).with_extension("txt")).unwrap();
        let start = text.find(spec.start).unwrap();
        let end = start + text[start..].find(spec.end).unwrap();
        let mut text = spec.missing.to_owned() + &definitions(&text[start..end]);
        for (wrong, right) in spec.errata {
            assert!(text.contains(wrong), "{wrong}");
            text = text.replace(wrong, right);
        }
        let schema = parsed(spec.rfc, text);
        let versions = schema.programs.iter().flat_map(|program| &program.versions);
        let found = (schema.types.len(), versions.map(|version| version.procedures.len()).sum::<usize>());
        assert_eq!(found, spec.found, "{} {}", spec.rfc, spec.start);
    }
}
