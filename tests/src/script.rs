//! Raw servers that follow a table of steps.

use rpcrdma::CreditMode;
use rpcrdma::wire::{ErrorBody, HeaderType, Revision, Version};

use crate::raw::{RawListener, RawPeer, be};
use crate::raw_server::{RawServer, ServerPlace};

/// A step of a scripted server. Steps other than accepts apply to its latest connection.
#[derive(Clone, Copy, Debug)]
pub enum Step {
    /// Accepts a connection, and waits for its first message, a CONNPROP of version 2.
    Hello,
    /// Accepts a connection without taking a message.
    Accept,
    /// Accepts a connection in this mode, and answers one call.
    Serve(CreditMode),
    /// Answers the first message with ERR_VERS: version word, lowest and highest supported version.
    ErrVers([u32; 3]),
    /// Answers the first message with this error.
    Refuse(ErrorBody),
    /// Sends a pure grant.
    Grant,
    /// Answers each call of version 1 until the client disconnects.
    AnswerV1,
    /// Answers each call of version 2 until the client disconnects.
    AnswerV2,
    /// Waits until the client ends the connection.
    UntilOver,
    /// Disconnects.
    Disconnect,
    /// Drops the connection without a disconnect.
    Vanish,
}

/// State of a scripted server.
struct Scripted {
    listener: RawListener,
    /// The latest connection.
    peer: Option<RawPeer>,
    /// XID of the latest CONNPROP.
    xid: u32,
}

impl Scripted {
    fn accept(&mut self) -> &mut RawPeer {
        self.peer.insert(self.listener.accept_next())
    }

    fn peer(&mut self) -> &mut RawPeer {
        self.peer.as_mut().expect("a connection")
    }

    fn run(&mut self, step: Step) {
        let xid = self.xid;
        match step {
            Step::Accept => _ = self.accept(),
            Step::Hello => {
                let connprop = self.accept().receive().expect("a first message");
                assert_eq!((connprop.version(), connprop.htype()), (Version::V2, HeaderType::Connprop));
                self.xid = connprop.xid();
            }
            Step::Serve(mode) => {
                let peer = self.accept();
                peer.answer_properties_in(mode);
                let xid = peer.next_call().xid();
                peer.reply(xid, b"fine");
            }
            // All versions share the layout of ERR_VERS, which has no flags.
            Step::ErrVers([vers, low, high]) => self.peer().send(&be(&[xid, vers, 0x0020_0020, 4, 1, low, high])),
            Step::Refuse(error) => self.peer().refuse(xid, error),
            Step::Grant => self.peer().grant(),
            Step::AnswerV1 => {
                let peer = self.peer();
                peer.version = Version::V1;
                while let Some(call) = peer.next_message() {
                    assert_eq!((call.version(), call.htype()), (Version::V1, HeaderType::Msg));
                    peer.reply(call.xid(), b"fine");
                }
            }
            Step::AnswerV2 => {
                let peer = self.peer();
                while let Some(message) = peer.receive() {
                    match message.htype() {
                        HeaderType::Connprop => {
                            peer.send_properties();
                            peer.apply_properties(&message);
                        }
                        HeaderType::Msg => peer.reply(message.xid(), b"fine"),
                        _ => {}
                    }
                }
            }
            Step::UntilOver => drop(self.peer().wait_until_over()),
            Step::Disconnect => self.peer.take().expect("a connection").disconnect(),
            Step::Vanish => self.peer.take().expect("a connection").vanish(),
        }
    }
}

impl RawServer {
    /// Starts a server of this revision that takes these steps. A failure names the step.
    pub fn script(place: impl ServerPlace, revision: Revision, steps: &[Step]) -> Self {
        let steps = steps.to_vec();
        Self::listen(place, move |mut listener| {
            listener.revision = revision;
            let mut server = Scripted { listener, peer: None, xid: 0 };
            crate::rows::for_each(steps, |step| server.run(step));
        })
    }
}
