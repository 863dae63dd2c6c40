//! Generated types of `rpcperf.x`.
#![expect(unreachable_pub, dead_code, reason = "generated for any module")]

include!(concat!(env!("OUT_DIR"), "/rpcperf.rs"));
