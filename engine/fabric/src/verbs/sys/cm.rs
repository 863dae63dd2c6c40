#![expect(unsafe_code, reason = "calls librdmacm")]
//! The connection manager: event channels and identifiers.

use std::ffi::CStr;
use std::io;
use std::mem;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use rdma_sys::{
    ibv_gid, ibv_path_data, ibv_path_record, ibv_qp_state, rdma_accept, rdma_ack_cm_event, rdma_bind_addr,
    rdma_cm_event, rdma_cm_event_type as kinds, rdma_cm_id, rdma_conn_param, rdma_connect, rdma_create_event_channel,
    rdma_create_id, rdma_destroy_event_channel, rdma_destroy_id, rdma_disconnect, rdma_establish, rdma_event_channel,
    rdma_event_str, rdma_get_cm_event, rdma_init_qp_attr, rdma_listen, rdma_migrate_id, rdma_port_space, rdma_reject,
    rdma_resolve_addr, rdma_resolve_route, rdma_set_option,
};
use rustix::net::SocketAddrAny;

use super::device::{context_device_name, cookie_ptr};
use super::queue::QpAttributes;
use super::{check_errno, check_non_null, set_nonblocking};
use crate::path::PathConfig;

/// Level and name of `rdma_set_option` options, which the bindings lack.
const OPTION_TOS: (i32, i32) = (0, 0);
const OPTION_PATH: (i32, i32) = (1, 1);
/// One path for all messages in both directions: `IBV_PATH_FLAG_GMP`, `_PRIMARY`, `_OUTBOUND`, `_INBOUND_REVERSE`.
const PATH_FOR_ALL: u32 = 1 | 1 << 1 | 1 << 3 | 1 << 5;

/// Hop limit of a path: Linux's default for IP packets.
const HOP_LIMIT: u32 = 64;
/// The key of the default partition, the only one of RoCE.
const DEFAULT_PKEY: u16 = 0xFFFF;
/// The record has one path, which is valid in both directions.
const REVERSIBLE: u8 = 1 << 7 | 1;
/// The selector "exactly", in the upper two bits of a byte (InfiniBand Architecture 1.2.1 §15.2.5.16).
const EXACTLY: u8 = 2 << 6;
/// Packet lifetime: the kernel's value for RoCE, 4.096 µs · 2^16.
const LIFETIME: u8 = 16;
/// The device's full rate.
const FULL_RATE: u8 = 0;

/// A RoCE path between two addresses with this MTU, as a path record of the subnet administrator.
///
/// Path resolution would find only the MTU of the interface. The connect request carries the path to the peer, so both
/// queue pairs use it.
pub(crate) fn path_record(from: IpAddr, to: IpAddr, mtu_code: u8, config: &PathConfig) -> ibv_path_data {
    let gid = |ip: IpAddr| match ip {
        IpAddr::V4(ip) => ibv_gid { raw: ip.to_ipv6_mapped().octets() },
        IpAddr::V6(ip) => ibv_gid { raw: ip.octets() },
    };
    // SAFETY: all zeroes are a valid value of this struct of integers.
    let none: ibv_path_record = unsafe { mem::zeroed() };
    let path = ibv_path_record {
        dgid: gid(to),
        sgid: gid(from),
        flowlabel_hoplimit: HOP_LIMIT.to_be(),
        tclass: config.tos.unwrap_or(0),
        reversible_numpath: REVERSIBLE,
        pkey: DEFAULT_PKEY.to_be(),
        qosclass_sl: u16::from(config.service_level.unwrap_or(0)).to_be(),
        mtu: EXACTLY | mtu_code,
        rate: EXACTLY | FULL_RATE,
        packetlifetime: EXACTLY | LIFETIME,
        ..none
    };
    ibv_path_data { flags: PATH_FOR_ALL, reserved: 0, path }
}

/// A non-blocking channel for the events of identifiers.
#[derive(Debug)]
pub(crate) struct EventChannel(NonNull<rdma_event_channel>);

// SAFETY: a channel is a descriptor. librdmacm locks the state that its calls share.
unsafe impl Send for EventChannel {}
// SAFETY: several threads may take events from one channel, because librdmacm locks the state that its calls share.
unsafe impl Sync for EventChannel {}

/// A copy of an event, which is already acknowledged.
#[derive(Debug)]
pub(crate) struct CmEvent {
    pub(crate) kind: kinds::Type,
    /// A negative error number, or a reject's reason code.
    pub(crate) status: i32,
    /// The identifier's cookie.
    pub(crate) cookie: usize,
    /// The new identifier of a connect request.
    pub(crate) request: Option<CmId>,
    pub(crate) private_data: Vec<u8>,
    /// Maximum concurrent RDMA Reads that the peer posts.
    pub(crate) responder_resources: u8,
    /// Maximum concurrent RDMA Reads that the peer serves.
    pub(crate) initiator_depth: u8,
}

