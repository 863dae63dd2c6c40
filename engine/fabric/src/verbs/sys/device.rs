#![expect(unsafe_code, reason = "calls libibverbs")]
//! Ownership of the objects of libibverbs: opened devices, protection domains, registered memory and memory windows.

use std::ffi::{CStr, c_int, c_void};
use std::io;
use std::mem::{self, ManuallyDrop, MaybeUninit};
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};
use std::rc::Rc;

use rdma_sys::{
    ___ibv_query_port, ibv_access_flags, ibv_ack_async_event, ibv_alloc_mw, ibv_alloc_pd, ibv_async_event,
    ibv_async_event_element_t, ibv_close_device, ibv_comp_channel, ibv_context, ibv_cq, ibv_dealloc_mw, ibv_dealloc_pd,
    ibv_dereg_mr, ibv_destroy_comp_channel, ibv_destroy_cq, ibv_destroy_qp, ibv_destroy_srq, ibv_device,
    ibv_device_attr, ibv_free_device_list, ibv_get_async_event, ibv_get_device_list, ibv_get_device_name, ibv_mr,
    ibv_mw, ibv_mw_type, ibv_open_device, ibv_pd, ibv_port_attr, ibv_qp, ibv_query_device, ibv_reg_mr, ibv_srq,
};
use rpcrdma_mempool::Arena;

use super::{check, check_non_null, set_nonblocking};

/// A struct of libibverbs that one call destroys.
pub(crate) trait Destroy {
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
    ibv_mr: ibv_dereg_mr,
    ibv_mw: ibv_dealloc_mw,
    ibv_pd: ibv_dealloc_pd,
    ibv_qp: ibv_destroy_qp,
    ibv_srq: ibv_destroy_srq,
}

/// An object of libibverbs, which is destroyed on drop.
///
/// Until then the object keeps its parents alive: the objects and memory that it was created with. If its destruction
/// fails, the parents are leaked, because the device may still use them.
pub(crate) struct Object<T: Destroy, P> {
    raw: NonNull<T>,
    parents: ManuallyDrop<P>,
}

impl<T: Destroy, P> Object<T, P> {
    /// Wraps an object that the library has created. A null pointer becomes the last OS error.
    pub(super) fn wrap(raw: *mut T, parents: P) -> io::Result<Self> {
        Ok(Self { raw: check_non_null(raw)?, parents: ManuallyDrop::new(parents) })
    }

    #[inline]
    pub(crate) fn raw(&self) -> *mut T {
        self.raw.as_ptr()
    }

    pub(crate) fn parents(&self) -> &P {
        &self.parents
    }

    /// Destroys the object. On success the device no longer accesses its memory.
    pub(crate) fn destroy(self) -> io::Result<()> {
        ManuallyDrop::new(self).destroy_in_place()
    }

    /// Destroys the object and releases its parents. The object must not be used afterwards.
    fn destroy_in_place(&mut self) -> io::Result<()> {
        // SAFETY: objects made with this one keep it alive, so none is left. It is destroyed once, because either
        // `destroy` or `drop` calls this, but never both.
        check(unsafe { T::destroy(self.raw()) })?;
        // SAFETY: the field is not used again.
        unsafe { ManuallyDrop::drop(&mut self.parents) };
        Ok(())
    }
}

impl<T: Destroy, P> Drop for Object<T, P> {
    fn drop(&mut self) {
        if let Err(error) = self.destroy_in_place() {
            log::error!("{}: {error}", T::CALL);
        }
    }
}

/// A device opened by this shard alone.
pub(crate) type DeviceContext = Object<ibv_context, ()>;

