//! Compilation in build scripts.

use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::{env, io, process};

use thiserror::Error;

use crate::preprocessor;
use crate::sources::{MAX_BYTES, Sources, decode_text};
use crate::{Errors, Options, Schema, Source, generate, parse_files};

/// A file that was not compiled.
#[derive(Debug, Error)]
pub enum CompileError {
    /// A file could not be read or written.
    #[error("{path}: {source}{limit}", path = path.display(), limit = limit(source))]
    File {
        /// Path of the file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// A definition of [`Options::define`] is invalid.
    #[error("invalid definition `{define}`: {reason}")]
    Define {
        /// The definition.
        define: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The specification or placement file is invalid.
    #[error(transparent)]
    Invalid(#[from] Errors),
    /// [`compile`] was not called by a build script.
    #[error("OUT_DIR is not set: xdrgen::compile is for build scripts")]
    NoOutDir,
}

/// Names the limit of the process that a write has exceeded, if any.
fn limit(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::FileTooLarge => " (RLIMIT_FSIZE; `ulimit -f unlimited` lifts it)",
        _ => "",
    }
}

/// Compiles `NAME.x` to `$OUT_DIR/NAME.rs` in a build script.
///
/// `NAME.placement.toml` beside it is its placement file, if it exists. Cargo runs the build script again if one of the
/// files changes. While there is no placement file, Cargo watches the directory, so that it notices a new file. This is
/// not possible if the directory contains the output of the build, and a warning then says so. Warnings are printed as
/// warnings of the build script.
///
/// The crate includes the result in a module:
///
/// ```ignore
/// mod nfs3 {
///     include!(concat!(env!("OUT_DIR"), "/nfs3.rs"));
/// }
/// ```
///
/// # Errors
/// The files are invalid or cannot be read, or the result cannot be written.
pub fn compile(path: impl AsRef<Path>, options: &Options) -> Result<(), CompileError> {
    let path = path.as_ref();
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or(CompileError::NoOutDir)?);
    for path in [Some(path.into()), watched(path, &out)].into_iter().flatten() {
        println!("cargo::rerun-if-changed={}", path.display());
    }
    let mut schema = load(path, None, options)?;
    for included in &schema.included {
        println!("cargo::rerun-if-changed={}", included.display());
    }
    if !options.types_only && !schema.programs.is_empty() && watched(path, &out).is_none() {
        let placement = placement_of(path);
        schema.warnings.push(format!(
            "there is no {0}, so nothing may travel in chunks. Cargo does not notice a new one, because the output of \
             the build is in the same directory: write the file, then change {1}",
            placement.display(),
            path.display()
        ));
    }
    for warning in &schema.warnings {
        println!("cargo::warning={warning}");
    }
    let to = out.join(path.with_extension("rs").file_name().unwrap_or_default());
    write(&to, &generate(&schema, options))
}

/// Writes generated code to a file.
///
/// A regular file is replaced once the code is written completely. After an error, it has its previous content.
///
/// # Errors
/// The file or its directory cannot be written.
pub fn write(path: &Path, code: &str) -> Result<(), CompileError> {
    replace(path, code).map_err(|source| CompileError::File { path: path.into(), source })
}

fn replace(path: &Path, code: &str) -> io::Result<()> {
    let (target, old) = match path.canonicalize() {
        // Opening the file checks that it may be written, because a rename would ignore its mode.
        Ok(target) if target.is_file() => {
            let old = OpenOptions::new().write(true).open(&target)?.metadata()?;
            (target, Some(old.permissions()))
        }
        Err(_) if !path.is_symlink() => (path.into(), None),
        // The path is a device, a pipe, or a link that leads to no file.
        _ => return fs::write(path, code),
    };
    let (mut file, new) = new_file_beside(&target)?;
    let written = file
        .write_all(code.as_bytes())
        .and_then(|()| old.map_or(Ok(()), |permissions| file.set_permissions(permissions)))
        .and_then(|()| fs::rename(&new, &target));
    if written.is_err() {
        // The error of the write is reported, so an error of the removal is ignored.
        let _ = fs::remove_file(&new);
    }
    written
}

/// Creates a file with an unused name, in the directory of `path`.
fn new_file_beside(path: &Path) -> io::Result<(File, PathBuf)> {
    let mut number = 0;
    loop {
        let new = path.with_file_name(format!(".xdrgen-{}-{number}", process::id()));
        match File::create_new(&new) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => number += 1,
            file => return Ok((file?, new)),
        }
    }
}

/// Calls [`compile`]. On an error, prints it and ends the build script.
pub fn compile_or_exit(path: impl AsRef<Path>, options: &Options) {
    if let Err(error) = compile(path, options) {
        let _ = writeln!(io::stderr(), "{error}");
        process::exit(1);
    }
}

/// Path of the placement file beside `path`.
fn placement_of(path: &Path) -> PathBuf {
    path.with_extension("placement.toml")
}

