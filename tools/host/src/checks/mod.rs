//! All checks. Each looks for one thing; what it reads is found nowhere else.
//!
//! | file | what it looks at |
//! | --- | --- |
//! | `cores` | the cores: whether they are there, allowed, isolated, without ticks, no two threads of one; quotas; the device's node |
//! | `interrupts` | what else runs on them: interrupts, irqbalance, the kernel's work queues, packets of interfaces |
//! | `power` | frequency, C-states, the clock |
//! | `pages` | huge pages, transparent ones, NUMA balancing, swap |
//! | `limits` | how much memory may be locked, mapped and used; descriptors |
//! | `device` | whether there is an RDMA device at the address, and whether it can be used |
//! | `adapter` | how well it can be used: RoCE version, bus, counters, congestion |
//! | `network` | interfaces and sockets |
//! | `container` | containers |

mod adapter;
mod container;
mod cores;
mod device;
mod interrupts;
mod limits;
mod network;
mod pages;
mod power;

use crate::check::Check;

/// All of them, in the order in which they are told.
pub fn all() -> impl Iterator<Item = &'static Check> {
    let groups: [&'static [Check]; 9] = [
        cores::CHECKS,
        interrupts::CHECKS,
        power::CHECKS,
        pages::CHECKS,
        limits::CHECKS,
        device::CHECKS,
        adapter::CHECKS,
        network::CHECKS,
        container::CHECKS,
    ];
    groups.into_iter().flatten()
}
