//! TCP addresses for tests.

use std::sync::atomic::{AtomicU16, Ordering};

use crate::FabricAddress;

/// Returns an unused TCP address of this host, in 127.0.0.0/8. Each call returns a different address. The last 22 bits
/// of the IP address are the process number. The ports are above 20048 and 20049, where NFS servers may listen at all
/// addresses.
pub fn loopback_address() -> FabricAddress {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed) % 8_000;
    let [_, a, b, c] = std::process::id().to_be_bytes();
    FabricAddress(format!("127.{}.{b}.{c}:{}", a | 0x80, 22_000 + number))
}
