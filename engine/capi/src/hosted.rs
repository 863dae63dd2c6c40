//! A server with threads of its own, whose handle outlives it: its handlers use the handle until their end.
#![forbid(unsafe_code)]

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rpcrdma::Server;
use rpcrdma::server::CallBacks;
use rustix::io::Errno;

use crate::failure::Failure;

/// A server, until it ends.
pub(crate) struct Hosted {
    server: Mutex<Option<Arc<Server>>>,
    /// Its connections, also while it ends.
    pub(crate) call_backs: CallBacks,
}

impl Hosted {
    pub(crate) fn new(server: Server) -> Self {
        let call_backs = server.call_backs();
        Self { server: Mutex::new(Some(Arc::new(server))), call_backs }
    }

    /// The server, for the function that runs.
    ///
    /// # Errors
    /// EBADF: it ends.
    pub(crate) fn get(&self) -> Result<Arc<Server>, Failure> {
        self.server.lock().unwrap_or_else(PoisonError::into_inner).clone().ok_or_else(ends)
    }

    /// Takes the server, to end it. Waits for functions that use it.
    ///
    /// # Errors
    /// EBADF: it ends already.
    pub(crate) fn take(&self) -> Result<Server, Failure> {
        let mut server = self.server.lock().unwrap_or_else(PoisonError::into_inner).take().ok_or_else(ends)?;
        loop {
            match Arc::try_unwrap(server) {
                Ok(server) => return Ok(server),
                Err(used) => server = used,
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

#[cold]
fn ends() -> Failure {
    Failure::new(Errno::BADF, "rpcrdma_server: it ends already")
}
