#![expect(unsafe_code, reason = "calls libibverbs")]
//! An opened device: properties, asynchronous events and protection domains.

use std::ffi::CStr;
use std::io;
use std::mem::{self, MaybeUninit};
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};
use std::rc::Rc;

use rdma_sys::{
    ___ibv_query_port, ibv_ack_async_event, ibv_alloc_pd, ibv_async_event, ibv_async_event_element_t, ibv_close_device,
    ibv_context, ibv_dealloc_pd, ibv_device, ibv_device_attr, ibv_free_device_list, ibv_get_async_event,
    ibv_get_device_list, ibv_get_device_name, ibv_open_device, ibv_pd, ibv_port_attr, ibv_query_device,
};

use super::{check, is_done, made, never_wait};

/// A device opened by this shard alone.
#[derive(Debug)]
pub(crate) struct Context {
    raw: NonNull<ibv_context>,
}

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Attributes {
    pub(crate) capability_flags: u32,
    pub(crate) max_qp_wr: u32,
    pub(crate) max_cqe: u32,
    pub(crate) max_srq_wr: u32,
    pub(crate) max_mw: u32,
    /// RDMA Reads that a queue pair serves concurrently.
    pub(crate) max_qp_rd_atom: u32,
    /// RDMA Reads that a queue pair posts concurrently.
    pub(crate) max_qp_init_rd_atom: u32,
}

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PortAttributes {
    pub(crate) max_message: u32,
    /// Maximum payload bytes of a packet.
    pub(crate) mtu: u32,
    /// The device's MTU code.
    pub(crate) mtu_code: u32,
    /// InfiniBand only.
    pub(crate) lid: u16,
}

/// An asynchronous event. Codes are those of `ibv_event_type`. Devices may report others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AsyncEvent {
    /// An event of the queue pair with this cookie.
    QueuePair { cookie: usize, code: u32 },
    /// An event of a port.
    Port { port: u32, code: u32 },
    /// An event of the completion queue, the shared receive queue, or the whole device.
    Device { code: u32 },
    /// An event unknown to this engine.
    Unknown { code: u32 },
}

impl AsyncEvent {
    /// `IBV_EVENT_CQ_ERR`.
    pub(crate) const CQ_ERROR: u32 = 0;
    /// `IBV_EVENT_COMM_EST`: a message arrived before the connection manager reported the connection.
    pub(crate) const ESTABLISHED: u32 = 4;
    /// `IBV_EVENT_DEVICE_FATAL`.
    pub(crate) const DEVICE_FATAL: u32 = 8;
    /// `IBV_EVENT_PORT_ACTIVE`.
    pub(crate) const PORT_ACTIVE: u32 = 9;
    /// `IBV_EVENT_PORT_ERR`.
    pub(crate) const PORT_ERROR: u32 = 10;
    /// `IBV_EVENT_SRQ_ERR`.
    pub(crate) const SRQ_ERROR: u32 = 14;
    /// `IBV_EVENT_QP_LAST_WQE_REACHED`: a queue pair in error consumes no more shared Receives.
    pub(crate) const LAST_RECEIVE_REACHED: u32 = 16;
}

impl Context {
    pub(crate) fn open(name: &str) -> io::Result<Rc<Self>> {
        let mut count = 0;
        // SAFETY: `count` is a valid place for the number of devices.
        let list = unsafe { ibv_get_device_list(&raw mut count) };
        if list.is_null() {
            return Err(io::Error::last_os_error());
        }
        let mut opened = Err(io::Error::from_raw_os_error(libc::ENODEV));
        for index in 0..usize::try_from(count).unwrap_or(0) {
            // SAFETY: `index` is less than the list's count.
            let device = unsafe { list.wrapping_add(index).read() };
            if device_name(device).as_deref() == Some(name) {
                // SAFETY: the device belongs to the list, which is freed below.
                let raw = unsafe { ibv_open_device(device) };
                opened = made(raw).map(|raw| Self { raw });
                break;
            }
        }
        // SAFETY: the list came from `ibv_get_device_list` and is freed once. Opened devices outlive it.
        unsafe { ibv_free_device_list(list) };
        let context = opened?;
        never_wait(context.async_fd())?;
        Ok(Rc::new(context))
    }

    pub(super) fn raw(&self) -> *mut ibv_context {
        self.raw.as_ptr()
    }

