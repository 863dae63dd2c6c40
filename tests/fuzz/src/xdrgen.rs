//! Specifications and placement files. The input is a specification, and after a zero byte its placement file.

use ::xdrgen::{Options, Source, generate, parse};

pub fn run(data: &[u8]) {
    let mut parts = data
        .splitn(2, |byte| *byte == 0)
        .map(|part| Source { name: "fuzz".into(), text: String::from_utf8_lossy(part).into_owned() });
    let Some(xdr) = parts.next() else { return };
    match parse(&xdr, parts.next().as_ref()) {
        Ok(schema) => drop(generate(&schema, &Options::default())),
        Err(errors) => assert!(errors.to_string().starts_with("error: ")),
    }
}
