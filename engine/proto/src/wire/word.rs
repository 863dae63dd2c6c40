//! Words of checked bytes.

/// The big-endian word at `at`, or 0 past the end. For accessors of checked bytes.
#[inline]
pub(super) fn word(bytes: &[u8], at: usize) -> u32 {
    match bytes.get(at..at.wrapping_add(4)).and_then(|word| word.first_chunk()) {
        Some(word) => u32::from_be_bytes(*word),
        None => 0,
    }
}
