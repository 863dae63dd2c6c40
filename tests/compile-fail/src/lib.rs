//! Programs that must not compile, as doctests with the code of the expected error.
//!
//! Only rustdoc's unstable features compare the code: see `../rustdoc`.
#![forbid(unsafe_code)]

pub mod cross_thread;
pub mod mempool;
pub mod service;