/// An asynchronous event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AsyncEvent {
    /// A code of `ibv_event_type`. Devices may report others.
    pub(crate) code: u32,
    /// The cookie of the event's queue pair, or the number of its port. 0 for other events.
    pub(crate) subject: usize,
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
            Some(device) => Self::wrap(unsafe { ibv_open_device(device) }, ()),
            None => Err(io::Error::from_raw_os_error(libc::ENODEV)),
        };
        // SAFETY: the list came from `ibv_get_device_list` and is freed once. Opened devices outlive it.
        unsafe { ibv_free_device_list(list) };
        let context = opened?;
        set_nonblocking(context.async_fd())?;
        Ok(Rc::new(context))
    }

    /// The descriptor, which is readable when an asynchronous event is pending.
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
        // The code is read as a number, because a device may report codes outside the enumeration.
        let kind = event.as_ptr().wrapping_byte_add(mem::offset_of!(ibv_async_event, event_type)).cast::<u32>();
        // SAFETY: the call has filled in this field, which has the size of a C enumeration.
        let code = unsafe { kind.read() };
        // SAFETY: the union lies at the start. The call has filled in the member for the code.
        let element = unsafe { event.as_ptr().cast::<ibv_async_event_element_t>().read() };
        let subject = match code {
            // IBV_EVENT_QP_FATAL to IBV_EVENT_PATH_MIG_ERR.
            1..=7 | AsyncEvent::LAST_RECEIVE_REACHED => {
                // SAFETY: for these codes the union holds a queue pair.
                let qp = unsafe { element.qp };
                // SAFETY: a queue pair is not destroyed before its events are acknowledged, which happens below.
                unsafe { (*qp).qp_context }.addr()
            }
            // SAFETY: for these codes the union holds a port's number.
            // The codes are those from IBV_EVENT_PORT_ACTIVE to IBV_EVENT_SM_CHANGE, IBV_EVENT_CLIENT_REREGISTER and
            // IBV_EVENT_GID_CHANGE.
            AsyncEvent::PORT_ACTIVE..=13 | 17 | 18 => unsafe { element.port_num }.max(0) as usize,
            _ => 0,
        };
        // SAFETY: the event was taken above and is acknowledged once.
        unsafe { ibv_ack_async_event(event.as_mut_ptr()) };
        Some(AsyncEvent { code, subject })
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
pub(super) fn context_device_name(context: *mut ibv_context) -> Option<String> {
    // SAFETY: the caller's identifier keeps its device open.
    let context = unsafe { context.as_ref() }?;
    device_name(context.device)
}

/// A protection domain, which limits one shard's work requests to its memory.
pub(crate) type ProtectionDomain = Object<ibv_pd, Rc<DeviceContext>>;

impl ProtectionDomain {
    pub(crate) fn new(context: &Rc<DeviceContext>) -> io::Result<Rc<Self>> {
        // SAFETY: the context is open.
        let raw = unsafe { ibv_alloc_pd(context.raw()) };
        Ok(Rc::new(Self::wrap(raw, Rc::clone(context))?))
    }
}

/// An arena registered with the device, which keeps the arena alive.
pub(crate) type MemoryRegion = Object<ibv_mr, (Arena, Rc<ProtectionDomain>)>;

impl MemoryRegion {
    /// Registers a whole arena for local work requests, and for windows if `may_expose`. Peers never get rights to the
    /// region itself.
    pub(crate) fn new(pd: &Rc<ProtectionDomain>, arena: &Arena, may_expose: bool) -> io::Result<Self> {
        let mut access = ibv_access_flags::IBV_ACCESS_LOCAL_WRITE.0;
        if may_expose {
            access |= ibv_access_flags::IBV_ACCESS_MW_BIND.0;
        }
        let base = ptr::with_exposed_provenance_mut(arena.base_address());
        // SAFETY: the range is the arena's mapping, which `arena` keeps mapped. The device writes only to posted or
        // lent buffers there. No references to these exist meanwhile.
        let raw = unsafe { ibv_reg_mr(pd.raw(), base, arena.len(), access as i32) };
        Self::wrap(raw, (arena.clone(), Rc::clone(pd)))
    }

    /// The local key for this side's work requests, which never changes.
    pub(crate) fn lkey(&self) -> u32 {
        // SAFETY: the region lives as long as `self`.
        unsafe { (*self.raw()).lkey }
    }
}

/// A type-2 memory window. Its destruction revokes the peer's access, even if the window is bound. If the destruction
/// fails, the revocation is uncertain.
pub(crate) type MemoryWindow = Object<ibv_mw, Rc<ProtectionDomain>>;

impl MemoryWindow {
    pub(crate) fn new(pd: &Rc<ProtectionDomain>) -> io::Result<Self> {
        // SAFETY: the domain is alive.
        let raw = unsafe { ibv_alloc_mw(pd.raw(), ibv_mw_type::IBV_MW_TYPE_2) };
        Self::wrap(raw.unwrap_or(ptr::null_mut()), Rc::clone(pd))
    }

    /// The window's key as known to the library.
    #[inline]
    pub(crate) fn rkey(&self) -> u32 {
        // SAFETY: the window lives as long as `self`.
        unsafe { (*self.raw()).rkey }
    }

    /// Updates the library's key of a window after a posted bind. Some providers (rxe) do not update it themselves, and
    /// would use the old key in the next bind.
    #[inline]
    pub(crate) fn set_rkey(&mut self, rkey: u32) {
        // SAFETY: the window lives as long as `self` and has no other reference.
        unsafe { (*self.raw()).rkey = rkey };
    }
}

/// Encodes the cookie of a C struct as a pointer, which is never dereferenced.
pub(super) fn cookie_ptr(cookie: usize) -> *mut c_void {
    ptr::without_provenance_mut(cookie)
}
