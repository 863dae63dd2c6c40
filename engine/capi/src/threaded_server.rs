//! A handle of a server with its own threads.
//!
//! The handle stays valid while the server ends, so running handlers may use it.
#![forbid(unsafe_code)]

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rpcrdma::Server;
use rpcrdma::server::CallBacks;
use rustix::io::Errno;

use crate::failure::ApiFailure;

/// A server with threads of its own, which is taken out of here when it ends.
pub(crate) struct ThreadedServer {
    server: Mutex<Option<Arc<Server>>>,
    /// Makes clients on the server's connections, also while the server ends.
    pub(crate) call_backs: CallBacks,
}

impl ThreadedServer {
    pub(crate) fn new(server: Server) -> Self {
        let call_backs = server.call_backs();
        Self { server: Mutex::new(Some(Arc::new(server))), call_backs }
    }

    /// Returns the server for the duration of one API call.
    ///
    /// # Errors
    /// EBADF: the server is ending.
    pub(crate) fn get(&self) -> Result<Arc<Server>, ApiFailure> {
        self.server.lock().unwrap_or_else(PoisonError::into_inner).clone().ok_or_else(already_ending)
    }

    /// Takes the server, to end it. Waits for functions that use it.
    ///
    /// # Errors
    /// EBADF: the server is ending already.
    pub(crate) fn take(&self) -> Result<Server, ApiFailure> {
        let mut server =
            self.server.lock().unwrap_or_else(PoisonError::into_inner).take().ok_or_else(already_ending)?;
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
fn already_ending() -> ApiFailure {
    ApiFailure::new(Errno::BADF, "rpcrdma_server: the server is ending already")
}
