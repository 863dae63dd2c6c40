#![expect(unsafe_code, reason = "calls a function of C")]
//! What an application hears of the connections of its clients.

use std::ffi::{CString, c_char, c_uint, c_void};
use std::net::IpAddr;
use std::ptr;

use rpcrdma::server::{Peer, PeerEvent, PeerHook};

use crate::names::in_c;
use crate::services::Context;

/// A client's connection to a server has begun, or ended.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct rpcrdma_peer_event {
    /// Bytes that this version of the library has written, as in `rpcrdma_completion`.
    pub size: usize,
    /// Number of the connection, as in `rpcrdma_call_info`: no other one of this shard of this server has had it.
    pub connection: u64,
    /// Its peer, as of `rpcrdma_call_peer`. With `wire.host_key`, a connection begins before its peer has proven its
    /// identity: `peer` is then its IP address, and the identity at the end.
    pub peer: *const c_char,
    /// Why it has ended; NULL if it has begun.
    pub reason: *const c_char,
    /// Its shard, as in `rpcrdma_call_info`.
    pub shard: c_uint,
}

/// Gets the beginning of a connection, before its first call, and its end once, after its last handler. Deferred calls
/// may still be open: `rpcrdma_call_is_disconnected` is 1 for them. It may answer calls.
///
/// The event is valid until the function returns. It runs on the shard, or on a worker while the server ends, and must
/// not block. The end of the server ends all connections: `rpcrdma_free` waits for it, and `rpcrdma_server_drain`
/// unless it times out.
pub type rpcrdma_peer_hook =
    Option<unsafe extern "C-unwind" fn(context: *mut c_void, event: *const rpcrdma_peer_event)>;

/// The peer of a connection: its authenticated identity, or else its address.
pub(crate) fn name_of(identity: Option<&str>, host: Option<IpAddr>) -> String {
    match (identity, host) {
        (Some(identity), _) => identity.to_owned(),
        (None, host) => host.map_or_else(String::new, |host| host.to_string()),
    }
}

/// # Safety
/// `function` may be called with `context` on any thread.
pub(crate) unsafe fn hook(
    function: unsafe extern "C-unwind" fn(*mut c_void, *const rpcrdma_peer_event),
    context: Context,
) -> PeerHook {
    PeerHook::new(move |event| match event {
        PeerEvent::Established(peer) => tell(function, context, peer, None),
        PeerEvent::Ended(peer, reason) => tell(function, context, peer, Some(text(in_c(reason.to_string())))),
        _ => {}
    })
}

fn tell(
    function: unsafe extern "C-unwind" fn(*mut c_void, *const rpcrdma_peer_event),
    context: Context,
    peer: &Peer,
    reason: Option<CString>,
) {
    let name = text(name_of(peer.identity(), peer.host()));
    let event = rpcrdma_peer_event {
        size: size_of::<rpcrdma_peer_event>(),
        connection: peer.caller().connection(),
        peer: name.as_ptr(),
        reason: reason.as_ref().map_or(ptr::null(), |reason| reason.as_ptr()),
        shard: peer.caller().shard(),
    };
    // SAFETY: the promise of `hook`.
    unsafe { function(context.get(), &raw const event) }
}

fn text(text: String) -> CString {
    CString::new(text.replace('\0', " ")).unwrap_or_default()
}
