#![expect(unsafe_code, reason = "arguments from C are pointers")]
//! Arguments of the interface: strings, arrays, and pointers for results.

use std::ffi::{CStr, c_char, c_int};

use rpcrdma::Address;
use rustix::io::Errno;

use crate::failure::ApiFailure;
use crate::services::rpcrdma_procedure;

/// Reads a string.
///
/// # Safety
/// `pointer` is null, or ends with a zero byte and lives as long as the result.
pub(crate) unsafe fn text<'a>(name: &'static str, pointer: *const c_char) -> Result<&'a str, ApiFailure> {
    if pointer.is_null() {
        return Err(null_argument(name));
    }
    // SAFETY: the caller guarantees it.
    let text = unsafe { CStr::from_ptr(pointer) };
    text.to_str().map_err(|_| ApiFailure::argument(format_args!("{name} is not UTF-8")))
}

/// The failure of a call whose argument `name` is null.
#[cold]
#[inline(never)]
pub(crate) fn null_argument(name: &'static str) -> ApiFailure {
    ApiFailure::argument(format_args!("{name} is NULL"))
}

/// Reads the items of an array. The pointer may be null if `count` is 0.
///
/// # Errors
/// The array is null, not aligned, or longer than the address space.
///
/// # Safety
/// `pointer` is null, or has `count` items that live as long as the result.
#[inline]
pub(crate) unsafe fn array<'a, T>(name: &'static str, pointer: *const T, count: usize) -> Result<&'a [T], ApiFailure> {
    if count == 0 {
        return Ok(&[]);
    }
    if pointer.is_null() {
        return Err(null_argument(name));
    }
    if count > isize::MAX as usize / size_of::<T>() || !pointer.is_aligned() {
        return Err(invalid_array(name, count));
    }
    // SAFETY: the caller guarantees it.
    Ok(unsafe { std::slice::from_raw_parts(pointer, count) })
}

#[cold]
#[inline(never)]
fn invalid_array(name: &'static str, count: usize) -> ApiFailure {
    ApiFailure::argument(format_args!("{name} is not aligned, or {count} items exceed the address space"))
}

/// Stores a result, unless `place` is null.
///
/// # Safety
/// `place` is null or writable.
#[inline(always)]
pub(crate) unsafe fn store<T>(place: *mut T, value: T) {
    if !place.is_null() {
        // SAFETY: the caller guarantees it.
        unsafe { place.write(value) }
    }
}

/// Stores a struct for a caller that knows `size` bytes of it, unless `place` is null.
///
/// The caller may be compiled against another version: fields that the caller does not know are left out, and fields
/// that only the caller knows are set to 0.
///
/// # Safety
/// `place` is null, or has `size` writable bytes.
pub(crate) unsafe fn store_sized<T>(place: *mut T, value: T, size: usize) {
    if place.is_null() {
        return;
    }
    let (place, common) = (place.cast::<u8>(), size.min(size_of::<T>()));
    // SAFETY: the caller guarantees it; `value` is in other memory.
    unsafe { std::ptr::copy_nonoverlapping((&raw const value).cast(), place, common) };
    // SAFETY: the caller guarantees it.
    let rest = unsafe { place.add(common) };
    // SAFETY: the caller guarantees it.
    unsafe { rest.write_bytes(0, size - common) };
}

/// Copies a text and a zero byte into `room` bytes, and returns the text's whole length.
///
/// A longer text is cut off.
///
/// # Safety
/// `place` is null, or has `room` writable bytes.
pub(crate) unsafe fn copy_text(text: &str, place: *mut c_char, room: usize) -> Result<c_int, ApiFailure> {
    let whole = c_int::try_from(text.len())
        .map_err(|_| ApiFailure::new(Errno::OVERFLOW, "the text has more than INT_MAX bytes"))?;
    if place.is_null() || room == 0 {
        return Ok(whole);
    }
    let len = text.len().min(room - 1);
    // SAFETY: the caller guarantees `room` bytes, and `len` is less.
    unsafe { place.cast::<u8>().copy_from_nonoverlapping(text.as_ptr(), len) };
    // SAFETY: `len` is less than `room`.
    let end = unsafe { place.add(len) };
    // SAFETY: the caller guarantees `room` bytes, and `len` is less.
    unsafe { end.write(0) };
    Ok(whole)
}

/// Copies the entries of a table of procedures, each of which has `size` bytes.
///
/// # Errors
/// The table is empty, or `size` is not that of this version of the interface.
///
/// # Safety
/// `pointer` is null, or has `count` entries of `size` bytes.
pub(crate) unsafe fn table(
    pointer: *const rpcrdma_procedure,
    count: usize,
    size: usize,
) -> Result<Vec<rpcrdma_procedure>, ApiFailure> {
    if pointer.is_null() || count == 0 {
        return Err(ApiFailure::argument("table is NULL, or has no procedures"));
    }
    if size != size_of::<rpcrdma_procedure>() {
        return Err(ApiFailure::argument(format_args!(
            "size is {size}: expected sizeof *table, {} bytes",
            size_of::<rpcrdma_procedure>()
        )));
    }
    // SAFETY: the caller guarantees it.
    Ok(unsafe { array("table", pointer, count) }?.to_vec())
}

/// Parses an address.
///
/// # Safety
/// See [`text`].
pub(crate) unsafe fn address(pointer: *const c_char) -> Result<Address, ApiFailure> {
    // SAFETY: the caller guarantees it.
    unsafe { text("address", pointer) }?.parse().map_err(ApiFailure::argument)
}

/// Parses addresses that are separated by commas.
///
/// # Safety
/// See [`text`].
pub(crate) unsafe fn addresses(pointer: *const c_char) -> Result<Vec<Address>, ApiFailure> {
    // SAFETY: the caller guarantees it.
    let text = unsafe { text("address", pointer) }?;
    text.split(',').map(|address| address.parse().map_err(ApiFailure::argument)).collect()
}