    /// Readable when an asynchronous event is pending.
    pub(crate) fn async_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the context is open as long as `self` lives. The field never changes.
        let fd = unsafe { self.raw.as_ref().async_fd };
        // SAFETY: the descriptor is open as long as `self` lives.
        unsafe { BorrowedFd::borrow_raw(fd) }
    }

    /// Queries the device's attributes.
    pub(crate) fn attributes(&self) -> io::Result<Attributes> {
        let mut attr = MaybeUninit::<ibv_device_attr>::zeroed();
        // SAFETY: the context is open, and `attr` is valid for writes.
        check(unsafe { ibv_query_device(self.raw(), attr.as_mut_ptr()) })?;
        // SAFETY: all zeroes are a valid value of this struct of integers, and the call has filled it in.
        let attr = unsafe { attr.assume_init() };
        let count = |n: std::os::raw::c_int| n.max(0) as u32;
        Ok(Attributes {
            capability_flags: attr.device_cap_flags,
            max_qp_wr: count(attr.max_qp_wr),
            max_cqe: count(attr.max_cqe),
            max_srq_wr: count(attr.max_srq_wr),
            max_mw: count(attr.max_mw),
            max_qp_rd_atom: count(attr.max_qp_rd_atom),
            max_qp_init_rd_atom: count(attr.max_qp_init_rd_atom),
        })
    }

    /// Queries a port's attributes. The first port is 1.
    pub(crate) fn port(&self, port: u8) -> io::Result<PortAttributes> {
        let mut attr = MaybeUninit::<ibv_port_attr>::zeroed();
        // SAFETY: the context is open, and `attr` is valid for writes.
        check(unsafe { ___ibv_query_port(self.raw(), port, attr.as_mut_ptr()) })?;
        // SAFETY: all zeroes are a valid value of this struct of integers, and the call has filled it in.
        let attr = unsafe { attr.assume_init() };
        Ok(PortAttributes {
            max_message: attr.max_msg_sz,
            mtu_code: attr.active_mtu,
            lid: attr.lid,
            // 1 is 256, 5 is 4096. Other values are future codes.
            mtu: 128u32.checked_shl(attr.active_mtu).filter(|mtu| (256..=1 << 20).contains(mtu)).unwrap_or(0),
        })
    }

    /// Takes the next asynchronous event. `None` without a pending event.
    pub(crate) fn next_async(&self) -> Option<AsyncEvent> {
        let mut event = MaybeUninit::<ibv_async_event>::zeroed();
        // SAFETY: the context is open, its descriptor does not block, and `event` is valid for writes.
        if unsafe { ibv_get_async_event(self.raw(), event.as_mut_ptr()) } != 0 {
            return None;
        }
        // Read as a number, because a device may report codes outside the enumeration.
        let kind = event.as_ptr().wrapping_byte_add(mem::offset_of!(ibv_async_event, event_type)).cast::<u32>();
        // SAFETY: the call has filled in this field, which has the size of a C enumeration.
        let code = unsafe { kind.read() };
        // SAFETY: the union lies at the start. The call has filled in the member for the code.
        let element = unsafe { event.as_ptr().cast::<ibv_async_event_element_t>().read() };
        let told = match code {
            1..=7 | 16 => {
                // SAFETY: for these codes the union holds a queue pair.
                let qp = unsafe { element.qp };
                // SAFETY: a queue pair is not destroyed before its events are acknowledged, which happens below.
                let cookie = unsafe { (*qp).qp_context };
                AsyncEvent::QueuePair { cookie: cookie.addr(), code }
            }
            9..=13 | 17 | 18 => {
                // SAFETY: for these codes the union holds a port's number.
                let port = unsafe { element.port_num };
                AsyncEvent::Port { port: port.max(0) as u32, code }
            }
            0 | 8 | 14 | 15 => AsyncEvent::Device { code },
            _ => AsyncEvent::Unknown { code },
        };
        // SAFETY: the event was taken above and is acknowledged once.
        unsafe { ibv_ack_async_event(event.as_mut_ptr()) };
        Some(told)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: all objects made with the context keep it alive, so none is left. The context is closed once.
        unsafe { ibv_close_device(self.raw()) };
    }
}

fn device_name(device: *mut ibv_device) -> Option<String> {
    // SAFETY: the device belongs to a list that is not freed yet, or to an open context.
    let name = unsafe { ibv_get_device_name(device) };
    if name.is_null() {
        return None;
    }
    // SAFETY: the name is terminated by a zero and lives as long as its device.
    let name = unsafe { CStr::from_ptr(name) };
    Some(name.to_string_lossy().into_owned())
}

/// The device name of a context that librdmacm opened.
pub(super) fn name_of(context: *mut ibv_context) -> Option<String> {
    // SAFETY: librdmacm keeps its contexts open as long as the process runs.
    let context = unsafe { context.as_ref() }?;
    device_name(context.device)
}

/// The scope of one shard's work requests, limited to its memory.
#[derive(Debug)]
pub(crate) struct ProtectionDomain {
    raw: NonNull<ibv_pd>,
    _context: Rc<Context>,
}

impl ProtectionDomain {
    pub(crate) fn new(context: &Rc<Context>) -> io::Result<Rc<Self>> {
        // SAFETY: the context is open.
        let raw = made(unsafe { ibv_alloc_pd(context.raw()) })?;
        Ok(Rc::new(Self { raw, _context: Rc::clone(context) }))
    }

    pub(super) fn raw(&self) -> *mut ibv_pd {
        self.raw.as_ptr()
    }
}

impl Drop for ProtectionDomain {
    fn drop(&mut self) {
        // SAFETY: all objects made in the domain keep it alive, so none is left. The domain is deallocated once.
        is_done("ibv_dealloc_pd", unsafe { ibv_dealloc_pd(self.raw()) });
    }
}

/// A struct of C that is all zeroes.
///
/// # Safety
/// All zeroes are a valid value of `T`.
pub(super) unsafe fn zeroed<T>() -> T {
    // SAFETY: the caller guarantees it.
    unsafe { mem::zeroed() }
}

/// Encodes a number as the cookie of a C struct. It is never dereferenced.
pub(super) fn cookie(number: usize) -> *mut std::os::raw::c_void {
    ptr::without_provenance_mut(number)
}
