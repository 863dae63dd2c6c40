//! Thread safety of the public types, checked at compile time.

use rpcrdma::client::{ClientCall, ClientConfig, CompletedCall, Pending};
use rpcrdma::server::{LocalServer, ServerConfig};
use rpcrdma::service::duplicate_requests::DuplicateRequestCache;
use rpcrdma::service::{DeferredCall, LocalServices};
use rpcrdma::{Arena, Buf, CallResult, Client, Endpoint, Frozen, LocalClient, Procedure, Server, Services};

const fn assert_send<T: Send>() {}
/// Checks the bounds that `anyhow` and `Box<dyn Error>` have for errors.
const fn assert_error<T: std::error::Error + Send + Sync + 'static>() {}
const fn assert_send_and_sync<T: Send + Sync>() {}

/// A trait with one implementation for types that are not `Send`, and with two for `Send` types, so that its use is
/// ambiguous for them.
trait NotSend<A> {
    const OK: () = ();
}
impl<T> NotSend<()> for T {}
impl<T: Send> NotSend<u8> for T {}

const _: () = {
    assert_send::<Client>();
    assert_send::<Pending>();
    assert_send::<ClientCall>();
    assert_send::<CallResult>();
    assert_send::<CompletedCall>();
    assert_send::<DeferredCall>();
    assert_send::<Buf>();
    assert_send_and_sync::<Frozen>();
    assert_send_and_sync::<Arena>();
    assert_send_and_sync::<Endpoint>();
    assert_send_and_sync::<Server>();
    assert_send_and_sync::<Services>();
    assert_send_and_sync::<Procedure>();
    assert_send_and_sync::<ClientConfig>();
    assert_send_and_sync::<ServerConfig>();
    assert_send_and_sync::<DuplicateRequestCache>();
    assert_error::<rpcrdma::CallError>();
    assert_error::<rpcrdma::InvalidCall>();
    assert_error::<rpcrdma::Refusal>();
    assert_error::<rpcrdma::client::ConnectError>();
    assert_error::<rpcrdma::StartError>();
    assert_error::<rpcrdma::server::Undrained>();
    assert_error::<rpcrdma::CloseReason>();
    assert_error::<rpcrdma::ResizeError>();
    assert_error::<rpcrdma::MemError>();
    assert_error::<rpcrdma::FabricError>();
    assert_error::<rpcrdma::ConfigError>();
    assert_error::<rpcrdma::AddressError>();
    assert_error::<rpcrdma::service::NoResult>();
    assert_error::<rpcrdma::service::ResultTooLong>();
    assert_error::<rpcrdma_rpcbind::RpcbindError>();
    assert_error::<rpcrdma_rpcbind::stream::StreamError>();
    assert_error::<rpcrdma::proto::binding::BindingError>();
    assert_error::<rpcrdma::proto::auth::AuthError>();
    assert_error::<rpcrdma::auth::KeyError>();
    let () = <LocalClient as NotSend<_>>::OK;
    let () = <LocalServer as NotSend<_>>::OK;
    let () = <LocalServices as NotSend<_>>::OK;
};
