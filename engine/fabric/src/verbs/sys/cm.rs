#![expect(unsafe_code, reason = "calls librdmacm")]
//! The connection manager: event channels and identifiers.

use std::io;
use std::mem::MaybeUninit;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use rdma_sys::{
    ibv_gid, ibv_path_data, ibv_path_record, ibv_qp_state, rdma_accept, rdma_ack_cm_event, rdma_bind_addr,
    rdma_cm_event, rdma_cm_event_type, rdma_cm_id, rdma_conn_param, rdma_connect, rdma_create_event_channel,
    rdma_create_id, rdma_destroy_event_channel, rdma_destroy_id, rdma_disconnect, rdma_establish, rdma_event_channel,
    rdma_get_cm_event, rdma_init_qp_attr, rdma_listen, rdma_migrate_id, rdma_port_space, rdma_reject,
    rdma_resolve_addr, rdma_resolve_route, rdma_set_option,
};

use super::device::{cookie, name_of, zeroed};
use super::queue_pair::QpAttributes;
use super::{check_errno, made, never_wait};

/// Level and name of `rdma_set_option` options, which the bindings lack.
const OPTION_TOS: (i32, i32) = (0, 0);
const OPTION_PATH: (i32, i32) = (1, 1);
/// One path for all messages in both directions: `IBV_PATH_FLAG_GMP`, `…_PRIMARY`, `…_BIDIRECTIONAL`.
const PATH_FOR_ALL: u32 = 1 | 1 << 1 | 1 << 3 | 1 << 5;

/// A path record of the subnet administrator, as `ibv_path_record`, in host byte order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PathRecord {
    pub(crate) dgid: [u8; 16],
    pub(crate) sgid: [u8; 16],
    pub(crate) flowlabel_hoplimit: u32,
    pub(crate) tclass: u8,
    pub(crate) reversible_numpath: u8,
    pub(crate) pkey: u16,
    pub(crate) qosclass_sl: u16,
    pub(crate) mtu: u8,
    pub(crate) rate: u8,
    pub(crate) packetlifetime: u8,
}

impl PathRecord {
    fn raw(&self) -> ibv_path_data {
        // SAFETY: a struct of integers.
        let none: ibv_path_record = unsafe { zeroed() };
        let path = ibv_path_record {
            dgid: ibv_gid { raw: self.dgid },
            sgid: ibv_gid { raw: self.sgid },
            flowlabel_hoplimit: self.flowlabel_hoplimit.to_be(),
            tclass: self.tclass,
            reversible_numpath: self.reversible_numpath,
            pkey: self.pkey.to_be(),
            qosclass_sl: self.qosclass_sl.to_be(),
            mtu: self.mtu,
            rate: self.rate,
            packetlifetime: self.packetlifetime,
            ..none
        };
        ibv_path_data { flags: PATH_FOR_ALL, reserved: 0, path }
    }
}

/// Non-blocking channel for identifiers' events.
#[derive(Debug)]
pub(crate) struct EventChannel(NonNull<rdma_event_channel>);

// SAFETY: a channel is a descriptor. librdmacm locks the state that its calls share.
unsafe impl Send for EventChannel {}
// SAFETY: as above. Several threads may take events from one channel.
unsafe impl Sync for EventChannel {}

/// An event of an identifier. Names follow `rdma_cm_event_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CmEventKind {
    AddressResolved,
    AddressError,
    RouteResolved,
    RouteError,
    ConnectRequest,
    ConnectResponse,
    ConnectError,
    Unreachable,
    Rejected,
    Established,
    Disconnected,
    DeviceRemoval,
    /// An event that this engine does not use, by its code.
    Other(u32),
}

/// An event that is already acknowledged.
#[derive(Debug)]
pub(crate) struct CmEvent {
    pub(crate) kind: CmEventKind,
    /// A negative error number, or a reject's reason code.
    pub(crate) status: i32,
    /// The identifier's number.
    pub(crate) cookie: usize,
    /// The new identifier of a connect request.
    pub(crate) request: Option<CmId>,
    pub(crate) private_data: Vec<u8>,
    /// Maximum concurrent RDMA Reads that the peer posts.
    pub(crate) responder_resources: u8,
    /// Maximum concurrent RDMA Reads that the peer serves.
    pub(crate) initiator_depth: u8,
}

