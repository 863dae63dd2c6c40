//! Compilation in build scripts.

use std::path::{Path, PathBuf};
use std::{env, fs, io};

use thiserror::Error;

use crate::{Errors, Options, Schema, Source, generate, parse};

/// A file that was not compiled.
#[derive(Debug, Error)]
pub enum CompileError {
    /// A file was not read or written.
    #[error("{path}: {source}", path = path.display())]
    File {
        /// Its path.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The specification or placement file is invalid.
    #[error(transparent)]
    Invalid(#[from] Errors),
    /// Not in a build script.
    #[error("OUT_DIR is not set: xdrgen::compile is for build scripts")]
    NoOutDir,
}

/// Compiles `NAME.x` to `$OUT_DIR/NAME.rs` in a build script, with [`Options::default`].
///
/// A file `NAME.placement.toml` beside it is its placement file. Cargo runs the build script again if one changes.
/// The crate includes the result in a module:
///
/// ```ignore
/// mod nfs3 {
///     include!(concat!(env!("OUT_DIR"), "/nfs3.rs"));
/// }
/// ```
///
/// # Errors
/// The files are invalid or not readable, or the result is not writable.
pub fn compile(path: impl AsRef<Path>) -> Result<(), CompileError> {
    compile_with(path, &Options::default())
}

/// [`compile`] with other options.
///
/// # Errors
/// As [`compile`].
pub fn compile_with(path: impl AsRef<Path>, options: &Options) -> Result<(), CompileError> {
    let path = path.as_ref();
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or(CompileError::NoOutDir)?);
    let placement = Some(placement_of(path)).filter(|path| path.exists());
    for path in [Some(path), placement.as_deref()].into_iter().flatten() {
        println!("cargo::rerun-if-changed={}", path.display());
    }
    let schema = load(path, placement.as_deref())?;
    let to = out.join(path.with_extension("rs").file_name().unwrap_or_default());
    fs::write(&to, generate(&schema, options)).map_err(|source| CompileError::File { path: to, source })
}

/// [`compile_with`], but prints errors and ends the build script.
pub fn compile_or_exit(path: impl AsRef<Path>, options: &Options) {
    if let Err(error) = compile_with(path, options) {
        eprintln!("{error}");
        std::process::exit(1);
    }
}

/// Path of the placement file beside `path`.
#[must_use]
pub fn placement_of(path: &Path) -> PathBuf {
    path.with_extension("placement.toml")
}

/// Reads a specification and its placement file.
///
/// # Errors
/// A file is invalid or not readable.
pub fn load(path: &Path, placement: Option<&Path>) -> Result<Schema, CompileError> {
    let read = |path: &Path| match fs::read_to_string(path) {
        Ok(text) => Ok(Source { name: path.display().to_string(), text }),
        Err(source) => Err(CompileError::File { path: path.into(), source }),
    };
    let placement = placement.map(read).transpose()?;
    Ok(parse(&read(path)?, placement.as_ref())?)
}
