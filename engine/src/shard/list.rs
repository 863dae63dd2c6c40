//! Push for lists that nearly always have room.

/// Appends an item: builds it in place, and grows the list out of line.
#[inline(always)]
pub(super) fn push<T>(list: &mut Vec<T>, made: impl FnOnce() -> T) {
    if list.len() < list.capacity() { list.push(made()) } else { grow(list, made()) }
}

#[cold]
#[inline(never)]
fn grow<T>(list: &mut Vec<T>, last: T) {
    list.push(last);
}
