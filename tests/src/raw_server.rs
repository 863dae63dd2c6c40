//! Servers that follow a script.

use std::sync::mpsc;
use std::thread::JoinHandle;

use rpcrdma::client::LocalClient;
use rpcrdma::{Address, CreditMode};

use crate::raw::{RawListener, RawPeer};
use crate::world::{OfClient, World};

/// Place of a raw server: an address, or the name of a world of its own.
pub trait Place {
    /// The address, with its world if that is new.
    fn address(self) -> (Address, Option<World>);
}

impl Place for &Address {
    fn address(self) -> (Address, Option<World>) {
        (self.clone(), None)
    }
}

impl Place for &'static str {
    fn address(self) -> (Address, Option<World>) {
        let world = World::new(self);
        (world.address(), Some(world))
    }
}

/// A thread that accepts connections and follows a script. The drop waits for the script's end, so drop clients first.
pub struct RawServer<T: Send + 'static = ()> {
    thread: Option<JoinHandle<T>>,
    address: Address,
    _world: Option<World>,
}

impl<T: Send + 'static> RawServer<T> {
    /// A server that has exchanged properties with its only client.
    pub fn start(place: impl Place, script: impl FnOnce(&mut RawPeer) -> T + Send + 'static) -> Self {
        Self::listen(place, |listener| script(&mut listener.accept()))
    }

    /// A server of one client that has sent nothing yet.
    pub fn start_silently(place: impl Place, script: impl FnOnce(&mut RawPeer) -> T + Send + 'static) -> Self {
        Self::listen(place, |listener| script(&mut listener.accept_silently()))
    }

    /// A server of one client with this credit mode. In version 2 they have exchanged properties.
    pub fn start_in(
        scheme: CreditMode,
        place: impl Place,
        script: impl FnOnce(&mut RawPeer) -> T + Send + 'static,
    ) -> Self {
        Self::start_silently(place, move |peer| {
            peer.welcome_in(scheme);
            script(peer)
        })
    }

    /// A server that accepts connections itself.
    pub fn listen(place: impl Place, script: impl FnOnce(RawListener) -> T + Send + 'static) -> Self {
        let (address, world) = place.address();
        let (ready, is_ready) = mpsc::channel();
        let at = address.clone();
        let thread = std::thread::spawn(move || {
            let listener = RawListener::bind(&at);
            ready.send(()).expect("the test waits");
            script(listener)
        });
        is_ready.recv().expect("it listens");
        Self { thread: Some(thread), address, _world: world }
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
    pub fn join(&mut self) -> T {
        self.thread.take().expect("it is joined once").join().expect("the script ran")
    }
}

impl<T: Send + 'static> Drop for RawServer<T> {
    fn drop(&mut self) {
        // A failed test leaves its script alone, which may wait for the test.
        if !std::thread::panicking()
            && let Some(thread) = self.thread.take()
        {
            thread.join().expect("the script ran");
        }
    }
}
