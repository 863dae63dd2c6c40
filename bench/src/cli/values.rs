//! Parsers of option values.
#![forbid(unsafe_code)]

use rpcrdma::fabric::path::{OutOfRange, PathConfig};

/// The longest `-s`.
const LARGEST: usize = 1 << 30;

/// Parses a number of bytes, 1 to 1 GiB; K and M are 1024 and 1024².
pub(crate) fn parse_size(text: &str) -> Result<usize, String> {
    let (digits, unit) = match text.as_bytes().last() {
        Some(b'K' | b'k') => (&text[..text.len() - 1], 1 << 10),
        Some(b'M' | b'm') => (&text[..text.len() - 1], 1 << 20),
        _ => (text, 1),
    };
    let wrong = || format!("expected 1 to {LARGEST} bytes, with K or M for 1024 or 1024²");
    let size = digits.parse::<usize>().ok().and_then(|n| n.checked_mul(unit)).ok_or_else(wrong)?;
    if (1..=LARGEST).contains(&size) { Ok(size) } else { Err(wrong()) }
}

/// Parses a number above 0.
pub(crate) fn parse_positive(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number.is_finite() && number > 0.0 => Ok(number),
        _ => Err("expected a number above 0".to_owned()),
    }
}

/// Parses a number, 0 or above.
pub(crate) fn parse_not_negative(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number.is_finite() && number >= 0.0 => Ok(number),
        _ => Err("expected a number, 0 or above".to_owned()),
    }
}

/// Parses a path MTU.
pub(crate) fn parse_mtu(text: &str) -> Result<u32, String> {
    let path_mtu = text.parse().ok();
    let path = PathConfig { path_mtu, ..PathConfig::default() };
    match path.out_of_range() {
        Some(OutOfRange { expected, .. }) => Err(format!("expected {expected}")),
        None => path_mtu.ok_or_else(|| "expected a number of bytes".to_owned()),
    }
}
