//! Programs in `ui/` that misuse pool, hand-off and calls.
#![forbid(unsafe_code)]
