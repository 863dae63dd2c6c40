//! The protocol, as compiled from `blockstore.x`.
#![forbid(unsafe_code)]
#![expect(dead_code, unreachable_pub, reason = "generated for any user")]

include!(concat!(env!("OUT_DIR"), "/blockstore.rs"));

/// Conversions between a union of results and a `Result`.
macro_rules! results {
    ($($union:ident, $results:ident$(<$a:lifetime>)?;)*) => {$(
        impl$(<$a>)? From<$union$(<$a>)?> for Result<$results$(<$a>)?, Status> {
            fn from(union: $union$(<$a>)?) -> Self {
                match union {
                    $union::Ok(results) => Ok(results),
                    $union::Default(status) => Err(status),
                }
            }
        }

        impl$(<$a>)? From<Result<$results$(<$a>)?, Status>> for $union$(<$a>)? {
            fn from(result: Result<$results$(<$a>)?, Status>) -> Self {
                result.map_or_else(Self::Default, Self::Ok)
            }
        }
    )*};
}
results! { InfoResult, Info; ReadResult, ReadData<'a>; WriteResult, Written; }

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