fn directory(path: &Path) -> &Path {
    path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Path that Cargo watches for changes of the placement file, if possible.
///
/// Cargo runs a script each time if a watched file is missing. A directory with the output changes each time, too.
fn watched(path: &Path, out: &Path) -> Option<PathBuf> {
    let (placement, dir) = (placement_of(path), directory(path));
    let has_output = || Some(out.canonicalize().ok()?.starts_with(dir.canonicalize().ok()?));
    if placement.exists() { Some(placement) } else { (has_output() == Some(false)).then(|| dir.into()) }
}

/// Reads a specification and its placement file.
///
/// The placement file is `placement`, or else the one beside the specification, if it exists. Included specifications
/// become a part of the including one. Only the definitions of [`Options::define`] in `options` have an effect.
///
/// # Errors
/// A file is invalid or cannot be read.
pub fn load(path: &Path, placement: Option<&Path>, options: &Options) -> Result<Schema, CompileError> {
    check_defines(&options.defines)?;
    let failed = |path: &Path, source| CompileError::File { path: path.into(), source };
    let read = |path: &Path| match read_bounded(path) {
        Ok(bytes) => Ok(Source { name: path.display().to_string(), text: decode_text(&bytes) }),
        Err(source) => Err(failed(path, source)),
    };
    let beside = placement_of(path);
    let placement = placement.or_else(|| beside.exists().then_some(&*beside));
    let file = placement.map(read).transpose()?;
    let sources = Sources::read(path).map_err(|source| failed(path, source))?;
    let mut schema = parse_files(&sources, file.as_ref(), &options.defines)?;
    schema.included = sources.included_paths();
    if placement.is_none() {
        let warning = |file: PathBuf| format!("{} is not used: expected the name {}", file.display(), beside.display());
        schema.warnings.extend(misnamed(path).map(warning));
    }
    Ok(schema)
}

/// Reads a placement file.
fn read_bounded(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(MAX_BYTES as u64 + 1).read_to_end(&mut bytes)?;
    if bytes.len() > MAX_BYTES {
        return Err(io::Error::other(format!("a placement file exceeds {MAX_BYTES} bytes")));
    }
    Ok(bytes)
}

/// Checks the definitions of options.
fn check_defines(defines: &[String]) -> Result<(), CompileError> {
    let mut known = HashMap::new();
    for define in defines {
        let invalid = |reason| CompileError::Define { define: define.clone(), reason };
        let (name, value) = preprocessor::parse_option(define).map_err(invalid)?;
        let first = *known.entry(name).or_insert(value);
        if first != value {
            return Err(invalid(format!("another definition of `{name}` is {first}")));
        }
    }
    Ok(())
}

/// Files that may be meant as the missing placement file of `path`.
///
/// They are `NAME.toml`, and placement files that do not belong to a specification.
fn misnamed(path: &Path) -> impl Iterator<Item = PathBuf> {
    let same_stem = path.with_extension("toml").file_name().map(ToOwned::to_owned);
    let files = fs::read_dir(directory(path)).into_iter().flatten().flatten().map(|entry| entry.path());
    files.filter(move |file| {
        let Some(name) = file.file_name().and_then(|name| name.to_str()) else { return false };
        let has_specification = |stem| file.with_file_name(format!("{stem}.x")).exists();
        let is_used = name.strip_suffix(".placement.toml").is_some_and(has_specification);
        let is_data = name.ends_with("ml") || name.ends_with(".placement");
        file.file_name() == same_stem.as_deref() || (name.contains("placement") && is_data && !is_used)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_placement_file_changes_what_cargo_watches() {
        let dir = tempfile::tempdir().expect("a directory");
        let (out, x) = (tempfile::tempdir().expect("a directory"), dir.path().join("a.x"));
        assert_eq!(watched(&x, out.path()), Some(dir.path().into()));
        assert_eq!(watched(&x, dir.path()), None, "each build changes this directory");
        let placement = dir.path().join("a.placement.toml");
        fs::write(&placement, "").expect("written");
        assert_eq!(watched(&x, out.path()), Some(placement));
        assert_eq!(directory(Path::new("a.x")), Path::new("."));
    }

    #[test]
    fn bytes_that_are_not_utf8_are_allowed_in_comments_only() {
        let dir = tempfile::tempdir().expect("a directory");
        let x = dir.path().join("a.x");
        fs::write(&x, b"/* Andr\xe9, \xc3\xa9 */\nstruct a { int x; };\n").expect("written");
        assert_eq!(load(&x, None, &Options::default()).expect("a schema").types[0].name.doc, ["Andr\u{e9}, \u{e9}"]);
        fs::write(&x, b"/* Andr\xe9 */\nstruct a {\n    int \xe9; };\n").expect("written");
        let error = load(&x, None, &Options::default()).expect_err("not UTF-8").to_string();
        assert!(error.contains("unexpected character `\u{e9}`") && error.contains("a.x:3:9"), "{error}");
    }

    #[test]
    fn a_placement_file_beyond_the_limit_is_refused() {
        let dir = tempfile::tempdir().expect("a directory");
        let (x, long) = (dir.path().join("a.x"), dir.path().join("long.toml"));
        fs::write(&x, "const A = 1;\n").expect("written");
        fs::write(&long, "#".repeat(MAX_BYTES + 1)).expect("written");
        let error = load(&x, Some(&long), &Options::default()).expect_err("too long").to_string();
        assert!(error.ends_with("long.toml: a placement file exceeds 16777216 bytes"), "{error}");
    }

    #[test]
    fn placement_files_with_wrong_names_are_reported() {
        let dir = tempfile::tempdir().expect("a directory");
        let write = |name: &str| fs::write(dir.path().join(name), "").expect("written");
        ["a.x", "b.x", "b.placement.toml", "Cargo.toml", "c.placement.toml", "a.toml", "a_placement.toml"]
            .into_iter()
            .for_each(write);
        let x = dir.path().join("a.x");
        let mut found: Vec<_> = misnamed(&x).filter_map(|file| file.file_name().map(ToOwned::to_owned)).collect();
        found.sort();
        assert_eq!(found, ["a.toml", "a_placement.toml", "c.placement.toml"]);
        let schema = load(&x, None, &Options::default()).expect("a schema");
        assert!(
            schema.warnings.iter().all(|line| line.contains("expected the name") && line.ends_with("a.placement.toml")),
            "{schema:?}"
        );
        write("a.placement.toml");
        assert!(load(&x, None, &Options::default()).expect("a schema").warnings.is_empty());
    }
}
