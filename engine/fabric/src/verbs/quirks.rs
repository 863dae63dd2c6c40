//! Deviations of devices from the specification, and unreported facts.

#![forbid(unsafe_code)]

use super::device;
use super::sys::Attributes;

/// `IBV_WC_WITH_INV`.
const WITH_INVALIDATION: u32 = 1 << 3;
/// The kernel's number of the same, which rxe hands through.
const WITH_INVALIDATION_KERNEL: u32 = 1 << 2;
/// `IBV_DEVICE_MEM_MGT_EXTENSIONS`: Send With Invalidate, among others.
const MEMORY_MANAGEMENT: u32 = 1 << 21;
/// `IBV_DEVICE_MEM_WINDOW_TYPE_2A` and `…_2B`.
const WINDOWS_TYPE_2: u32 = 3 << 23;

/// How one device behaves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Quirks {
    /// Its family, for people.
    pub(super) family: &'static str,
    /// It has type-2 memory windows.
    pub(super) has_windows: bool,
    /// Whether it invalidates windows on a peer's Send With Invalidate.
    pub(super) remote_invalidate: bool,
    /// Bits of a completion's flags that mark an invalidated key.
    pub(super) invalidated_flags: u32,
    /// It checks the bounds of a window at each access.
    pub(super) checks_window_bounds: bool,
    /// Whether it reports that a queue pair in error takes no more shared Receives.
    pub(super) reports_last_receive: bool,
    /// Whether it is software, which takes its time from polling cores.
    pub(super) works_on_our_cores: bool,
}

impl Quirks {
    /// Of this device.
    pub(super) fn of(name: &str, attributes: &Attributes) -> Self {
        let flags = attributes.capability_flags;
        let has_windows = flags & WINDOWS_TYPE_2 != 0 && attributes.max_mw > 0;
        let general = Self {
            family: "",
            has_windows,
            remote_invalidate: has_windows && flags & MEMORY_MANAGEMENT != 0,
            invalidated_flags: WITH_INVALIDATION,
            checks_window_bounds: true,
            reports_last_receive: true,
            works_on_our_cores: false,
        };
        if device::is_soft_roce(name) { general.soft_roce() } else { general }
    }

    /// The kernel's rxe: seen in 6.1, and still there in later sources.
    fn soft_roce(self) -> Self {
        Self {
            family: "soft-RoCE",
            invalidated_flags: WITH_INVALIDATION | WITH_INVALIDATION_KERNEL,
            checks_window_bounds: false,
            reports_last_receive: false,
            works_on_our_cores: true,
            ..self
        }
    }
}
