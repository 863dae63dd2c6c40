//! Clients, calls and their configuration.
//!
//! The caller polls a [`LocalClient`], on its own thread. A [`Client`] uses a shard on a separate thread, by blocking
//! calls or futures. An [`Endpoint`] is a shard's thread with any number of connections.
//!
//! | file | holds |
//! |---|---|
//! | `local` | `LocalClient`, which its caller polls |
//! | `threaded` | `Endpoint`, the thread of a shard, and `Client`, a connection through it |
//! | `call` | `ClientCall`, a call before its start |
//! | `header` | credentials, and the RPC header of a client's calls |

mod call;
mod header;
mod local;
mod threaded;

use std::sync::Arc;

use arrayvec::ArrayVec;

use crate::address::Address;
use crate::binding::Bindings;
use crate::config::{Config, ConfigError, ConnectConfig, MemoryConfig};
use crate::fabric::{Fabric, FabricError};
use crate::proto::binding::{BindingError, reduction_allowed};
use crate::proto::{CallError, Defect};
use crate::service::{MAX_CHUNKS, Services};
use crate::shard::{CallBuffers, CloseReason, CloseReasonKind, Shard};
use crate::start_error::StartError;

pub use crate::proto::CallId;
pub use crate::shard::{CompletedCall, ReturnedBuffers};
pub use call::ClientCall;
pub use header::Credential;
pub use local::{Connection, ConnectionTerms, LocalClient};
pub use threaded::{Client, Endpoint, Pending};

/// Program, credential and shard of a client.
///
/// ```
/// use rpcrdma::client::{ClientConfig, Credential};
///
/// let mut config = ClientConfig::new(0x2000_0001, 1);
/// config.credential = Credential::sys("host", 1000, 1000, &[])?;
/// config.connect.reconnect_attempts = 10;
/// config.shard.limits.max_calls = 64;
/// # Ok::<(), rpcrdma::xdr::EncodeError>(())
/// ```
#[derive(Clone, Debug)]
pub struct ClientConfig {
    /// Configuration of the client's shard.
    pub shard: Config,
    /// Program number.
    pub program: u32,
    /// Program version.
    pub version: u32,
    /// Credential of all calls. Default: `AUTH_NONE`.
    pub credential: Credential,
    /// Services for calls from the server (reverse direction, RFC 8167). Default: none.
    ///
    /// They run on the client's shard, even procedures for workers.
    pub services: Option<Arc<Services>>,
    /// Upper-layer bindings; calls that violate them are not sent. `None`: only the server checks.
    ///
    /// Calls with chunks are never sent with RPCSEC_GSS integrity or privacy, even without bindings.
    pub bindings: Option<Arc<Bindings>>,
    /// Rules for connecting and reconnecting.
    pub connect: ConnectConfig,
}

impl ClientConfig {
    /// Default configuration for calls of this program and version.
    pub fn new(program: u32, version: u32) -> Self {
        let memory =
            MemoryConfig { receives: 1024, small_buffers: 1024, message_buffers: 256, ..MemoryConfig::default() };
        Self {
            shard: Config { memory, ..Config::default() },
            program,
            version,
            credential: Credential::default(),
            services: None,
            bindings: None,
            connect: ConnectConfig::default(),
        }
    }

    /// Checks the settings that a shard by itself cannot check.
    fn check(&self) -> Result<(), ConfigError> {
        self.connect.validate()?;
        let expected = "at least 1, because the client has services, and version 1 never grants 0 (RFC 8166 §3.3.1)";
        match (&self.services, self.shard.debug.reverse_credits) {
            (Some(_), 0) => Err(ConfigError::new("debug.reverse_credits", 0, expected)),
            _ => Ok(()),
        }
    }

    /// Opens a shard on this device; allocates its memory.
    fn open_shard<F: Fabric>(&self, fabric: F) -> Result<Shard<F>, StartError> {
        let shard = Shard::open(fabric, self.shard.clone(), self.services.clone())?;
        Ok(shard.connecting(self.connect.clone()))
    }

    /// Whether calls with chunks are checked against a binding.
    fn must_check_chunks(&self) -> bool {
        self.bindings.is_some() || !self.reduction_allowed()
    }

    fn reduction_allowed(&self) -> bool {
        let credential = self.credential.as_opaque_auth();
        reduction_allowed(credential.flavor, credential.body)
    }

    /// Checks a call with chunks against the binding, and sets the maximum bytes of its inline results.
    fn check_chunks(&self, procedure: u32, inline_len: usize, memory: &mut CallBuffers) -> Result<(), CallError> {
        if memory.too_many {
            return Err(Defect::TooManyChunks { limit: MAX_CHUNKS }.into());
        }
        let reduction = self.reduction_allowed();
        let reads: ArrayVec<usize, MAX_CHUNKS> = memory.send.iter().map(|(_, buf)| buf.len()).collect();
        let writes = memory.result_lens();
        let has_chunks = !(reads.is_empty() && writes.is_empty());
        match self.bindings.as_ref().map(|all| all.get(self.program, self.version, procedure)) {
            Some(Some(binding)) => {
                binding.check_call(inline_len, &reads, &writes, reduction)?;
                // The limit holds if each result uses the Write chunk offered for it.
                memory.max_inline_results = (!writes.is_empty()).then(|| binding.reply_len(writes.len()));
                Ok(())
            }
            // Bindings name all items that may be reduced, so a procedure without a binding has no such items.
            bindings if has_chunks && (bindings.is_some() || !reduction) => Err(BindingError::ReductionOff.into()),
            _ => Ok(()),
        }
    }
}

/// A connection was not established.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// The client's shard did not start.
    #[error(transparent)]
    Start(#[from] StartError),
    /// The fabric did not begin to connect.
    #[error(transparent)]
    Fabric(#[from] FabricError),
    /// The server did not accept the connection.
    #[error("cannot connect to {address}: {reason}")]
    Refused {
        /// Address of the server.
        address: String,
        /// Reason of the close.
        reason: CloseReason,
    },
    /// A host key is missing or wrong, at either end.
    ///
    /// No call was executed, and a retry fails in the same way.
    #[error("{address}: {reason}; no call was executed, and a retry fails in the same way")]
    NotAuthenticated {
        /// Address of the server.
        address: String,
        /// The missing or wrong key, and the end that lacks it.
        reason: CloseReason,
    },
    /// The server did not answer in time.
    #[error("{address} did not answer within {timeout:?} (connect.timeout)")]
    TimedOut {
        /// Address of the server.
        address: String,
        /// The expired time-out.
        timeout: std::time::Duration,
    },
}

impl ConnectError {
    /// Error of a connection that closed before it was established.
    fn closed(address: &Address, reason: CloseReason) -> Self {
        let address = address.to_string();
        match reason.kind() {
            CloseReasonKind::NotAuthenticated => Self::NotAuthenticated { address, reason },
            _ => Self::Refused { address, reason },
        }
    }
}
