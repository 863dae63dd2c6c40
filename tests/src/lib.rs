//! Shared helpers of the integration tests.

pub mod source;

/// The examples of the documents outside of the crates are compiled, and run where they can be.
#[cfg(doctest)]
mod documents {
    #[doc = include_str!("../../README.md")]
    mod readme {}
    #[doc = include_str!("../../engine/README.md")]
    mod engine {}
    #[doc = include_str!("../../mempool/README.md")]
    mod mempool {}
    #[doc = include_str!("../../tuning.md")]
    mod tuning {}
}