/// Parameters that both sides exchange at connect.
#[derive(Clone, Debug)]
pub(crate) struct ConnectionParameters<'a> {
    pub(crate) private_data: &'a [u8],
    pub(crate) responder_resources: u8,
    pub(crate) initiator_depth: u8,
    /// Retransmissions of lost packets.
    pub(crate) retry_count: u8,
    /// The peer's retries without a Receive.
    pub(crate) rnr_retry: u8,
    pub(crate) shared_receives: bool,
    pub(crate) qp_number: u32,
}

impl ConnectionParameters<'_> {
    fn raw(&self) -> rdma_conn_param {
        rdma_conn_param {
            private_data: self.private_data.as_ptr().cast(),
            private_data_len: self.private_data.len() as u8,
            responder_resources: self.responder_resources,
            initiator_depth: self.initiator_depth,
            flow_control: 0,
            retry_count: self.retry_count,
            rnr_retry_count: self.rnr_retry,
            srq: u8::from(self.shared_receives),
            qp_num: self.qp_number,
        }
    }
}

impl EventChannel {
    pub(crate) fn new() -> io::Result<Arc<Self>> {
        // SAFETY: no arguments.
        let channel = Self(made(unsafe { rdma_create_event_channel() })?);
        never_wait(channel.fd())?;
        Ok(Arc::new(channel))
    }

    /// Readable when an event is pending.
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
        let kind = kind(raw.event);
        // SAFETY: an identifier lives until its events are acknowledged.
        let cookie = unsafe { (*raw.id).context }.addr();
        let mut told = CmEvent {
            kind,
            status: raw.status,
            cookie,
            request: None,
            private_data: Vec::new(),
            responder_resources: 0,
            initiator_depth: 0,
        };
        if carries_parameters(kind) {
            // SAFETY: identifiers of the TCP port space use this member of the union.
            let conn = unsafe { raw.param.conn };
            (told.responder_resources, told.initiator_depth) = (conn.responder_resources, conn.initiator_depth);
            if !conn.private_data.is_null() {
                let len = usize::from(conn.private_data_len);
                // SAFETY: the event holds as many bytes of private data until it is acknowledged.
                told.private_data = unsafe { std::slice::from_raw_parts(conn.private_data.cast(), len) }.to_vec();
            }
        }
        if kind == CmEventKind::ConnectRequest {
            told.request = NonNull::new(raw.id).map(|raw| CmId { raw, channel: Arc::clone(self) });
        }
        // SAFETY: the event was taken above and is acknowledged once. `raw` is not used afterwards.
        unsafe { rdma_ack_cm_event(event) };
        Ok(Some(told))
    }
}

fn carries_parameters(kind: CmEventKind) -> bool {
    use CmEventKind::{ConnectRequest, ConnectResponse, Established, Rejected};
    matches!(kind, ConnectRequest | ConnectResponse | Established | Rejected)
}

impl Drop for EventChannel {
    fn drop(&mut self) {
        // SAFETY: identifiers keep their channel alive, so none is left. The channel is destroyed once.
        unsafe { rdma_destroy_event_channel(self.0.as_ptr()) };
    }
}

