//! Tests of the front end, which makes a schema of a specification and its placement file.

mod any_text;
mod foreign;
mod grammar;
mod placement;

use xdrgen::{Errors, Schema, Source, parse};

/// Compiles `t.x` with `t.placement.toml`.
fn compile(xdr: &str, placement: Option<&str>) -> Result<Schema, Errors> {
    let source = |name: &str, text: &str| Source { name: name.into(), text: text.into() };
    let placement = placement.map(|text| source("t.placement.toml", text));
    parse(&source("t.x", xdr), placement.as_ref())
}

/// The schema of a valid specification.
fn schema(xdr: &str, placement: Option<&str>) -> Schema {
    compile(xdr, placement).unwrap_or_else(|errors| panic!("{errors}"))
}

/// The report about a specification with errors.
fn errors(xdr: &str, placement: Option<&str>) -> String {
    compile(xdr, placement).expect_err(xdr).to_string()
}

/// The titles of all errors.
fn titles(xdr: &str, placement: Option<&str>) -> Vec<String> {
    errors(xdr, placement).lines().filter_map(|line| line.strip_prefix("error: ")).map(str::to_owned).collect()
}
