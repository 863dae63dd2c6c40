//! All checks.
//!
//! Each check covers one aspect of a machine, and only the check knows which files to read.
//!
//! | file | checks |
//! | --- | --- |
//! | `cores` | cores: online, allowed, isolated, tickless, not shared by two threads; CPU quotas; the device's node |
//! | `interrupts` | other load on the cores: interrupts, irqbalance, the kernel's work queues, packets of interfaces |
//! | `power` | frequency, C-states, the clock |
//! | `pages` | huge pages, transparent huge pages, NUMA balancing, swap |
//! | `limits` | limits of locked, mapped and used memory; descriptors |
//! | `device` | presence and usability of an RDMA device at the address |
//! | `adapter` | performance of an RDMA device: RoCE version, bus, counters, congestion |
//! | `network` | interfaces and sockets |
//! | `container` | containers |
//! | `library` | the installed C library |

/// Declares the checks of a file, each with its name, area, fabrics (unless it applies to all) and function.
macro_rules! checks {
    ($(
        $name:literal, $area:ident $(on $($fabric:ident)+)?: $inspect:ident,
            wanted $wanted:literal,
            why $why:literal;
    )*) => {
        pub(super) const CHECKS: &[$crate::check::Check] = &[$($crate::check::Check {
            name: $name,
            area: $crate::check::Area::$area,
            fabrics: &[$($($crate::context::Fabric::$fabric),+)?],
            wanted: $wanted,
            why: $why,
            inspect: $inspect,
        }),*];
    };
}

mod adapter;
mod container;
mod cores;
mod device;
mod interrupts;
mod library;
mod limits;
mod network;
mod pages;
mod power;

use crate::check::Check;

/// Returns all checks, in the order of reports.
pub fn all() -> impl Iterator<Item = &'static Check> {
    let groups: [&'static [Check]; 10] = [
        cores::CHECKS,
        interrupts::CHECKS,
        power::CHECKS,
        pages::CHECKS,
        limits::CHECKS,
        device::CHECKS,
        adapter::CHECKS,
        network::CHECKS,
        container::CHECKS,
        library::CHECKS,
    ];
    groups.into_iter().flatten()
}