impl CmEvent {
    /// The name of its kind.
    pub(crate) fn name(&self) -> &'static str {
        // SAFETY: the call takes any number.
        let name = unsafe { rdma_event_str(self.kind) };
        // SAFETY: `rdma_event_str` returns a constant text.
        unsafe { CStr::from_ptr(name) }.to_str().unwrap_or_default()
    }
}

impl EventChannel {
    pub(crate) fn new() -> io::Result<Arc<Self>> {
        // SAFETY: no arguments.
        let channel = Self(check_non_null(unsafe { rdma_create_event_channel() })?);
        set_nonblocking(channel.fd())?;
        Ok(Arc::new(channel))
    }

    /// The descriptor, which is readable when an event is pending.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel is open as long as `self` lives. The field never changes.
        let fd = unsafe { self.0.as_ref().fd };
        // SAFETY: the descriptor is open as long as `self` lives.
        unsafe { BorrowedFd::borrow_raw(fd) }
    }

    /// Takes the next event. `None` without a pending event.
    pub(crate) fn next(self: &Arc<Self>) -> io::Result<Option<CmEvent>> {
        let mut event: *mut rdma_cm_event = ptr::null_mut();
        // SAFETY: the channel is open and does not block, and `event` is valid for writes.
        if let Err(error) = check_errno(unsafe { rdma_get_cm_event(self.0.as_ptr(), &raw mut event) }) {
            return if error.kind() == io::ErrorKind::WouldBlock { Ok(None) } else { Err(error) };
        }
        // SAFETY: the call succeeded, so there is an event, which lives until it is acknowledged below.
        let raw = unsafe { &*event };
        let kind = raw.event;
        // SAFETY: an identifier lives until its events are acknowledged.
        let cookie = unsafe { (*raw.id).context }.addr();
        let new_id = NonNull::new(raw.id).filter(|_| kind == kinds::RDMA_CM_EVENT_CONNECT_REQUEST);
        let request = new_id.map(|raw| CmId { raw, channel: Arc::clone(self) });
        let mut taken = CmEvent {
            kind,
            status: raw.status,
            cookie,
            request,
            private_data: Vec::new(),
            responder_resources: 0,
            initiator_depth: 0,
        };
        if let kinds::RDMA_CM_EVENT_CONNECT_REQUEST
        | kinds::RDMA_CM_EVENT_CONNECT_RESPONSE
        | kinds::RDMA_CM_EVENT_ESTABLISHED
        | kinds::RDMA_CM_EVENT_REJECTED = kind
        {
            // SAFETY: identifiers of the TCP port space use this member of the union.
            let conn = unsafe { raw.param.conn };
            (taken.responder_resources, taken.initiator_depth) = (conn.responder_resources, conn.initiator_depth);
            if !conn.private_data.is_null() {
                let len = usize::from(conn.private_data_len);
                // SAFETY: the event holds as many bytes of private data until it is acknowledged.
                taken.private_data = unsafe { std::slice::from_raw_parts(conn.private_data.cast(), len) }.to_vec();
            }
        }
        // SAFETY: the event was taken above and is acknowledged once. `raw` is not used afterwards.
        unsafe { rdma_ack_cm_event(event) };
        Ok(Some(taken))
    }
}

impl Drop for EventChannel {
    fn drop(&mut self) {
        // SAFETY: identifiers keep their channel alive, so none is left. The channel is destroyed once.
        unsafe { rdma_destroy_event_channel(self.0.as_ptr()) };
    }
}

/// One connection or listener of the connection manager. It does not own the queue pair.
#[derive(Debug)]
pub(crate) struct CmId {
    raw: NonNull<rdma_cm_id>,
    /// The channel of its events.
    channel: Arc<EventChannel>,
}

// SAFETY: an identifier is not bound to a thread. librdmacm locks the state that its calls share.
unsafe impl Send for CmId {}

impl CmId {
    /// Creates an identifier. Its events carry `cookie`.
    pub(crate) fn new(channel: &Arc<EventChannel>, cookie: usize) -> io::Result<Self> {
        let mut raw = ptr::null_mut();
        let space = rdma_port_space::RDMA_PS_TCP;
        // SAFETY: the channel is open, and `raw` is valid for writes.
        check_errno(unsafe { rdma_create_id(channel.0.as_ptr(), &raw mut raw, cookie_ptr(cookie), space) })?;
        Ok(Self { raw: check_non_null(raw)?, channel: Arc::clone(channel) })
    }

    fn raw(&self) -> *mut rdma_cm_id {
        self.raw.as_ptr()
    }

