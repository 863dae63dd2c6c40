//! The required part of XDR (RFC 4506).

/// Round-up bytes after `len` bytes.
pub(crate) fn padding(len: usize) -> usize {
    len.wrapping_neg() % 4
}

/// Appends an `opaque<>`.
pub(crate) fn put_opaque(out: &mut Vec<u8>, bytes: &[u8]) {
    out.extend((bytes.len() as u32).to_be_bytes());
    out.extend(bytes);
    out.resize(out.len() + padding(bytes.len()), 0);
}

/// The remaining bytes.
pub(crate) struct Reader<'a>(pub(crate) &'a [u8]);

impl<'a> Reader<'a> {
    /// An `unsigned int`.
    pub(crate) fn number(&mut self) -> Option<u32> {
        let (word, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u32::from_be_bytes(*word))
    }

    /// An `opaque<most>`.
    pub(crate) fn opaque(&mut self, most: usize) -> Option<&'a [u8]> {
        let len = self.number()? as usize;
        if len > most {
            return None;
        }
        let bytes = self.0.get(..len)?;
        self.0 = self.0.get(len + padding(len)..)?;
        Some(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encoding_and_decoding_are_inverse() {
        let mut bytes = Vec::new();
        put_opaque(&mut bytes, b"abcde");
        put_opaque(&mut bytes, b"");
        assert_eq!(bytes.len(), 16);
        let mut reader = Reader(&bytes);
        assert_eq!((reader.opaque(5), reader.number(), reader.number()), (Some(&b"abcde"[..]), Some(0), None));
        assert_eq!(Reader(&bytes).opaque(4), None, "longer than it may be");
        assert_eq!(Reader(&bytes[..11]).opaque(5), None, "cut off");
    }
}
