//! Compiler for XDR and RPC language (RFC 4506, RFC 5531).
//!
//! [`parse`] reads a specification and its placement file, and returns a checked [`schema`]. [`generate()`] generates
//! Rust code from the schema. Build scripts call [`compile()`].
//!
//! # Language
//!
//! The compiler reads the languages of RFC 4506 §6 and RFC 5531 §12, without `quadruple`. A comment before an item, or
//! after it on its line, becomes its documentation. `NAME *next;` as the last field of `struct NAME`, also through a
//! typedef of the pointer, makes a list of any length. Any other type that contains itself does so through a
//! `Recursive` view, with at most 64 levels.
//!
//! Beyond the RFCs, it reads:
//! - `unsigned` alone, `char`, `short`, `long`, and the integers of C headers, such as `u_int` and `uint64_t`;
//! - `netobj`, `netbuf`, `des_block`, `MAXNETNAMELEN` of Sun's RPC library, `opaque_auth`, `authsys_parms`, and the
//!   flavors of authentication, such as `AUTH_NONE`, `AUTH_SYS` and `RPCSEC_GSS`;
//! - `struct NAME`, `union NAME` and `enum NAME` as types;
//! - enum values without a number, which are one more than the value before;
//! - procedures without arguments, with several, and with named arguments; `string` and `opaque` without bounds as
//!   arguments and results, and `string` without bounds as a field;
//! - `zcopaque` (libevpl): `opaque` that may travel in a chunk, unless it is inside an array, list, optional or
//!   recursive data;
//! - `namespace NAME { … }` (xdrpp); the names of all namespaces of a file must differ;
//! - `pragma …;` (the Linux kernel), without effect, and `struct NAME;` before the definition;
//! - names of procedures as numbers (RFC 1833 §2.1);
//! - `struct *NAME { … }`, a pointer to a structure (RFC 1833 §3.1);
//! - a name after the last brace of a type (RFC 5531 §9), and constants that are strings; neither has an effect.
//!
//! A value takes at most 32 KiB, and 128 KiB together with all levels of its nested types. Data that it borrows from
//! the message does not count, so longer arrays must have variable length. An element takes at least one word of XDR. A
//! procedure has at most 12 arguments.
//!
//! Lines of the C preprocessor:
//! - `#define NAME value` is a constant if the value is a number, a known name, or a sum of numbers and known names.
//!   Other `#define` lines only make the name known to `#ifdef`. A value that exceeds 64 bits is an error.
//! - `#undef NAME` ends a definition. Items before it use the previous value, and another `#define` may follow.
//! - [`Options::define`] and the option `-D NAME=VALUE` of the command define a name, like constants of C headers. The
//!   specification must not define the name again, except in a line with `%`, which then has no effect.
//! - `#ifdef NAME` is true after a `#define` of the name, or if an option defines it. `RPC_HDR`, `RPC_XDR`, `RPC_SVC`,
//!   `RPC_CLNT` and `RPC_TBL` are unknown, so lines that `rpcgen` copies to only one of its outputs are skipped.
//! - `#if` and `#elif` take a number, a name, `defined(NAME)`, and `!` before these.
//! - `#include "other.x"` reads another specification, by its path from the including file. Its items become items of
//!   the including one, only once even if several lines include it. A missing file and a cycle are errors. The limits
//!   are 16 MiB, 256 files, and 16 nested files.
//! - `#include "other.h"` and `%#include "other.h"`, as for `rpcgen`, read `other.x` if it exists beside the header.
//! - `#error` is an error, and `#warning` a warning, unless an `#if` skips it.
//! - Other `#include` lines, `#line` and `#pragma` are dropped, with a warning. `#pragma once` and `#ident` have no
//!   effect.
//! - A byte that is not UTF-8 is read as Latin-1, and may be in a comment.
//! - Lines that begin with `%` are C code and are dropped, except for `%#define NAME value`, whose value the file may
//!   use.
//!
//! # Placement file
//!
//! `NAME.placement.toml` beside `NAME.x` says what the language cannot express. All keys are optional.
//! ```toml
//! # Items that the upper-layer binding allows in chunks (RFC 8166 §6): variable opaque or string.
//! # A typedef is one Rust type: a field of a typedef is named by the typedef, here and in `[bounds]`.
//! eligible = ["READ3resok.data"]      # TYPE.FIELD, or a typedef
//! # Bounds that the specification leaves open, in bytes or elements, of a typedef or TYPE.FIELD.
//! # To narrow a bound of the specification, name it, too. Longer data of clients is then refused.
//! [bounds]
//! filename3 = 255
//! "READ3resok.data" = 1_048_576
//! dirpath = { from = 1024, to = 255 }
//! # A procedure is [VERSION.NAME], or [PROGRAM.VERSION.NAME] if two programs have a version of this name.
//! [NFS_V3.NFSPROC3_READ]
//! max_call = 80                       # limit of the arguments' bytes without eligible items (default: computed)
//! max_reply = 104                     # limit of the results' bytes without eligible items (default: computed)
//! max_inline_result = 3940            # limit of the bytes of eligible results in a reply without Write chunk
//! one_way = false                     # calls have no reply; needs `void` results and version 2 of RPC-over-RDMA
//! cached = false                      # a retransmitted call does not run again (duplicate request cache)
//! run = "shard"                       # or "workers", "deferred", "async"
//! ```
//! If there is a placement file, a procedure without a bound needs `max_call` or `max_reply`. If there is none, the
//! default of both is 64 KiB.
#![forbid(unsafe_code)]
#![warn(clippy::print_stderr)]

