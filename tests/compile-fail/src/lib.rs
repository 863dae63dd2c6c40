//! What the compiler must refuse: see `ui/`, whose programs use the pool and the hand-off as they must not be used.
#![forbid(unsafe_code)]
