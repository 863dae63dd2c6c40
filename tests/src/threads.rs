//! Thread safety of the public types, checked at compile time.

use rpcrdma::client::{ClientCall, ClientConfig, CompletedCall, Pending};
use rpcrdma::server::{LocalServer, ServerConfig};
use rpcrdma::service::duplicate_requests::DuplicateRequestCache;
use rpcrdma::service::{DeferredCall, LocalServices};
use rpcrdma::{Arena, Buf, CallResult, Client, Endpoint, Frozen, LocalClient, Procedure, Server, Services};

const fn send<T: Send>() {}
/// Requires what `anyhow` and `Box<dyn Error>` require of an error.
const fn error<T: std::error::Error + Send + Sync + 'static>() {}
const fn send_and_sync<T: Send + Sync>() {}

/// Has one implementation for a type that is not `Send`. For a `Send` type it has two, so that its use is ambiguous.
trait NotSend<A> {
    const OK: () = ();
}
impl<T> NotSend<()> for T {}
impl<T: Send> NotSend<u8> for T {}

const _: () = {
    send::<Client>();
    send::<Pending>();
    send::<ClientCall>();
    send::<CallResult>();
    send::<CompletedCall>();
    send::<DeferredCall>();
    send::<Buf>();
    send_and_sync::<Frozen>();
    send_and_sync::<Arena>();
    send_and_sync::<Endpoint>();
    send_and_sync::<Server>();
    send_and_sync::<Services>();
    send_and_sync::<Procedure>();
    send_and_sync::<ClientConfig>();
    send_and_sync::<ServerConfig>();
    send_and_sync::<DuplicateRequestCache>();
    error::<rpcrdma::CallError>();
    error::<rpcrdma::InvalidCall>();
    error::<rpcrdma::Refusal>();
    error::<rpcrdma::client::ConnectError>();
    error::<rpcrdma::StartError>();
    error::<rpcrdma::server::Undrained>();
    error::<rpcrdma::CloseReason>();
    error::<rpcrdma::ResizeError>();
    error::<rpcrdma::MemError>();
    error::<rpcrdma::FabricError>();
    error::<rpcrdma::ConfigError>();
    error::<rpcrdma::AddressError>();
    error::<rpcrdma::service::NoResult>();
    error::<rpcrdma::service::ResultTooLong>();
    error::<rpcrdma_rpcbind::RpcbindError>();
    error::<rpcrdma_rpcbind::stream::StreamError>();
    error::<rpcrdma::proto::binding::BindingError>();
    error::<rpcrdma::proto::auth::AuthError>();
    error::<rpcrdma::auth::KeyError>();
    let () = <LocalClient as NotSend<_>>::OK;
    let () = <LocalServer as NotSend<_>>::OK;
    let () = <LocalServices as NotSend<_>>::OK;
};
