#![expect(unsafe_code, reason = "arguments from C are pointers")]
//! Arguments of the interface: texts, and places for results.

use std::ffi::{CStr, c_char, c_int};

use rpcrdma::Address;
use rustix::io::Errno;

use crate::failure::Failure;
use crate::services::rpcrdma_procedure;

/// A text.
///
/// # Safety
/// `pointer` is null, or ends with a zero byte and lives as long as the result.
pub(crate) unsafe fn text<'a>(name: &'static str, pointer: *const c_char) -> Result<&'a str, Failure> {
    if pointer.is_null() {
        return Err(null(name));
    }
    // SAFETY: the caller's promise.
    let text = unsafe { CStr::from_ptr(pointer) };
    text.to_str().map_err(|_| Failure::argument(format_args!("{name} is not UTF-8")))
}

/// The argument of this name is null.
#[cold]
#[inline(never)]
pub(crate) fn null(name: &'static str) -> Failure {
    Failure::argument(format_args!("{name} is NULL"))
}

/// Items of an array; none if there are none.
///
/// # Errors
/// It is null, not aligned, or longer than any memory.
///
/// # Safety
/// `pointer` is null, or has `count` items that live as long as the result.
#[inline]
pub(crate) unsafe fn array<'a, T>(name: &'static str, pointer: *const T, count: usize) -> Result<&'a [T], Failure> {
    if count == 0 {
        return Ok(&[]);
    }
    if pointer.is_null() {
        return Err(null(name));
    }
    if count > isize::MAX as usize / size_of::<T>() || !pointer.is_aligned() {
        return Err(no_array(name, count));
    }
    // SAFETY: the caller's promise.
    Ok(unsafe { std::slice::from_raw_parts(pointer, count) })
}

#[cold]
#[inline(never)]
fn no_array(name: &'static str, count: usize) -> Failure {
    Failure::argument(format_args!("{name} is not aligned, or cannot have {count} items"))
}

/// Stores a result, if the caller wants it.
///
/// # Safety
/// `place` is null or writable.
#[inline(always)]
pub(crate) unsafe fn store<T>(place: *mut T, value: T) {
    if !place.is_null() {
        // SAFETY: the caller's promise.
        unsafe { place.write(value) }
    }
}

/// Stores a struct, if the caller wants it, of which the caller's version has `size` bytes: fields that it does not
/// have are left out, and those that only it has are 0.
///
/// # Safety
/// `place` is null, or has `size` writable bytes.
pub(crate) unsafe fn store_sized<T>(place: *mut T, value: T, size: usize) {
    if place.is_null() {
        return;
    }
    let (place, common) = (place.cast::<u8>(), size.min(size_of::<T>()));
    // SAFETY: the caller's promise; a new value is in other memory.
    unsafe { std::ptr::copy_nonoverlapping((&raw const value).cast(), place, common) };
    // SAFETY: the caller's promise.
    let rest = unsafe { place.add(common) };
    // SAFETY: the caller's promise.
    unsafe { rest.write_bytes(0, size - common) };
}

/// Copies a text with its zero byte into `room` bytes, cut off if they are fewer. Returns the length of the whole.
///
/// # Safety
/// `place` is null, or has `room` writable bytes.
pub(crate) unsafe fn copy(text: &str, place: *mut c_char, room: usize) -> Result<c_int, Failure> {
    let whole = c_int::try_from(text.len()).map_err(|_| Failure::new(Errno::OVERFLOW, "the text is too long"))?;
    if place.is_null() || room == 0 {
        return Ok(whole);
    }
    let len = text.len().min(room - 1);
    // SAFETY: the caller's promise, for `len` bytes of it.
    unsafe { place.cast::<u8>().copy_from_nonoverlapping(text.as_ptr(), len) };
    // SAFETY: it is within the `room`.
    let end = unsafe { place.add(len) };
    // SAFETY: the caller's promise, for one byte more.
    unsafe { end.write(0) };
    Ok(whole)
}

/// Entries of a table of `size` bytes each: of this version of the interface, an earlier or a later one.
///
/// # Safety
/// `pointer` is null, or has `count` entries of `size` bytes.
pub(crate) unsafe fn table(
    pointer: *const rpcrdma_procedure,
    count: usize,
    size: usize,
) -> Result<Vec<rpcrdma_procedure>, Failure> {
    if pointer.is_null() || count == 0 {
        return Err(Failure::argument("the table has no procedures"));
    }
    if size != size_of::<rpcrdma_procedure>() {
        return Err(Failure::argument(format_args!(
            "size is {size}, and this library's rpcrdma_procedure has {} bytes: sizeof *table",
            size_of::<rpcrdma_procedure>()
        )));
    }
    // SAFETY: the caller's promise.
    Ok(unsafe { array("table", pointer, count) }?.to_vec())
}

/// An address.
///
/// # Safety
/// As [`text`].
pub(crate) unsafe fn address(pointer: *const c_char) -> Result<Address, Failure> {
    // SAFETY: the caller's promise.
    unsafe { text("address", pointer) }?.parse().map_err(Failure::argument)
}

/// Addresses, separated by commas.
///
/// # Safety
/// As [`text`].
pub(crate) unsafe fn addresses(pointer: *const c_char) -> Result<Vec<Address>, Failure> {
    // SAFETY: the caller's promise.
    let text = unsafe { text("address", pointer) }?;
    text.split(',').map(|one| one.parse().map_err(Failure::argument)).collect()
}
