//! Push for lists that nearly always have room.

/// As [`Vec::push`]: builds the item in place, and grows out of line.
#[inline(always)]
pub(super) fn push<T>(list: &mut Vec<T>, made: impl FnOnce() -> T) {
    if list.len() < list.capacity() { list.push(made()) } else { grow(list, made()) }
}

#[cold]
#[inline(never)]
fn grow<T>(list: &mut Vec<T>, last: T) {
    list.push(last);
}
