//! Connections that this side has started and that the peer has not answered yet.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Instant;

use rustix::event::epoll::EventFlags;

use super::{Answer, ConnectProgress, ConnectionManager, Handshake, Received, Sockets, Token};
use crate::{FabricAddress, FabricError, QpId};

/// A connection that this side has started.
#[derive(Debug)]
pub(crate) struct Dial<H: Handshake> {
    pub(super) qp: QpId,
    address: FabricAddress,
    /// `None` while the listener's queue is full. Nothing announces room in it.
    pub(super) socket: Option<OwnedFd>,
    /// Whether our request is sent.
    has_asked: bool,
    pub(super) state: H::Dial,
}

/// The end of a dial, and the peer's answer.
pub(super) type Dialed<H> = (Dial<H>, Result<Answer<<H as Handshake>::Answer>, FabricError>);

impl<H: Handshake> Dial<H> {
    /// Watches the new socket, and sends our request if it is connected.
    fn proceed(
        &mut self,
        id: u64,
        progress: ConnectProgress,
        sockets: &Sockets<H::Listener>,
        fabric: &mut H,
    ) -> Result<(), FabricError> {
        let (socket, flags) = match progress {
            ConnectProgress::QueueFull => return Ok(()),
            ConnectProgress::Connecting(socket) => (socket, EventFlags::OUT),
            ConnectProgress::Connected(socket) => (socket, EventFlags::IN | EventFlags::RDHUP),
        };
        sockets.sleeper.add(&socket, Token::Dial(id), flags)?;
        self.has_asked = flags != EventFlags::OUT;
        if self.has_asked {
            fabric.send_request(socket.as_fd(), &self.address, &mut self.state)?;
        }
        self.socket = Some(socket);
        Ok(())
    }
}

impl<H: Handshake> ConnectionManager<H> {
    /// Drives a new outgoing connection of a queue pair through its handshake.
    pub(crate) fn dial(
        &mut self,
        fabric: &mut H,
        qp: QpId,
        (address, progress): (&FabricAddress, ConnectProgress),
        state: H::Dial,
    ) -> Result<(), FabricError> {
        let mut dial = Dial { qp, address: address.clone(), socket: None, has_asked: false, state };
        dial.proceed(self.dials.next, progress, &self.sockets, fabric)?;
        self.dials.insert(Instant::now() + self.limits.handshake_timeout, dial);
        Ok(())
    }

    /// Handles news of a dial's socket: it is connected, or has an answer. Returns the dial if that ends it.
    pub(super) fn read_dial(&mut self, id: u64, fabric: &mut H) -> Option<Dialed<H>> {
        let dial = self.dials.get_mut(id)?;
        let socket = dial.socket.as_ref()?;
        let result = if dial.has_asked {
            match fabric.read_answer(socket.as_fd(), &mut dial.state) {
                Received::Pending => return None,
                Received::Message(answer) => Ok(answer),
                Received::Closed => Err(FabricError::closed("it closed the connection before it answered")),
                Received::Failed(error) => Err(error),
            }
        } else {
            match fabric.send_request(socket.as_fd(), &dial.address, &mut dial.state) {
                Ok(()) => {
                    self.sockets.sleeper.modify(socket, Token::Dial(id), EventFlags::IN);
                    dial.has_asked = true;
                    return None;
                }
                Err(error) => Err(error),
            }
        };
        let dial = self.dials.remove(id);
        self.end_dial(dial, result)
    }

    /// Ends the dial of a queue pair.
    pub(super) fn give_up(&mut self, qp: QpId) -> Option<Dialed<H>> {
        let dial = self.dials.remove_oldest(|dial| dial.qp == qp);
        self.end_dial(dial, Err(FabricError::closed("disconnected before it answered")))
    }

    /// Connects dials that wait for room in a listener's queue, and ends expired ones. Returns one that has ended.
    pub(super) fn tend_dials(&mut self, fabric: &mut H, now: Instant) -> Option<Dialed<H>> {
        if let Some(dial) = self.dials.pop_due(now) {
            return self.end_dial(Some(dial), Err(H::timed_out(self.limits.handshake_timeout)));
        }
        let mut full = None;
        let failed = self.dials.iter_mut().filter(|(_, dial)| dial.socket.is_none()).find_map(|(id, dial)| {
            // Without room for one there is none for the next.
            if full.as_ref() == Some(&dial.address) {
                return None;
            }
            let progress = fabric.open(&dial.address);
            let proceeds = progress.and_then(|progress| dial.proceed(id, progress, &self.sockets, fabric));
            full = dial.socket.is_none().then(|| dial.address.clone());
            Some((id, proceeds.err()?))
        });
        let (id, error) = failed?;
        let dial = self.dials.remove(id);
        self.end_dial(dial, Err(error))
    }

    fn end_dial(&self, dial: Option<Dial<H>>, result: Result<Answer<H::Answer>, FabricError>) -> Option<Dialed<H>> {
        let dial = dial?;
        if let Some(socket) = &dial.socket {
            self.sockets.sleeper.remove(socket);
        }
        Some((dial, result))
    }
}
