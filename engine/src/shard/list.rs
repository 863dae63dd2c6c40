//! Lists that nearly always have room: a `Vec` filled and emptied in every turn.

/// As [`Vec::push`], to such a list: the item is made in place, and growing is out of line.
#[inline(always)]
pub(super) fn push<T>(list: &mut Vec<T>, made: impl FnOnce() -> T) {
    if list.len() < list.capacity() { list.push(made()) } else { grow(list, made()) }
}

#[cold]
#[inline(never)]
fn grow<T>(list: &mut Vec<T>, last: T) {
    list.push(last);
}