mod ast;
mod compile;
mod errors;
mod generate;
mod hoist;
mod lexer;
mod library;
mod limits;
mod parser;
mod placement;
mod preprocessor;
mod recursion;
mod resolver;
pub mod schema;
mod sizes;
mod sources;

pub use compile::{CompileError, compile, compile_or_exit, load, write};
pub use errors::Errors;
pub use generate::{Options, generate};
pub use schema::Schema;

use errors::Problems;
use sources::Sources;

/// A file, with its name for messages.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Source {
    /// Path or name.
    pub name: String,
    /// Content of the file.
    pub text: String,
}

/// Compiles a specification and its placement file.
///
/// Included files are not read; [`load`] reads them.
///
/// # Errors
/// All errors of the first stage that has any. The stages are syntax, names, recursion, limits and placement.
pub fn parse(xdr: &Source, placement: Option<&Source>) -> Result<Schema, Errors> {
    parse_files(&Sources::text(xdr), placement, &[])
}

/// Compiles a specification, with the files that it includes and the names that options define.
fn parse_files(xdr: &Sources, placement: Option<&Source>, defines: &[String]) -> Result<Schema, Errors> {
    let mut problems = Problems::default();
    let schema = run_stages(xdr, placement, defines, &mut problems);
    let warnings = problems.warnings(xdr);
    let schema = schema.filter(|_| problems.is_empty()).map(|schema| Schema { warnings, ..schema });
    schema.ok_or_else(|| problems.into_errors(xdr, placement))
}

/// Runs the stages. `None` if a stage has errors that the next one would only repeat.
fn run_stages(
    xdr: &Sources,
    placement: Option<&Source>,
    defines: &[String],
    problems: &mut Problems,
) -> Option<Schema> {
    let (tokens, preprocessor) = lexer::lex(xdr, defines, problems);
    problems.is_empty().then_some(())?;
    let mut definitions = parser::parse(&tokens, problems);
    problems.is_empty().then_some(())?;
    library::add_used(&tokens, &mut definitions, problems);
    let mut schema = resolver::resolve(hoist::hoist(definitions), preprocessor, problems);
    problems.is_empty().then_some(())?;
    recursion::find_lists(&mut schema, problems);
    recursion::box_recursion(&mut schema);
    recursion::check(&schema, problems);
    problems.is_empty().then_some(())?;
    limits::check(&schema, problems);
    problems.is_empty().then_some(())?;
    placement::apply(&mut schema, placement, problems);
    Some(schema)
}
