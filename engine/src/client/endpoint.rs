//! A client's shard on its own thread, and the connections made through it.

use std::fmt;
use std::future::Future;
use std::sync::Arc;

use super::header::Template;
use super::threaded::Client;
use super::{ClientConfig, ConnectError};
use crate::address::Address;
use crate::cross_thread::block_on::block_on;
use crate::cross_thread::slot::oneshot;
use crate::shard::{CloseCause, CloseReason, Command, ConnectRequest, LocalClose, ShardHandle, check, spawn};
use crate::start_error::StartError;
use crate::stats::ShardStats;

/// A shard's thread, through which any number of [`Client`]s connect.
///
/// Cheap to clone; all clones are the same endpoint.
///
/// All connections share its device, its buffers and its [`Config`](crate::Config): `memory.receives` bounds their
/// number (at least three each), while `limits.max_calls` applies to each [`Client`]. Memory for chunks is each
/// connection's own.
///
/// The thread ends with the last clone and the last client. That drop blocks for some milliseconds: within a runtime,
/// drop where blocking is allowed.
///
/// ```
/// use rpcrdma::client::{ClientCall, ClientConfig, Endpoint};
/// # use rpcrdma::{Procedure, Server, Services, server::ServerConfig};
/// # let address = format!("soft:endpoint-{}", std::process::id()).parse()?;
/// # let mut services = Services::new();
/// # services.add(0x2000_0001, 1, 0, Procedure::new(|_| Ok(())));
/// # let server = Server::start(&address, services, &ServerConfig::default())?;
/// # let runtime = async {
/// let endpoint = Endpoint::start_async(&address, ClientConfig::new(0x2000_0001, 1)).await?;
/// let mut one = endpoint.connect_async(&address).await?;
/// let mut other = endpoint.connect_async(&address).await?;
/// let (first, second) = (one.start(ClientCall::new(0))?, other.start(ClientCall::new(0))?);
/// (first.await?, second.await?);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// # };
/// # futures_executor(runtime)?;
/// # fn futures_executor<T>(future: impl Future<Output = T>) -> T {
/// #     let mut future = std::pin::pin!(future);
/// #     let mut context = std::task::Context::from_waker(std::task::Waker::noop());
/// #     loop {
/// #         if let std::task::Poll::Ready(value) = future.as_mut().poll(&mut context) {
/// #             return value;
/// #         }
/// #         std::thread::yield_now();
/// #     }
/// # }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "dropped at once, it ends its thread"]
#[derive(Clone)]
pub struct Endpoint {
    shared: Arc<EndpointState>,
}

/// State that all clients of a shard share.
pub(super) struct EndpointState {
    pub(super) shard: ShardHandle,
    /// Scheme of its device's addresses.
    scheme: &'static str,
    pub(super) template: Template,
    pub(super) config: ClientConfig,
}

impl EndpointState {
    pub(super) fn new(shard: ShardHandle, scheme: &'static str, config: ClientConfig) -> Arc<Self> {
        let template = Template::new(config.program, config.version, &config.credential);
        Arc::new(Self { shard, scheme, template, config })
    }
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Endpoint").field("scheme", &self.shared.scheme).finish_non_exhaustive()
    }
}

impl Endpoint {
    /// Starts the thread; blocks until device and memory are ready.
    ///
    /// Takes milliseconds, and a second for gigabytes of memory. The endpoint connects to addresses of this one's
    /// fabric.
    ///
    /// # Errors
    /// [`ConnectError::Start`].
    pub fn start(address: &Address, config: ClientConfig) -> Result<Self, ConnectError> {
        block_on(Self::start_async(address, config))
    }

    /// Starts the thread, as a future of any runtime; see [`start`](Self::start).
    ///
    /// The new thread opens the device and makes the memory. Dropped before it is ready, the future leaves nothing
    /// behind.
    ///
    /// # Errors
    /// [`ConnectError::Start`].
    pub fn start_async(
        address: &Address,
        config: ClientConfig,
    ) -> impl Future<Output = Result<Self, ConnectError>> + Send + use<> {
        let address = address.clone();
        async move {
            config.check().map_err(StartError::from)?;
            check(&config.shard, config.services.as_deref(), 1)?;
            let (scheme, own) = (address.scheme(), config.clone());
            let make = move || own.open_shard(address.open(&own.shard)?);
            let shard = spawn("rpcrdma-client".into(), config.shard.poll.core, make).await?;
            Ok(Self { shared: EndpointState::new(shard, scheme, config) })
        }
    }

    /// Connects; blocks for at most [`connect.timeout`](crate::config::ConnectConfig::timeout).
    ///
    /// # Errors
    /// [`ConnectError::Fabric`] for an address of another fabric, [`ConnectError::Refused`],
    /// [`ConnectError::TimedOut`].
    ///
    /// # Panics
    /// On the endpoint's own thread, as in a handler. Await [`connect_async`](Self::connect_async) there.
    pub fn connect(&self, address: &Address) -> Result<Client, ConnectError> {
        self.shared.shard.thread().must_not_wait();
        block_on(self.connect_async(address))
    }

    /// Connects, as a future of any runtime. Dropped early, it leaves nothing behind.
    ///
    /// # Errors
    /// Those of [`connect`](Self::connect).
    pub fn connect_async(
        &self,
        address: &Address,
    ) -> impl Future<Output = Result<Client, ConnectError>> + Send + use<> {
        let (shared, address) = (Arc::clone(&self.shared), address.clone());
        async move {
            let timeout = shared.config.connect.timeout;
            let to = address.of_scheme(shared.scheme)?.clone();
            let (opened, completer) = oneshot();
            let closed = Arc::default();
            shared.shard.send(Command::Connect(ConnectRequest {
                address: to,
                timeout,
                closed: Arc::clone(&closed),
                completer,
            }));
            match opened.await.unwrap_or_else(|_| Err(LocalClose::Stopped.into())) {
                Ok(conn) => Ok(Client::connected(shared, conn, closed)),
                Err(CloseReason(CloseCause::Local(LocalClose::ConnectTimeout))) => {
                    Err(ConnectError::TimedOut { address: address.to_string(), timeout })
                }
                Err(reason) => Err(ConnectError::closed(&address, reason)),
            }
        }
    }

    /// Statistics of the shard; blocks for its answer; `None` once stopped.
    #[must_use]
    pub fn stats(&self) -> Option<ShardStats> {
        self.shared.shard.ask_now(|answer| Command::Stats(0, answer)).ok()
    }
}
