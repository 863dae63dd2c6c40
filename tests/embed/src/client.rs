//! Store client for tokio; it never blocks a runtime thread.

use std::error::Error;
use std::time::Duration;

use rpcrdma::client::{Client, ClientCall, ClientConfig, Endpoint};
use rpcrdma::{Address, Reply};

use crate::protocol::{DELETE, GET, LIST, MAX_INLINE, MAX_KEY, MAX_PAGE, MAX_VALUE, PROGRAM, PUT, VERSION};
use crate::xdr::{Reader, put_opaque};

/// Result of a call.
pub type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// Time-out of a call.
const PATIENCE: Duration = Duration::from_secs(30);

/// A thread for the connections of this process.
///
/// # Errors
/// As [`Endpoint::start`].
pub async fn endpoint(address: &Address) -> Result<Endpoint> {
    // Few, as each connection has its own buffers for values.
    let mut config = ClientConfig::new(PROGRAM, VERSION);
    config.shard.memory.bulk_buffers = vec![(16 << 10, 8), (MAX_VALUE, 4)];
    Ok(Endpoint::start_async(address, config).await?)
}

/// A connection to a store, for one task. A clone shares the connection with another task.
#[derive(Clone)]
pub struct Store(Client);

impl Store {
    /// Connects.
    ///
    /// # Errors
    /// As [`Endpoint::connect`].
    pub async fn connect(endpoint: &Endpoint, address: &Address) -> Result<Self> {
        Ok(Self(endpoint.connect_async(address).await?))
    }

    async fn call(&mut self, call: ClientCall) -> Result<Reply> {
        Ok(self.0.start(call.timeout(PATIENCE))?.await?)
    }

    /// Sets the value of a key.
    ///
    /// # Errors
    /// The call failed. The value may be set or not.
    pub async fn put(&mut self, key: &str, value: &[u8]) -> Result<()> {
        let mut args = Vec::new();
        put_opaque(&mut args, key.as_bytes());
        if value.len() <= MAX_INLINE {
            put_opaque(&mut args, value);
            return self.call(ClientCall::new(PUT).args(args)).await.map(drop);
        }
        // The value's length is in the arguments. The chunk's position is right behind it.
        args.extend((value.len() as u32).to_be_bytes());
        let mut chunk = self.0.alloc_async(value.len()).await?;
        chunk.copy_from_slice(value);
        let at = args.len();
        self.call(ClientCall::new(PUT).args(args).read_chunk(at, chunk)).await.map(drop)
    }

    /// Returns the value of a key.
    ///
    /// # Errors
    /// The call failed.
    pub async fn get(&mut self, key: &str) -> Result<Option<Vec<u8>>> {
        let mut args = Vec::new();
        put_opaque(&mut args, key.as_bytes());
        let reply = self.call(ClientCall::new(GET).args(args).write_chunk(MAX_VALUE as u32)).await?;
        let mut results = Reader(reply.results());
        match (results.number(), results.number(), reply.chunk(0)) {
            (Some(0), ..) => Ok(None),
            (Some(1), Some(0), _) => Ok(Some(Vec::new())),
            (Some(1), Some(len), Some(value)) if len as usize == value.len() => Ok(Some(value.to_vec())),
            _ => Err("the answer to a GET is none".into()),
        }
    }

    /// Deletes the value of a key; returns whether it existed.
    ///
    /// # Errors
    /// The call failed.
    pub async fn delete(&mut self, key: &str) -> Result<bool> {
        let mut args = Vec::new();
        put_opaque(&mut args, key.as_bytes());
        let reply = self.call(ClientCall::new(DELETE).args(args)).await?;
        Ok(Reader(reply.results()).number() == Some(1))
    }

    /// Keys with this prefix, in order.
    ///
    /// # Errors
    /// A call failed.
    pub async fn list(&mut self, prefix: &str) -> Result<Vec<String>> {
        let mut names = Vec::<String>::new();
        loop {
            let mut args = Vec::new();
            put_opaque(&mut args, prefix.as_bytes());
            put_opaque(&mut args, names.last().map_or(&[], |last| last.as_bytes()));
            let reply = self.call(ClientCall::new(LIST).args(args).expect_reply(MAX_PAGE + 8)).await?;
            let mut page = Reader(reply.results());
            for _ in 0..page.number().ok_or("an empty page")? {
                let name = page.opaque(MAX_KEY).ok_or("a page that is cut off")?;
                names.push(String::from_utf8(name.to_vec())?);
            }
            if page.number() != Some(1) {
                return Ok(names);
            }
        }
    }
}
