//! Escaping of names in output, because a server or another user has chosen their bytes.

use std::fmt;

/// A name or path for a terminal, with escapes of `ls -b`: control characters, characters that reorder text,
/// backslashes, and bytes that are not UTF-8. Spaces are printed.
pub(crate) struct Escaped<'a>(pub(crate) &'a [u8]);

impl fmt::Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for chunk in self.0.utf8_chunks() {
            for c in chunk.valid().chars() {
                match c {
                    '\\' => f.write_str("\\\\")?,
                    '\n' => f.write_str("\\n")?,
                    '\r' => f.write_str("\\r")?,
                    '\t' => f.write_str("\\t")?,
                    _ if c.is_control() || is_bidirectional_control(c) => {
                        write_octal(f, c.encode_utf8(&mut [0; 4]).as_bytes())?
                    }
                    _ => write!(f, "{c}")?,
                }
            }
            write_octal(f, chunk.invalid())?;
        }
        Ok(())
    }
}

fn write_octal(f: &mut fmt::Formatter<'_>, bytes: &[u8]) -> fmt::Result {
    bytes.iter().try_for_each(|byte| write!(f, "\\{byte:03o}"))
}

/// A character without a glyph that changes the order of the text around it.
fn is_bidirectional_control(c: char) -> bool {
    matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// A line about files in the format of `sha256sum`.
///
/// If a field contains a backslash, newline or carriage return, these are escaped, and the line begins with a
/// backslash. All other bytes are those of the names.
pub(crate) fn checksum_line(fields: [&[u8]; 2], separator: &str) -> Vec<u8> {
    let mut line = Vec::new();
    let is_special = |byte: &u8| matches!(byte, b'\\' | b'\n' | b'\r');
    if fields.iter().any(|field| field.iter().any(is_special)) {
        line.push(b'\\');
    }
    for (number, field) in fields.iter().enumerate() {
        if number > 0 {
            line.extend(separator.as_bytes());
        }
        for byte in *field {
            match byte {
                b'\\' => line.extend(b"\\\\"),
                b'\n' => line.extend(b"\\n"),
                b'\r' => line.extend(b"\\r"),
                byte => line.push(*byte),
            }
        }
    }
    line.push(b'\n');
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn terminals_get_no_control_characters() {
        let shown = |name: &[u8]| Escaped(name).to_string();
        assert_eq!(shown("Grüße für alle".as_bytes()), "Grüße für alle");
        assert_eq!(shown(b"\x1b]0;title\x07\x1b[31m"), "\\033]0;title\\007\\033[31m");
        assert_eq!(shown(b"a\nb\rc\td\\e\x7f"), "a\\nb\\rc\\td\\\\e\\177");
        assert_eq!(shown(b"caf\xe9"), "caf\\351");
        // C1 controls, such as an 8-bit CSI, and text from right to left.
        assert_eq!(shown("\u{9b}31m\u{202e}txt.exe".as_bytes()), "\\302\\23331m\\342\\200\\256txt.exe");
    }
}
