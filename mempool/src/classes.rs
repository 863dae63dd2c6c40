//! Layout of the buffers of each size class.

use crate::config::Class;
use crate::error::MemError;

/// Buffers start at multiples of this, a cache line.
pub(crate) const LINE: usize = 64;
/// Maximum size classes of a pool. They are few, because the search for one that fits is linear.
const MAX_CLASSES: usize = 64;
/// Maximum buffers of a pool. Their indices have 32 bits, and some values are marks of the list of remote frees.
const MAX_BUFFERS: usize = u32::MAX as usize >> 1;

/// Sizes and places of the buffers of one class. Offsets count from the start of the pool's range in the arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ClassLayout {
    /// Capacity of each buffer.
    pub(crate) size: usize,
    /// Number of buffers.
    pub(crate) count: usize,
    /// Bytes from the start of one buffer to the next.
    pub(crate) stride: usize,
    /// Offset of the first buffer.
    pub(crate) offset: usize,
    /// Index of the first buffer among all buffers of the pool.
    pub(crate) first: u32,
}

/// Distance of neighbouring buffers of `size` bytes. From 512 bytes up it is an odd number of cache lines, so that the
/// first lines of the buffers, which hold message headers, spread over all sets of the cache. At distances that are
/// multiples of 4096 they would all fall into one set.
pub(crate) fn stride(size: usize) -> usize {
    let lines = size.div_ceil(LINE);
    LINE.saturating_mul(if size < 512 { lines } else { lines | 1 })
}

/// Lays the classes out, smallest first, and returns them with the bytes that they take. `stride` is the distance of
/// neighbouring buffers of a size.
pub(crate) fn lay_out(
    classes: &[Class],
    stride: impl Fn(usize) -> usize,
) -> Result<(Vec<ClassLayout>, usize), MemError> {
    let invalid = |why: String| Err(MemError::invalid(format!("invalid size classes: {why}")));
    if classes.is_empty() || classes.len() > MAX_CLASSES {
        return invalid(format!("{} classes: expected 1 to {MAX_CLASSES}", classes.len()));
    }
    let mut sorted = classes.to_vec();
    sorted.sort_by_key(|class| class.size);
    let (mut layouts, mut offset, mut first) = (Vec::with_capacity(sorted.len()), 0usize, 0usize);
    for Class { size, count } in sorted {
        if size == 0 || count == 0 || size > u32::MAX as usize {
            return invalid(format!(
                "{count} buffers of {size} bytes: neither may be 0, and the size may not exceed {}",
                u32::MAX
            ));
        }
        if layouts.last().is_some_and(|last: &ClassLayout| last.size == size) {
            return invalid(format!("two classes of {size} bytes"));
        }
        if count > MAX_BUFFERS - first {
            return invalid(format!("more than {MAX_BUFFERS} buffers"));
        }
        let stride = stride(size);
        layouts.push(ClassLayout { size, count, stride, offset, first: first as u32 });
        first += count;
        match stride.checked_mul(count).and_then(|bytes| offset.checked_add(bytes)) {
            Some(end) if end <= isize::MAX as usize => offset = end,
            _ => return invalid(format!("{count} buffers of {size} bytes exceed the address space")),
        }
    }
    Ok((layouts, offset))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strides_spread_over_the_cache_sets() {
        for size in (1..20_000).chain([1 << 20, (1 << 20) + 1, 1 << 24]) {
            let stride = stride(size);
            assert!(stride >= size && stride < size + 2 * LINE && stride.is_multiple_of(LINE), "{size}: {stride}");
            assert!(!stride.is_multiple_of(4096), "{size}: {stride}");
            if size >= 512 {
                let sets: std::collections::HashSet<_> = (0..64).map(|i| i * stride / LINE % 64).collect();
                assert_eq!(sets.len(), 64, "size {size}");
            }
        }
    }

    #[test]
    fn classes_do_not_overlap() {
        let classes = [Class { size: 4096, count: 3 }, Class { size: 100, count: 5 }, Class { size: 65536, count: 2 }];
        let (layouts, bytes) = lay_out(&classes, stride).unwrap();
        assert_eq!(layouts.iter().map(|class| class.size).collect::<Vec<_>>(), [100, 4096, 65536]);
        let mut end = 0;
        for class in &layouts {
            assert_eq!(class.offset, end);
            end += class.stride * class.count;
        }
        assert_eq!(end, bytes);
        assert_eq!(layouts.iter().map(|class| class.first).collect::<Vec<_>>(), [0, 5, 8]);
    }

    #[test]
    fn invalid_classes_are_refused_with_a_reason() {
        let class = |size, count| Class { size, count };
        for (classes, word) in [
            (vec![], "0 classes"),
            (vec![class(0, 1)], "0 bytes"),
            (vec![class(64, 0)], "0 buffers"),
            (vec![class(64, 1), class(64, 2)], "two classes of 64 bytes"),
            (vec![class(64, MAX_BUFFERS + 1)], "more than"),
            (vec![class(usize::MAX, 1)], "exceed"),
            (vec![class(64, 1); 65], "65 classes"),
        ] {
            let text = lay_out(&classes, stride).unwrap_err().to_string();
            assert!(text.contains(word), "{text}");
        }
    }
}
