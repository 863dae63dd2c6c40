//! Servers that follow a script.

use std::sync::mpsc::{self, Receiver};
use std::thread::JoinHandle;

use rpcrdma::client::LocalClient;
use rpcrdma::{Address, CreditMode};

use crate::raw::{Message, RawListener, RawPeer};
use crate::world::{OfClient, World};

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

/// A thread that accepts connections and follows a script. After the script of a single connection it
/// [answers all calls](RawPeer::answer_all_calls). The drop waits for the end of the thread, so drop clients first.
pub struct RawServer<T: Send + 'static = ()> {
    thread: Option<JoinHandle<()>>,
    result: Receiver<T>,
    address: Address,
    _world: Option<World>,
}

impl<T: Send + 'static> RawServer<T> {
    /// A server that has exchanged properties with its only client.
    pub fn start(place: impl ServerPlace, script: impl FnOnce(&mut RawPeer) -> T + Send + 'static) -> Self {
        Self::run(place, move |listener, report| {
            let mut peer = listener.accept();
            report(script(&mut peer));
            peer.answer_all_calls();
        })
    }

    /// A server of one client that has sent nothing yet.
    pub fn start_silently(place: impl ServerPlace, script: impl FnOnce(&mut RawPeer) -> T + Send + 'static) -> Self {
        Self::run(place, move |listener, report| {
            let mut peer = listener.accept_silently();
            report(script(&mut peer));
            peer.answer_all_calls();
        })
    }

    /// A server of one client with this credit mode. In version 2 they have exchanged properties.
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

    /// A server that accepts connections itself.
    pub fn listen(place: impl ServerPlace, script: impl FnOnce(RawListener) -> T + Send + 'static) -> Self {
        Self::run(place, move |listener, report| report(script(listener)))
    }

    fn run(place: impl ServerPlace, script: impl FnOnce(RawListener, &dyn Fn(T)) + Send + 'static) -> Self {
        let (address, world) = place.address();
        let (sender, result) = mpsc::channel();
        let (ready, is_ready) = mpsc::channel();
        let at = address.clone();
        let thread = std::thread::spawn(move || {
            let listener = RawListener::bind(&at);
            ready.send(()).expect("the test waits");
            // The test may have dropped the receiver.
            script(listener, &|result| drop(sender.send(result)));
        });
        is_ready.recv().expect("the server listens");
        Self { thread: Some(thread), result, address, _world: world }
    }

    /// Address of the server.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// Connects a client on this thread.
    pub fn client(&self, config: impl OfClient) -> LocalClient {
        LocalClient::connect(&self.address, config.of_client()).expect("a connection")
    }

    /// Waits for the end of the script.
    #[track_caller]
    pub fn join(&mut self) -> T {
        self.result.recv().expect("the script ran")
    }
}

impl RawServer {
    /// A server that passes each message of its client to the test, and answers whole calls without results. `begin`
    /// accepts the connection.
    pub fn recording(
        place: impl ServerPlace,
        begin: impl FnOnce(RawListener) -> RawPeer + Send + 'static,
    ) -> (Self, Receiver<Message>) {
        let (sender, messages) = mpsc::channel();
        let server = Self::listen(place, move |listener| {
            let mut peer = begin(listener);
            while let Some(message) = peer.next_message() {
                let (xid, more) = (message.xid(), message.more());
                sender.send(message).expect("the test listens");
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
        // The script of a failed test may wait for the test, so its thread is not joined.
        if !std::thread::panicking()
            && let Some(thread) = self.thread.take()
        {
            thread.join().expect("the script ran");
        }
    }
}
