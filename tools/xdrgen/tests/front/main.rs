//! Tests of the front end, which compiles a specification and its placement file to a schema.

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

/// Returns the schema of a valid specification.
fn schema(xdr: &str, placement: Option<&str>) -> Schema {
    compile(xdr, placement).unwrap_or_else(|errors| panic!("{errors}"))
}

/// Returns the error report of an invalid specification.
fn errors(xdr: &str, placement: Option<&str>) -> String {
    compile(xdr, placement).expect_err(xdr).to_string()
}

/// Returns the titles of all errors.
fn titles(xdr: &str, placement: Option<&str>) -> Vec<String> {
    errors(xdr, placement).lines().filter_map(|line| line.strip_prefix("error: ")).map(str::to_owned).collect()
}
