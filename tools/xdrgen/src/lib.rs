//! Compiler for XDR and RPC language (RFC 4506, RFC 5531).
//!
//! [`parse`] reads a specification and its placement file. [`schema`] is what both say, checked. [`generate()`] makes
//! Rust of it. Build scripts call [`compile()`].
//!
//! # Language
//!
//! RFC 4506 §6 and RFC 5531 §12, without `quadruple`. Comments in front of an item, or behind it on its line, are its
//! documentation. `NAME *next;` as the last field of `struct NAME`, also by a typedef of the pointer, makes a list of
//! any length. Any other type inside a value of itself is a `Boxed` view, with at most 64 levels.
//!
//! Beyond the RFCs, the compiler reads:
//! - `unsigned` alone, `char`, `short`, `long`, and the integers of C headers, such as `u_int` and `uint64_t`;
//! - `netobj`, `netbuf`, `des_block`, `MAXNETNAMELEN` of Sun's RPC library, `opaque_auth`, `authsys_parms`, and the
//!   flavors of authentication, such as `AUTH_NONE`, `AUTH_SYS` and `RPCSEC_GSS`;
//! - `struct NAME`, `union NAME` and `enum NAME` as types;
//! - enum values without number: one more than the last one;
//! - no argument, several arguments, and arguments with names; `string` and `opaque` without bounds as arguments and
//!   results, and `string` without bounds as a field;
//! - `zcopaque` (libevpl): `opaque` that may travel in a chunk, unless it is inside an array, list, optional or
//!   recursive data;
//! - `namespace NAME { … }` (xdrpp): all names are those of one file, and must differ;
//! - `pragma …;` (the Linux kernel), without effect, and `struct NAME;` ahead of the definition;
//! - names of procedures as numbers (RFC 1833 §2.1);
//! - `struct *NAME { … }`, a pointer to a structure (RFC 1833 §3.1);
//! - a name behind the last brace of a type (RFC 5531 §9), and constants that are texts: both have no effect.
//!
//! A value takes at most 32 KiB, and 128 KiB with each level of its nested types, without what it borrows from the
//! message: longer arrays are those of variable length.
//! Elements take at least a word of XDR. A procedure has at most 12 arguments.
//!
//! Lines of the C preprocessor:
//! - `#define NAME value` is a constant if the value is a number, a known name, or a sum of these. Other `#define`
//!   lines only make the name known to `#ifdef`. A value that exceeds 64 bits is an error.
//! - `#undef NAME` ends a definition: items in front of it have the last value, and another `#define` may follow.
//! - [`Options::define`] and `-D NAME=VALUE` of the command define a name, as constants of C headers. The specification
//!   must not define it, too, other than in a line with `%`, which then has no effect.
//! - `#ifdef NAME` is true if a `#define` came before, or an option defines it. So `RPC_HDR`, `RPC_XDR`, `RPC_SVC`,
//!   `RPC_CLNT` and `RPC_TBL` are unknown, and the lines that `rpcgen` copies to one of its outputs are skipped.
//! - `#if` and `#elif` take a number, a name, `defined(NAME)`, and `!` before these.
//! - `#include "other.x"` reads that specification, by its path from the including file. Its items become items of this
//!   one, once, however many lines include it. A missing file and a cycle are errors. The limits are 16 MiB, 256 files,
//!   and 16 files inside each other.
//! - `#include "other.h"` and `%#include "other.h"`, as for `rpcgen`, read `other.x` where it lies beside.
//! - `#error` is an error, and `#warning` a warning, unless an `#if` skips it.
//! - Other `#include` lines, `#line` and `#pragma` are dropped, with a warning. `#pragma once` and `#ident` have no
//!   effect.
//! - A byte that is not UTF-8 is read as Latin-1, and may be in a comment.
//! - Lines with `%` in front are C code and dropped, but for `%#define NAME value`: the file may use the value.
//!
//! # Placement file
//!
//! `NAME.placement.toml` beside `NAME.x` has what the language cannot say. All keys are optional.
//! ```toml
//! # Items that the upper-layer binding allows in chunks (RFC 8166 §6): variable opaque or string.
//! # A typedef is one Rust type: a field of a typedef is named by the typedef, here and in `[bounds]`.
//! eligible = ["READ3resok.data"]      # TYPE.FIELD, or a typedef
//! # Bounds that the specification leaves open, in bytes or elements: of a typedef or TYPE.FIELD.
//! # A bound of the specification is narrowed by naming it: clients may send more, which is then refused.
//! [bounds]
//! filename3 = 255
//! "READ3resok.data" = 1_048_576
//! dirpath = { from = 1024, to = 255 }
//! # A procedure, by the names of its version and its own. Where two programs have the version: [PROGRAM.VERSION.NAME].
//! [NFS_V3.NFSPROC3_READ]
//! max_call = 80                       # most bytes of arguments, eligible items left out (default: computed)
//! max_reply = 104                     # the same of results
//! max_inline_result = 3940            # most bytes of eligible results in a reply without Write chunk
//! one_way = false                     # calls have no reply: for `void` results; version 2 of RPC-over-RDMA only
//! cached = false                      # run once, by the duplicate request cache
//! run = "shard"                       # or "workers", "deferred", "async"
//! ```
//! With a placement file, a procedure without bound needs `max_call` or `max_reply`. Without one the default is 64 KiB.
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

/// A file: its name for messages, and its text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Source {
    /// Path or name.
    pub name: String,
    /// Content.
    pub text: String,
}

/// Compiles a specification and its placement file. [`load`] also reads the files that it includes.
///
/// # Errors
/// All errors of the first stage that has any: syntax, names, recursion, limits, placement.
pub fn parse(xdr: &Source, placement: Option<&Source>) -> Result<Schema, Errors> {
    parse_files(&Sources::text(xdr), placement, &[])
}

/// Compiles a specification, with the files that it includes and the names that options define.
fn parse_files(xdr: &Sources, placement: Option<&Source>, defines: &[String]) -> Result<Schema, Errors> {
    let mut problems = Problems::default();
    let schema = stages(xdr, placement, defines, &mut problems);
    let warnings = problems.warnings(xdr);
    let schema = schema.filter(|_| problems.is_empty()).map(|schema| Schema { warnings, ..schema });
    schema.ok_or_else(|| problems.into_errors(xdr, placement))
}

/// `None` if a stage has errors and the next one would only repeat them.
fn stages(xdr: &Sources, placement: Option<&Source>, defines: &[String], problems: &mut Problems) -> Option<Schema> {
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
