//! Servers that follow a script.

use std::sync::mpsc::{self, Receiver};
use std::thread::JoinHandle;

use rpcrdma::client::LocalClient;
use rpcrdma::{Address, CreditMode};

use crate::raw::{Message, RawListener, RawPeer};
use crate::world::{IntoClientConfig, World};

/// Where a raw server listens: at an address, or in a new world with this name.
pub trait ServerPlace {
    /// The address, and its world if that is new.
    fn address(self) -> (Address, Option<World>);
}

impl ServerPlace for &Address {
    fn address(self) -> (Address, Option<World>) {
        (self.clone(), None)
    }
}

impl ServerPlace for &'static str {
    fn address(self) -> (Address, Option<World>) {
        let world = World::new(self);
        (world.address(), Some(world))
    }
}

/// A server on a thread that follows a script.
///
/// After the script of a single connection, the thread [answers all calls](RawPeer::answer_all_calls). The drop waits
/// for the end of the thread, so drop clients first.
pub struct RawServer<T: Send + 'static = ()> {
    thread: Option<JoinHandle<()>>,
    result: Receiver<T>,
    address: Address,
    _world: Option<World>,
}

impl<T: Send + 'static> RawServer<T> {
    /// Starts a server of one client. The script begins after the exchange of properties.
    pub fn start(place: impl ServerPlace, script: impl FnOnce(&mut RawPeer) -> T + Send + 'static) -> Self {
        Self::run(place, move |listener, report| {
            let mut peer = listener.accept();
            report(script(&mut peer));
            peer.answer_all_calls();
        })
    }

    /// Starts a server of one client. The script begins before the first message.
    pub fn start_silently(place: impl ServerPlace, script: impl FnOnce(&mut RawPeer) -> T + Send + 'static) -> Self {
        Self::run(place, move |listener, report| {
            let mut peer = listener.accept_silently();
            report(script(&mut peer));
            peer.answer_all_calls();
        })
    }

    /// Starts a server of one client with this credit mode. The script begins after the negotiation.
    pub fn start_in(
        mode: CreditMode,
        place: impl ServerPlace,
        script: impl FnOnce(&mut RawPeer) -> T + Send + 'static,
    ) -> Self {
        Self::start_silently(place, move |peer| {
            peer.answer_properties_in(mode);
            script(peer)
        })
    }

    /// Starts a server whose script accepts the connections.
    pub fn listen(place: impl ServerPlace, script: impl FnOnce(RawListener) -> T + Send + 'static) -> Self {
        Self::run(place, move |listener, report| report(script(listener)))
    }

    fn run(place: impl ServerPlace, script: impl FnOnce(RawListener, &dyn Fn(T)) + Send + 'static) -> Self {
        let (address, world) = place.address();
        let (sender, result) = mpsc::channel();
        let (ready_sender, ready) = mpsc::channel();
        let thread_address = address.clone();
        let thread = std::thread::spawn(move || {
            let listener = RawListener::bind(&thread_address);
            ready_sender.send(()).expect("a test that waits");
            // The test may have dropped the receiver.
            script(listener, &|result| drop(sender.send(result)));
        });
        ready.recv().expect("a listening server");
        Self { thread: Some(thread), result, address, _world: world }
    }

    /// Address of the server.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// Connects a client on this thread.
    pub fn client(&self, config: impl IntoClientConfig) -> LocalClient {
        LocalClient::connect(&self.address, config.into_client_config()).expect("a connection")
    }

    /// Waits for the end of the script. Returns its result.
    #[track_caller]
    pub fn join(&mut self) -> T {
        self.result.recv().expect("the result of the script")
    }
}

impl RawServer {
    /// Starts a server that passes each message to the test.
    ///
    /// `begin` accepts the connection. The server replies to calls with empty results.
    pub fn recording(
        place: impl ServerPlace,
        begin: impl FnOnce(RawListener) -> RawPeer + Send + 'static,
    ) -> (Self, Receiver<Message>) {
        let (sender, messages) = mpsc::channel();
        let server = Self::listen(place, move |listener| {
            let mut peer = begin(listener);
            while let Some(message) = peer.next_message() {
                let (xid, more) = (message.xid(), message.more());
                sender.send(message).expect("a test that receives");
                if !more {
                    peer.reply(xid, b"");
                }
            }
        });
        (server, messages)
    }
}

impl<T: Send + 'static> Drop for RawServer<T> {
    fn drop(&mut self) {
        // After a failure, the script may wait for the test forever, so the drop does not wait for the thread.
        if !std::thread::panicking()
            && let Some(thread) = self.thread.take()
        {
            thread.join().expect("a script without a panic");
        }
    }
}
