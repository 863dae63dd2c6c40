//! Test wrappers of any fabric, seeded numbers, and addresses.

#![forbid(unsafe_code)]

pub mod chaos;
mod loopback;
pub(crate) mod random;
pub mod trace;

pub use self::loopback::loopback_address;

/// Gives [`forward`](crate::forward::forward) access to the `inner` fabric of a wrapper.
macro_rules! inner {
    ($self:ident, $fabric:ident => $what:expr) => {{
        let Self { inner: $fabric, .. } = $self;
        $what
    }};
}

use inner;
