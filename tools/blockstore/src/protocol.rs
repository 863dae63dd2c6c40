//! The protocol, generated from `blockstore.x`.
#![forbid(unsafe_code)]
#![expect(dead_code, unreachable_pub, reason = "the generated code has items that this program does not use")]

include!(concat!(env!("OUT_DIR"), "/blockstore.rs"));

impl std::fmt::Display for Status {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Ok => "success",
            Self::OutOfRange => "beyond the end of the store",
            Self::TooLong => "longer than the store's longest block",
            Self::ReadOnly => "the store is read-only",
            Self::NoSpace => "no space is left on the server's disk",
            Self::IoError => "input/output error at the server",
        })
    }
}

impl std::error::Error for Status {}
