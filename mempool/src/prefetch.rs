#![expect(unsafe_code, reason = "the instruction takes an address")]
//! Prefetching of the next item's memory while one is processed.

/// Bytes of a cache line.
const LINE: usize = 64;

/// Prefetches the first `LINES` cache lines of a value, or fewer. Any pointer is valid, because it is not dereferenced.
/// On processors without a known instruction this does nothing.
#[inline]
pub fn prefetch<const LINES: usize, T>(value: *const T) {
    for line in 0..LINES.min(size_of::<T>().div_ceil(LINE)) {
        let _at = value.cast::<i8>().wrapping_add(line * LINE);
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        // SAFETY: a prefetch is a hint: any address is valid, and only the caches change.
        unsafe {
            std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(_at);
        }
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn any_address_is_valid_and_nothing_is_changed() {
        let value = [7u8; 200];
        super::prefetch::<2, _>(&value);
        super::prefetch::<100, _>(&value);
        super::prefetch::<1, u64>(std::ptr::null());
        assert!(value.iter().all(|&byte| byte == 7));
    }
}
