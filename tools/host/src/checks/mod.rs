//! All checks.
//!
//! Each covers one aspect, and only it knows the files to read.
//!
//! | file | checks |
//! | --- | --- |
//! | `cores` | cores: online, allowed, isolated, tickless, no two threads of one; quotas; the device's node |
//! | `interrupts` | other load on them: interrupts, irqbalance, the kernel's work queues, packets of interfaces |
//! | `power` | frequency, C-states, the clock |
//! | `pages` | huge pages, transparent ones, NUMA balancing, swap |
//! | `limits` | limits of locked, mapped and used memory; descriptors |
//! | `device` | presence and usability of an RDMA device at the address |
//! | `adapter` | its performance: RoCE version, bus, counters, congestion |
//! | `network` | interfaces and sockets |
//! | `container` | containers |
//! | `library` | the installed C library |

/// The checks of a file: name, subject, fabrics that it matters for (if not for all), and function of each.
macro_rules! checks {
    ($(
        $name:literal, $area:ident $(on $($fabric:ident)+)?: $look:ident,
            wanted $wanted:literal,
            why $why:literal;
    )*) => {
        pub(super) const CHECKS: &[$crate::check::Check] = &[$($crate::check::Check {
            name: $name,
            area: $crate::check::Area::$area,
            fabrics: &[$($($crate::scene::Fabric::$fabric),+)?],
            wanted: $wanted,
            why: $why,
            look: $look,
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

/// All checks, in the order of reports.
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