fn kind(code: rdma_cm_event_type::Type) -> CmEventKind {
    use CmEventKind as K;
    use rdma_cm_event_type as E;
    match code {
        E::RDMA_CM_EVENT_ADDR_RESOLVED => K::AddressResolved,
        E::RDMA_CM_EVENT_ADDR_ERROR => K::AddressError,
        E::RDMA_CM_EVENT_ROUTE_RESOLVED => K::RouteResolved,
        E::RDMA_CM_EVENT_ROUTE_ERROR => K::RouteError,
        E::RDMA_CM_EVENT_CONNECT_REQUEST => K::ConnectRequest,
        E::RDMA_CM_EVENT_CONNECT_RESPONSE => K::ConnectResponse,
        E::RDMA_CM_EVENT_CONNECT_ERROR => K::ConnectError,
        E::RDMA_CM_EVENT_UNREACHABLE => K::Unreachable,
        E::RDMA_CM_EVENT_REJECTED => K::Rejected,
        E::RDMA_CM_EVENT_ESTABLISHED => K::Established,
        E::RDMA_CM_EVENT_DISCONNECTED => K::Disconnected,
        E::RDMA_CM_EVENT_DEVICE_REMOVAL => K::DeviceRemoval,
        other => K::Other(other),
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
    /// Creates an identifier. Its events carry `number`.
    pub(crate) fn new(channel: &Arc<EventChannel>, number: usize) -> io::Result<Self> {
        let mut raw = ptr::null_mut();
        let space = rdma_port_space::RDMA_PS_TCP;
        // SAFETY: the channel is open, and `raw` is valid for writes.
        check_errno(unsafe { rdma_create_id(channel.0.as_ptr(), &raw mut raw, cookie(number), space) })?;
        let raw = made(raw)?;
        Ok(Self { raw, channel: Arc::clone(channel) })
    }

    fn raw(&self) -> *mut rdma_cm_id {
        self.raw.as_ptr()
    }

    /// Changes the number and the event channel.
    pub(crate) fn adopt(&mut self, channel: &Arc<EventChannel>, number: usize) -> io::Result<()> {
        // SAFETY: the identifier is alive and has no other reference.
        unsafe { self.raw.as_mut().context = cookie(number) };
        if Arc::ptr_eq(channel, &self.channel) {
            return Ok(());
        }
        // SAFETY: identifier and channel are alive, and all events that were taken are acknowledged.
        check_errno(unsafe { rdma_migrate_id(self.raw(), channel.0.as_ptr()) })?;
        self.channel = Arc::clone(channel);
        Ok(())
    }

    pub(crate) fn set_cookie(&mut self, number: usize) {
        // SAFETY: the identifier is alive and has no other reference.
        unsafe { self.raw.as_mut().context = cookie(number) };
    }

    pub(crate) fn bind(&self, address: SocketAddr) -> io::Result<()> {
        let mut address = SockAddr::new(address);
        // SAFETY: the identifier is alive, and the address is complete.
        check_errno(unsafe { rdma_bind_addr(self.raw(), address.as_mut_ptr()) })
    }

    /// Starts to accept connect requests.
    pub(crate) fn listen(&self, backlog: i32) -> io::Result<()> {
        // SAFETY: the identifier is alive.
        check_errno(unsafe { rdma_listen(self.raw(), backlog) })
    }

    /// Starts address resolution, which finds the device.
    pub(crate) fn resolve_address(&self, from: Option<IpAddr>, to: SocketAddr, timeout_ms: i32) -> io::Result<()> {
        let mut from = from.map(|from| SockAddr::new((from, 0).into()));
        let from = from.as_mut().map_or(ptr::null_mut(), SockAddr::as_mut_ptr);
        let mut to = SockAddr::new(to);
        // SAFETY: the identifier is alive. The addresses are complete and outlive the call. A null source is valid.
        check_errno(unsafe { rdma_resolve_addr(self.raw(), from, to.as_mut_ptr(), timeout_ms) })
    }

    pub(crate) fn resolve_route(&self, timeout_ms: i32) -> io::Result<()> {
        // SAFETY: the identifier is alive.
        check_errno(unsafe { rdma_resolve_route(self.raw(), timeout_ms) })
    }

    /// Sets the type of service or traffic class of both ends. Must precede path resolution.
    pub(crate) fn set_tos(&self, mut tos: u8) -> io::Result<()> {
        self.set_option(OPTION_TOS, &mut tos)
    }

    /// Sets the path in place of a resolution. The same event follows.
    pub(crate) fn set_path(&self, record: &PathRecord) -> io::Result<()> {
        self.set_option(OPTION_PATH, &mut record.raw())
    }

    fn set_option<T>(&self, (level, name): (i32, i32), value: &mut T) -> io::Result<()> {
        let (value, len) = (ptr::from_mut(value).cast(), size_of::<T>());
        // SAFETY: the identifier is alive. The value has this length and outlives the call, which only reads it.
        check_errno(unsafe { rdma_set_option(self.raw(), level, name, value, len) })
    }

    pub(crate) fn connect(&self, params: &ConnectionParameters<'_>) -> io::Result<()> {
        let mut params = params.raw();
        // SAFETY: the identifier is alive; the private data outlives the call.
        check_errno(unsafe { rdma_connect(self.raw(), &raw mut params) })
    }

    pub(crate) fn accept(&self, params: &ConnectionParameters<'_>) -> io::Result<()> {
        let mut params = params.raw();
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

    /// The device that it is bound to. `None` before the binding.
    pub(crate) fn device(&self) -> Option<String> {
        // SAFETY: the identifier is alive.
        name_of(unsafe { self.raw.as_ref().verbs })
    }

    /// Makes librdmacm release this identifier's removed device. Some drivers, such as soft-RoCE's, wait for all users,
    /// and would wait for this process to end. The device's descriptors become descriptors of `/dev/null`, which
    /// librdmacm can still close.
    pub(crate) fn let_go_of_device(&self) -> io::Result<()> {
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

/// Converts C's form of an address.
fn address(storage: &libc::sockaddr_storage) -> Option<SocketAddr> {
    match i32::from(storage.ss_family) {
        libc::AF_INET => {
            // SAFETY: the family gives the type. The storage is large enough and aligned for it.
            let v4 = unsafe { ptr::from_ref(storage).cast::<libc::sockaddr_in>().read() };
            let ip = Ipv4Addr::from_bits(u32::from_be(v4.sin_addr.s_addr));
            Some(SocketAddr::V4(SocketAddrV4::new(ip, u16::from_be(v4.sin_port))))
        }
        libc::AF_INET6 => {
            // SAFETY: as above.
            let v6 = unsafe { ptr::from_ref(storage).cast::<libc::sockaddr_in6>().read() };
            let ip = Ipv6Addr::from(v6.sin6_addr.s6_addr);
            let port = u16::from_be(v6.sin6_port);
            Some(SocketAddr::V6(SocketAddrV6::new(ip, port, v6.sin6_flowinfo, v6.sin6_scope_id)))
        }
        _ => None,
    }
}

impl Drop for CmId {
    fn drop(&mut self) {
        // SAFETY: all events that were taken are acknowledged. The identifier is destroyed once.
        unsafe { rdma_destroy_id(self.raw()) };
    }
}

/// An address in C's form.
struct SockAddr(MaybeUninit<libc::sockaddr_storage>);

impl SockAddr {
    fn new(address: SocketAddr) -> Self {
        let mut storage = MaybeUninit::<libc::sockaddr_storage>::zeroed();
        match address {
            SocketAddr::V4(v4) => {
                // SAFETY: a struct of integers.
                let mut sin: libc::sockaddr_in = unsafe { zeroed() };
                sin.sin_family = libc::AF_INET as libc::sa_family_t;
                sin.sin_port = v4.port().to_be();
                sin.sin_addr.s_addr = v4.ip().to_bits().to_be();
                // SAFETY: storage is large enough and aligned for every kind of address.
                unsafe { storage.as_mut_ptr().cast::<libc::sockaddr_in>().write(sin) };
            }
            SocketAddr::V6(v6) => {
                // SAFETY: a struct of integers.
                let mut sin: libc::sockaddr_in6 = unsafe { zeroed() };
                sin.sin6_family = libc::AF_INET6 as libc::sa_family_t;
                sin.sin6_port = v6.port().to_be();
                sin.sin6_addr.s6_addr = v6.ip().octets();
                sin.sin6_flowinfo = v6.flowinfo();
                sin.sin6_scope_id = v6.scope_id();
                // SAFETY: storage is large enough and aligned for every kind of address.
                unsafe { storage.as_mut_ptr().cast::<libc::sockaddr_in6>().write(sin) };
            }
        }
        Self(storage)
    }

    fn as_mut_ptr(&mut self) -> *mut libc::sockaddr {
        self.0.as_mut_ptr().cast()
    }
}