    /// Moves the identifier to another event channel, and changes its cookie.
    pub(crate) fn move_to(&mut self, channel: &Arc<EventChannel>, cookie: usize) -> io::Result<()> {
        self.set_cookie(cookie);
        if Arc::ptr_eq(channel, &self.channel) {
            return Ok(());
        }
        // SAFETY: identifier and channel are alive, and all events that were taken are acknowledged.
        check_errno(unsafe { rdma_migrate_id(self.raw(), channel.0.as_ptr()) })?;
        self.channel = Arc::clone(channel);
        Ok(())
    }

    pub(crate) fn set_cookie(&mut self, cookie: usize) {
        // SAFETY: the identifier is alive and has no other reference.
        unsafe { self.raw.as_mut().context = cookie_ptr(cookie) };
    }

    pub(crate) fn bind(&self, address: SocketAddr) -> io::Result<()> {
        let mut address = SocketAddrAny::from(address);
        // SAFETY: the identifier is alive, and the address is complete.
        check_errno(unsafe { rdma_bind_addr(self.raw(), address.as_mut_ptr().cast()) })
    }

    /// Starts to accept connect requests.
    pub(crate) fn listen(&self, backlog: i32) -> io::Result<()> {
        // SAFETY: the identifier is alive.
        check_errno(unsafe { rdma_listen(self.raw(), backlog) })
    }

    /// Starts address resolution, which finds the device.
    pub(crate) fn resolve_address(&self, from: Option<IpAddr>, to: SocketAddr, timeout_ms: i32) -> io::Result<()> {
        let mut from = from.map(|from| SocketAddrAny::from(SocketAddr::new(from, 0)));
        let from = from.as_mut().map_or(ptr::null_mut(), |from| from.as_mut_ptr().cast());
        let mut to = SocketAddrAny::from(to);
        // SAFETY: the identifier is alive. The addresses are complete and outlive the call. A null source is valid.
        check_errno(unsafe { rdma_resolve_addr(self.raw(), from, to.as_mut_ptr().cast(), timeout_ms) })
    }

    pub(crate) fn resolve_route(&self, timeout_ms: i32) -> io::Result<()> {
        // SAFETY: the identifier is alive.
        check_errno(unsafe { rdma_resolve_route(self.raw(), timeout_ms) })
    }

    /// Sets the type of service or traffic class of both ends. Must precede path resolution.
    pub(crate) fn set_tos(&self, mut tos: u8) -> io::Result<()> {
        self.set_option(OPTION_TOS, &mut tos)
    }

    /// Sets the path without resolution. The event of a resolved route follows.
    pub(crate) fn set_path(&self, mut path: ibv_path_data) -> io::Result<()> {
        self.set_option(OPTION_PATH, &mut path)
    }

    fn set_option<T>(&self, (level, name): (i32, i32), value: &mut T) -> io::Result<()> {
        let (value, len) = (ptr::from_mut(value).cast(), size_of::<T>());
        // SAFETY: the identifier is alive. The value has this length and outlives the call, which only reads it.
        check_errno(unsafe { rdma_set_option(self.raw(), level, name, value, len) })
    }

    pub(crate) fn connect(&self, private_data: &[u8], params: rdma_conn_param) -> io::Result<()> {
        let mut params = with_private_data(private_data, params);
        // SAFETY: the identifier is alive; the private data outlives the call.
        check_errno(unsafe { rdma_connect(self.raw(), &raw mut params) })
    }

    pub(crate) fn accept(&self, private_data: &[u8], params: rdma_conn_param) -> io::Result<()> {
        let mut params = with_private_data(private_data, params);
        // SAFETY: the identifier is alive; the private data outlives the call.
        check_errno(unsafe { rdma_accept(self.raw(), &raw mut params) })
    }

    pub(crate) fn reject(&self, private_data: &[u8]) -> io::Result<()> {
        let len = private_data.len() as u8;
        // SAFETY: the identifier is alive; the private data outlives the call.
        check_errno(unsafe { rdma_reject(self.raw(), private_data.as_ptr().cast(), len) })
    }

    /// Completes a connection whose queue pair is ready.
    pub(crate) fn establish(&self) -> io::Result<()> {
        // SAFETY: the identifier is alive.
        check_errno(unsafe { rdma_establish(self.raw()) })
    }

    pub(crate) fn disconnect(&self) -> io::Result<()> {
        // SAFETY: the identifier is alive.
        check_errno(unsafe { rdma_disconnect(self.raw()) })
    }

    /// Attributes for a queue pair's next state, from the connection manager.
    pub(crate) fn qp_attributes(&self, state: ibv_qp_state::Type) -> io::Result<QpAttributes> {
        let mut to = QpAttributes::state(state);
        let mut mask = 0;
        // SAFETY: the identifier is alive, and both places are valid for writes.
        check_errno(unsafe { rdma_init_qp_attr(self.raw(), &raw mut to.attr, &raw mut mask) })?;
        to.mask = mask as u32;
        Ok(to)
    }

