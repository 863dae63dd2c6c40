//! A client of the store for tokio, which never blocks a thread of the runtime.

use std::error::Error;
use std::time::Duration;

use rpcrdma::Address;
use rpcrdma::client::{Client, ClientConfig, Endpoint};
use rpcrdma::typed::{CallOptions, Response, Signature};
use rpcrdma::xdr::Bulk;

use crate::protocol::kv_v1::{Delete, Get, List, PROGRAM, Put, VERSION};
use crate::protocol::{Entry, KvKey, KvValue, MAX_INLINE, MAX_VALUE, Query};

/// Result of a call.
pub type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// Time-out of a call.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Starts an endpoint, whose thread drives the connections of this process.
///
/// # Errors
/// Those of [`Endpoint::start`].
pub async fn endpoint(address: &Address) -> Result<Endpoint> {
    // Few buffers for values suffice, because each connection has its own.
    let mut config = ClientConfig::new(PROGRAM, VERSION);
    config.shard.memory.bulk_buffers = vec![(16 << 10, 8), (MAX_VALUE as usize, 4)];
    Ok(Endpoint::start_async(address, config).await?)
}

/// A connection to a store, for one task. A clone shares the connection with another task.
#[derive(Clone)]
pub struct Store(Client);

impl Store {
    /// Connects to a store.
    ///
    /// # Errors
    /// Those of [`Endpoint::connect`].
    pub async fn connect(endpoint: &Endpoint, address: &Address) -> Result<Self> {
        Ok(Self(endpoint.connect_async(address).await?))
    }

    async fn call<P: Signature>(&mut self, options: CallOptions<P>, args: &P::Args<'_>) -> Result<Response<P>> {
        let call = options.timeout(TIMEOUT).into_call(&mut self.0, args)?;
        Ok(Response::from_reply(self.0.start(call)?.await?))
    }

    /// Sets the value of a key.
    ///
    /// # Errors
    /// The call failed. The value may be set or not.
    pub async fn put(&mut self, key: &str, value: &[u8]) -> Result<()> {
        let (mut options, mut bulk) = (CallOptions::<Put>::new(), Bulk::from(value));
        if value.len() > MAX_INLINE {
            let mut chunk = self.0.alloc_async(value.len()).await?;
            chunk.copy_from_slice(value);
            (options, bulk) = (options.lend(chunk), Bulk::placed(value.len()));
        }
        self.call(options, &Entry { key: KvKey(key.as_bytes()), value: KvValue(bulk) }).await?;
        Ok(())
    }

    /// Returns the value of a key.
    ///
    /// # Errors
    /// The call failed.
    pub async fn get(&mut self, key: &str) -> Result<Option<Vec<u8>>> {
        let response = self.call(CallOptions::<Get>::new().write_chunk(MAX_VALUE), &KvKey(key.as_bytes())).await?;
        Ok(response.results()?.map(|value| value.0.bytes().to_vec()))
    }

    /// Deletes the value of a key. Returns true if the key existed.
    ///
    /// # Errors
    /// The call failed.
    pub async fn delete(&mut self, key: &str) -> Result<bool> {
        Ok(self.call(CallOptions::<Delete>::new(), &KvKey(key.as_bytes())).await?.results()?)
    }

    /// Returns the keys with this prefix, in order.
    ///
    /// # Errors
    /// A call failed.
    pub async fn list(&mut self, prefix: &str) -> Result<Vec<String>> {
        let mut names = Vec::<String>::new();
        loop {
            let after = KvKey(names.last().map_or(&[], |last| last.as_bytes()));
            let query = Query { prefix: KvKey(prefix.as_bytes()), after };
            let response = self.call(CallOptions::<List>::new(), &query).await?;
            let page = response.results()?;
            for name in page.names {
                names.push(String::from_utf8(name.0.to_vec())?);
            }
            if !page.more {
                return Ok(names);
            }
        }
    }
}
