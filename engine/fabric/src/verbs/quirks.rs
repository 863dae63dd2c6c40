//! Deviations of devices from the specification, and properties that no attribute reports.

#![forbid(unsafe_code)]

use rdma_sys::{ibv_device_attr, ibv_device_cap_flags as caps, ibv_wc_flags};

use super::device;

/// The kernel's value of `IBV_WC_WITH_INV`, which rxe passes through.
const WITH_INVALIDATION_KERNEL: u32 = 1 << 2;

/// The behavior of one device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Quirks {
    /// Device family, for error texts.
    pub(super) family: &'static str,
    /// Whether the device has type-2 memory windows.
    pub(super) has_windows: bool,
    /// Whether a peer's Send With Invalidate invalidates windows.
    pub(super) remote_invalidate: bool,
    /// Completion flags that mark an invalidated key.
    pub(super) invalidated_flags: u32,
    /// Whether the device checks the bounds of a window at each access.
    pub(super) checks_window_bounds: bool,
    /// Whether the device reports that a queue pair in error consumes no more shared Receives.
    pub(super) reports_last_receive: bool,
    /// Whether the device is software, which shares the cores that poll.
    pub(super) is_software: bool,
}

impl Quirks {
    pub(super) fn detect(name: &str, attributes: &ibv_device_attr) -> Self {
        let flags = attributes.device_cap_flags;
        let windows = (caps::IBV_DEVICE_MEM_WINDOW_TYPE_2A | caps::IBV_DEVICE_MEM_WINDOW_TYPE_2B).0;
        let has_windows = flags & windows != 0 && attributes.max_mw > 0;
        let invalidated = ibv_wc_flags::IBV_WC_WITH_INV.0;
        // The quirks of the kernel's rxe were observed in Linux 6.1, and later sources do not change them.
        let is_soft = device::is_soft_roce(name);
        Self {
            family: if is_soft { "soft-RoCE" } else { "" },
            has_windows,
            remote_invalidate: has_windows && flags & caps::IBV_DEVICE_MEM_MGT_EXTENSIONS.0 != 0,
            invalidated_flags: if is_soft { invalidated | WITH_INVALIDATION_KERNEL } else { invalidated },
            checks_window_bounds: !is_soft,
            reports_last_receive: !is_soft,
            is_software: is_soft,
        }
    }
}
