#![expect(unsafe_code, reason = "calls a function of C")]
//! Reports of the connections of a server's clients.

use std::ffi::{CString, c_char, c_uint, c_void};
use std::net::IpAddr;
use std::ptr;

use rpcrdma::server::{Peer, PeerEvent, PeerHook};

use crate::names::to_c_names;
use crate::services::CallbackContext;

/// The beginning or the end of a client's connection to a server.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct rpcrdma_peer_event {
    /// Bytes that this version of the library has written, as in `rpcrdma_completion`.
    pub size: usize,
    /// Number of the connection, as in `rpcrdma_call_info`: unique for this shard of this server.
    pub connection: u64,
    /// The peer, as `rpcrdma_call_peer` writes it.
    ///
    /// With `wire.host_key`, a connection begins before its peer has proven its identity: then this text is the IP
    /// address at the beginning, and the identity at the end.
    pub peer: *const c_char,
    /// Why the connection has ended; NULL if it has begun.
    pub reason: *const c_char,
    /// Number of the shard, as in `rpcrdma_call_info`.
    pub shard: c_uint,
}

/// Reports that a connection to a server has begun or ended.
///
/// The hook reports the beginning before the first call of the connection, and the end once, after its last handler.
/// Deferred calls may still be open, and `rpcrdma_call_is_disconnected` is 1 for them. The hook may answer calls. The
/// end of the server ends all connections: `rpcrdma_free` waits for these reports, and so does `rpcrdma_server_drain`
/// unless it times out.
///
/// # Parameters
/// - `context`: the argument of `rpcrdma_services_peers`.
/// - `event`: the connection, and why it has ended.
///
/// # Ownership
/// The event is valid until the function returns.
///
/// # Threads
/// The hook runs on the shard, or on a worker while the server ends, and must not block.
pub type rpcrdma_peer_hook =
    Option<unsafe extern "C-unwind" fn(context: *mut c_void, event: *const rpcrdma_peer_event)>;

/// The name of a peer: its authenticated identity, or else its address.
pub(crate) fn peer_name(identity: Option<&str>, host: Option<IpAddr>) -> String {
    match (identity, host) {
        (Some(identity), _) => identity.to_owned(),
        (None, host) => host.map_or_else(String::new, |host| host.to_string()),
    }
}

/// Makes a hook that calls a function of C.
///
/// # Safety
/// `function` may be called with `context` on any thread.
pub(crate) unsafe fn peer_hook(
    function: unsafe extern "C-unwind" fn(*mut c_void, *const rpcrdma_peer_event),
    context: CallbackContext,
) -> PeerHook {
    PeerHook::new(move |event| match event {
        PeerEvent::Established(peer) => report(function, context, peer, None),
        PeerEvent::Ended(peer, reason) => report(function, context, peer, Some(c_text(to_c_names(reason.to_string())))),
        _ => {}
    })
}

fn report(
    function: unsafe extern "C-unwind" fn(*mut c_void, *const rpcrdma_peer_event),
    context: CallbackContext,
    peer: &Peer,
    reason: Option<CString>,
) {
    let name = c_text(peer_name(peer.identity(), peer.host()));
    let event = rpcrdma_peer_event {
        size: size_of::<rpcrdma_peer_event>(),
        connection: peer.caller().connection(),
        peer: name.as_ptr(),
        reason: reason.as_ref().map_or(ptr::null(), |reason| reason.as_ptr()),
        shard: peer.caller().shard(),
    };
    // SAFETY: the caller of `peer_hook` guarantees it.
    unsafe { function(context.get(), &raw const event) }
}

fn c_text(text: String) -> CString {
    CString::new(text.replace('\0', " ")).unwrap_or_default()
}
