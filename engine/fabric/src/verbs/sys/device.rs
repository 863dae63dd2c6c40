#![expect(unsafe_code, reason = "calls libibverbs")]
//! Ownership of libibverbs' objects, and an opened device: attributes, asynchronous events, protection domains.

use std::ffi::{CStr, c_int, c_void};
use std::io;
use std::mem::{self, ManuallyDrop, MaybeUninit};
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};
use std::rc::Rc;

use rdma_sys::{
    ___ibv_query_port, ibv_ack_async_event, ibv_alloc_pd, ibv_async_event, ibv_async_event_element_t, ibv_close_device,
    ibv_comp_channel, ibv_context, ibv_cq, ibv_dealloc_mw, ibv_dealloc_pd, ibv_destroy_comp_channel, ibv_destroy_cq,
    ibv_destroy_qp, ibv_destroy_srq, ibv_device, ibv_device_attr, ibv_free_device_list, ibv_get_async_event,
    ibv_get_device_list, ibv_get_device_name, ibv_mw, ibv_open_device, ibv_pd, ibv_port_attr, ibv_qp, ibv_query_device,
    ibv_srq,
};

use super::{check, made, set_nonblocking};

/// A struct of libibverbs that one call destroys.
pub(super) trait Destroy {
    const CALL: &'static str;

    /// # Safety
    /// The object is alive, and nothing uses it afterwards.
    unsafe fn destroy(raw: *mut Self) -> c_int;
}

macro_rules! destroyed_by {
    ($($object:ident: $call:ident,)*) => {
        $(impl Destroy for $object {
            const CALL: &'static str = stringify!($call);

            unsafe fn destroy(raw: *mut Self) -> c_int {
                // SAFETY: the caller guarantees what the call needs.
                unsafe { $call(raw) }
            }
        })*
    };
}

destroyed_by! {
    ibv_comp_channel: ibv_destroy_comp_channel,
    ibv_context: ibv_close_device,
    ibv_cq: ibv_destroy_cq,
    ibv_mw: ibv_dealloc_mw,
    ibv_pd: ibv_dealloc_pd,
    ibv_qp: ibv_destroy_qp,
    ibv_srq: ibv_destroy_srq,
}

/// An object of libibverbs. It is destroyed on drop, and keeps the objects that it was made with alive until then.
pub(super) struct Object<T: Destroy, P> {
    raw: NonNull<T>,
    parents: P,
}

impl<T: Destroy, P> Object<T, P> {
    /// Wraps an object that C created. Null becomes the last OS error.
    pub(super) fn new(raw: *mut T, parents: P) -> io::Result<Self> {
        Ok(Self { raw: made(raw)?, parents })
    }

    #[inline]
    pub(super) fn raw(&self) -> *mut T {
        self.raw.as_ptr()
    }

    pub(super) fn parents(&self) -> &P {
        &self.parents
    }

    /// Destroys the object. After an error it lives on, and its parents with it.
    pub(super) fn destroy(self) -> io::Result<()> {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: objects made with this one keep it alive, so none is left. It is destroyed once, because `this` is
        // not dropped.
        check(unsafe { T::destroy(this.raw()) })?;
        // SAFETY: the field is not used again.
        unsafe { ptr::drop_in_place(&raw mut this.parents) };
        Ok(())
    }
}

impl<T: Destroy, P> Drop for Object<T, P> {
    fn drop(&mut self) {
        // SAFETY: objects made with this one keep it alive, so none is left. It is destroyed once, here.
        if let Err(error) = check(unsafe { T::destroy(self.raw()) }) {
            log::error!("{}: {error}", T::CALL);
        }
    }
}

/// A device opened by this shard alone.
pub(crate) struct DeviceContext(Object<ibv_context, ()>);

/// An asynchronous event. Codes are those of `ibv_event_type`. Devices may report others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AsyncEvent {
    /// An event of the queue pair with this cookie.
    QueuePair { cookie: usize, code: u32 },
    /// An event of a port.
    Port { port: u32, code: u32 },
    /// An event of the completion queue, the shared receive queue, or the whole device, or an unknown event.
    Device { code: u32 },
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

impl DeviceContext {
    pub(crate) fn open(name: &str) -> io::Result<Rc<Self>> {
        let mut count = 0;
        // SAFETY: `count` is a valid place for the number of devices.
        let list = unsafe { ibv_get_device_list(&raw mut count) };
        if list.is_null() {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: `index` is less than the list's count.
        let mut devices = (0..count.max(0) as usize).map(|index| unsafe { list.wrapping_add(index).read() });
        let opened = match devices.find(|&device| device_name(device).as_deref() == Some(name)) {
            // SAFETY: the device belongs to the list, which is freed below.
            Some(device) => Object::new(unsafe { ibv_open_device(device) }, ()),
            None => Err(io::Error::from_raw_os_error(libc::ENODEV)),
        };
        // SAFETY: the list came from `ibv_get_device_list` and is freed once. Opened devices outlive it.
        unsafe { ibv_free_device_list(list) };
        let context = Self(opened?);
        set_nonblocking(context.async_fd())?;
        Ok(Rc::new(context))
    }

    pub(super) fn raw(&self) -> *mut ibv_context {
        self.0.raw()
    }

    /// Readable when an asynchronous event is pending.
    pub(crate) fn async_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the context is open as long as `self` lives. The field never changes.
        let fd = unsafe { (*self.raw()).async_fd };
        // SAFETY: the descriptor is open as long as `self` lives.
        unsafe { BorrowedFd::borrow_raw(fd) }
    }

    /// Queries the device's attributes.
    pub(crate) fn attributes(&self) -> io::Result<ibv_device_attr> {
        // SAFETY: all zeroes are a valid value of this struct of integers.
        let mut attr: ibv_device_attr = unsafe { mem::zeroed() };
        // SAFETY: the context is open, and `attr` is valid for writes.
        check(unsafe { ibv_query_device(self.raw(), &raw mut attr) })?;
        Ok(attr)
    }

    /// Queries a port's attributes. The first port is 1.
    pub(crate) fn port(&self, port: u8) -> io::Result<ibv_port_attr> {
        // SAFETY: all zeroes are a valid value of this struct of integers.
        let mut attr: ibv_port_attr = unsafe { mem::zeroed() };
        // SAFETY: the context is open, and `attr` is valid for writes.
        check(unsafe { ___ibv_query_port(self.raw(), port, &raw mut attr) })?;
        Ok(attr)
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
        let reported = match code {
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
            _ => AsyncEvent::Device { code },
        };
        // SAFETY: the event was taken above and is acknowledged once.
        unsafe { ibv_ack_async_event(event.as_mut_ptr()) };
        Some(reported)
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
pub(crate) struct ProtectionDomain(Object<ibv_pd, Rc<DeviceContext>>);

impl ProtectionDomain {
    pub(crate) fn new(context: &Rc<DeviceContext>) -> io::Result<Rc<Self>> {
        // SAFETY: the context is open.
        let raw = unsafe { ibv_alloc_pd(context.raw()) };
        Ok(Rc::new(Self(Object::new(raw, Rc::clone(context))?)))
    }

    pub(super) fn raw(&self) -> *mut ibv_pd {
        self.0.raw()
    }
}

/// Encodes a number as the cookie of a C struct. It is never dereferenced.
pub(super) fn cookie(number: usize) -> *mut c_void {
    ptr::without_provenance_mut(number)
}
