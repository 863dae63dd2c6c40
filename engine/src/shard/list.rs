//! Lists that nearly always have room: a `Vec` that is filled and emptied in every turn.

/// As [`Vec::push`], to such a list: what is pushed is made where it will be, and growing is another
/// function's code.
#[inline(always)]
pub(super) fn push<T>(list: &mut Vec<T>, made: impl FnOnce() -> T) {
    if list.len() < list.capacity() { list.push(made()) } else { grow(list, made()) }
}

#[cold]
#[inline(never)]
fn grow<T>(list: &mut Vec<T>, last: T) {
    list.push(last);
}