    /// The name of the device that the identifier is bound to. `None` before the binding.
    pub(crate) fn device(&self) -> Option<String> {
        // SAFETY: the identifier is alive.
        context_device_name(unsafe { self.raw.as_ref().verbs })
    }

    /// Makes librdmacm release this identifier's removed device.
    ///
    /// Some drivers, such as soft-RoCE's, wait until no process uses the device, so librdmacm would delay them until
    /// this process ends. The device's descriptors become descriptors of `/dev/null`, which librdmacm can still close.
    pub(crate) fn release_device(&self) -> io::Result<()> {
        // SAFETY: the identifier is alive.
        let Some(device) = NonNull::new(unsafe { self.raw.as_ref() }.verbs) else { return Ok(()) };
        // SAFETY: the identifier's device stays open until the identifier is destroyed.
        let device = unsafe { device.as_ref() };
        let null = std::fs::File::open("/dev/null")?;
        for descriptor in [device.cmd_fd, device.async_fd] {
            // SAFETY: the call takes no memory. librdmacm has the descriptor open, and it stays open.
            if unsafe { libc::dup3(null.as_raw_fd(), descriptor, libc::O_CLOEXEC) } < 0 {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(())
    }

    /// Address of the peer.
    pub(crate) fn peer_address(&self) -> Option<SocketAddr> {
        // SAFETY: the identifier is alive.
        let union = &unsafe { self.raw.as_ref() }.route.addr.dst_addr_union;
        // SAFETY: the union is large enough for any address, and zero where unused.
        address(&unsafe { union.dst_storage })
    }

    /// Address of this side. `None` before the binding.
    pub(crate) fn own_address(&self) -> Option<SocketAddr> {
        // SAFETY: the identifier is alive.
        let union = &unsafe { self.raw.as_ref() }.route.addr.src_addr_union;
        // SAFETY: the union is large enough for any address, and zero where unused.
        address(&unsafe { union.src_storage })
    }
}

fn with_private_data(private_data: &[u8], params: rdma_conn_param) -> rdma_conn_param {
    let (data, len) = (private_data.as_ptr().cast(), private_data.len() as u8);
    rdma_conn_param { private_data: data, private_data_len: len, ..params }
}

/// Converts an address from its C form. `None` unless it is an IP address.
fn address(storage: &libc::sockaddr_storage) -> Option<SocketAddr> {
    // SAFETY: the storage is initialized in its whole length. It holds an address, or zeroes, which have no family.
    let any = unsafe { SocketAddrAny::read(ptr::from_ref(storage).cast(), size_of_val(storage) as u32) };
    any.try_into().ok()
}

impl Drop for CmId {
    fn drop(&mut self) {
        // SAFETY: all events that were taken are acknowledged. The identifier is destroyed once.
        unsafe { rdma_destroy_id(self.raw()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn c_socket_addresses_round_trip() {
        // SAFETY: all zeroes are a valid value of this struct of integers.
        let mut storage: libc::sockaddr_storage = unsafe { mem::zeroed() };
        assert_eq!(address(&storage), None, "no family");
        for text in ["10.0.0.1:20049", "[fe80::1%3]:7"] {
            let written: SocketAddr = text.parse().expect("an address");
            let mut any = SocketAddrAny::from(written);
            let (from, to) = (any.as_mut_ptr().cast::<u8>(), (&raw mut storage).cast::<u8>());
            // SAFETY: both are valid for the length of the address.
            unsafe { ptr::copy_nonoverlapping(from, to, any.addr_len() as usize) };
            assert_eq!(address(&storage), Some(written));
        }
        storage.ss_family = libc::AF_UNIX as libc::sa_family_t;
        assert_eq!(address(&storage), None, "another family");
    }

    #[test]
    fn a_path_record_has_the_configured_options_in_network_byte_order() {
        let config = PathConfig { tos: Some(104), service_level: Some(5), path_mtu: Some(1024) };
        let (from, to) = ("10.0.0.1".parse().expect("an address"), "fd00::2".parse().expect("an address"));
        let path = path_record(from, to, 3, &config).path;
        // SAFETY: any value of the union is an array of bytes.
        let bytes = |gid: ibv_gid| unsafe { gid.raw };
        let (sgid, dgid) = (bytes(path.sgid), bytes(path.dgid));
        assert_eq!(sgid, [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xFF, 0xFF, 10, 0, 0, 1]);
        assert_eq!((dgid[0], dgid[15]), (0xFD, 2));
        assert_eq!((path.tclass, u16::from_be(path.qosclass_sl), path.mtu), (104, 5, 0x83));
        assert_eq!((u16::from_be(path.pkey), u32::from_be(path.flowlabel_hoplimit)), (0xFFFF, 64));
    }
}
