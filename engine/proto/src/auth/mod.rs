//! Host authentication (version 2 §5.2.6, §10.4).
//!
//! The base text defines the carrier, the property
//! [`PropertyId::HostAuth`](crate::wire::properties::PropertyId::HostAuth) in CONNPROP messages. It leaves the content
//! open. A [`Mechanism`] defines the content; [`PreSharedKey`] is one. A [`HostAuth`] carries one connection through
//! the exchange:
//!
//! | client | CONNPROP | server |
//! | --- | --- | --- |
//! | [`open`](HostAuth::open) | message 1 → | [`receive`](HostAuth::receive) |
//! | [`receive`](HostAuth::receive) | ← message 2 | |
//! | | message 3 … → | [`receive`](HostAuth::receive) |
//!
//! The ends take turns, one message per CONNPROP. The client starts, in its first CONNPROP. A CONNPROP without a
//! message means that the peer does not authenticate or stops. Version 1, which has no properties, means the same. The
//! [`AuthPolicy`] then decides about the connection. A server that refuses a client says so with an empty message, also
//! to a client that has not opened an exchange.
//!
//! # Protection and limits
//! It proves which key the peer holds at the time of the exchange. It does **not** protect later traffic: headers,
//! chunk lists, properties and payload travel as before. An attacker that can change fabric traffic can take the
//! connection over after the exchange. It can relay the exchange to another holder of the key, or strip it (with
//! [`AuthPolicy::Optional`]). Against those, isolate the fabric or encrypt below; for payloads there is RPCSEC_GSS.
#![forbid(unsafe_code)]

mod psk;
#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::Arc;

pub use psk::{KeyError, MAX_KEY_ID, MIN_KEY, PreSharedKey};

/// Longest message of an exchange, bytes. It must also fit the peer's Receive, or be continued.
pub const MAX_MESSAGE: usize = 16 * 1024;
/// Longest opening message, in bytes. With the other properties it must fit the first CONNPROP, which has 1024.
pub const MAX_OPENING: usize = 512;
/// Most messages accepted from a peer before the exchange is complete.
pub const MAX_STEPS: u32 = 8;

/// This end of the connection, for its lifetime.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// Made the connection, and sends first.
    Client,
    /// Accepted the connection.
    Server,
}

/// An authentication mechanism, shared by all connections.
///
/// A mechanism has one method, `begin(&self, role: Role) -> Box<dyn Handshake>`.
pub trait Mechanism: fmt::Debug + Send + Sync {
    /// Starts an exchange, for one connection.
    #[doc(hidden)]
    fn begin(&self, role: Role) -> Box<dyn Handshake>;
}

/// One end of one exchange.
pub trait Handshake: fmt::Debug + Send {
    /// Processes the peer's message and returns the next step. `None` only as a client's first step, which no message
    /// precedes. The message is up to [`MAX_MESSAGE`] bytes of anything.
    fn step(&mut self, message: Option<&[u8]>) -> Step;

    /// The name that the peer has claimed and not proved yet, if this end knows it: for the log.
    #[doc(hidden)]
    fn claimed(&self) -> Option<&str> {
        None
    }
}

/// The result of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Send this, and wait for the peer's answer.
    Continue(Vec<u8>),
    /// The peer is authenticated.
    Done {
        /// The name that it has proved.
        peer: String,
        /// A last message to send, if the peer waits for it.
        last: Option<Vec<u8>>,
    },
    /// The exchange is not complete.
    Failed(AuthError),
}

/// Whether peers must, may or need not authenticate.
#[derive(Clone, Debug, Default)]
pub enum AuthPolicy {
    /// Messages of the peer are ignored, and none is sent.
    #[default]
    Off,
    /// A silent peer may continue. A peer whose attempt fails may not: it is misconfigured or a stranger.
    Optional(Arc<dyn Mechanism>),
    /// Only an authenticated peer may continue; version 1 peers cannot.
    Required(Arc<dyn Mechanism>),
}

/// Why a peer is not authenticated. Its connection ends; a client learns that its server refuses it, but not why.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AuthError {
    /// Policy requires authentication, which the peer did not complete.
    #[error("peer does not authenticate itself, which the policy requires (wire.host_auth)")]
    Missing,
    /// An invalid message for this mechanism, or one out of turn.
    #[error("malformed message of host authentication")]
    Malformed,
    /// The key is unknown to this end.
    #[error("peer uses a key whose ID is not known here (wire.host_auth)")]
    UnknownKey,
    /// Invalid proof: another key, or a message of another exchange.
    #[error(
        "peer's proof is wrong: its key differs from the key that this side has under the same ID \
         (wire.host_auth, or `--host-key FILE`)"
    )]
    WrongProof,
    /// A message after the end of the exchange.
    #[error("message of host authentication after its end")]
    Unexpected,
    /// Longer than [`MAX_MESSAGE`], or an opening of our own longer than [`MAX_OPENING`].
    #[error("message of host authentication of {0} bytes")]
    TooLong(usize),
    /// More than [`MAX_STEPS`] messages.
    #[error("host authentication takes more than {MAX_STEPS} messages")]
    TooManySteps,
    /// The system has no random numbers.
    #[error("getrandom: no random numbers from the system")]
    NoRandom,
    /// The server requires a host key, and this client has none.
    #[error("server requires a host key, and this side has none (wire.host_auth, or `--host-key FILE`)")]
    KeyRequired,
    /// The server refuses the host key of this client.
    #[error(
        "server refuses the host key of this side: another key, or another ID (wire.host_auth, or `--host-key FILE`)"
    )]
    KeyRefused,
}

#[derive(Debug)]
enum State {
    Off,
    /// Not started, or under way.
    Running(Box<dyn Handshake>),
    Authenticated(String),
    /// The peer chose not to, and the policy allows it.
    Unauthenticated,
    Failed(AuthError),
}

/// One connection's host authentication.
#[derive(Debug)]
pub struct HostAuth {
    role: Role,
    required: bool,
    state: State,
    /// Messages taken from the peer.
    steps: u32,
}

impl HostAuth {
    /// At the start of a connection.
    pub fn new(policy: &AuthPolicy, role: Role) -> Self {
        let (required, state) = match policy {
            AuthPolicy::Off => (false, State::Off),
            AuthPolicy::Optional(mechanism) => (false, State::Running(mechanism.begin(role))),
            AuthPolicy::Required(mechanism) => (true, State::Running(mechanism.begin(role))),
        };
        Self { role, required, state, steps: 0 }
    }

    /// The message for the client's first CONNPROP; call it once. `None` for a server, and without authentication.
    ///
    /// # Errors
    /// The connection must end.
    pub fn open(&mut self) -> Result<Option<Vec<u8>>, AuthError> {
        if self.role == Role::Server {
            return Ok(None);
        }
        let State::Running(handshake) = &mut self.state else { return Ok(None) };
        match handshake.step(None) {
            Step::Continue(message) if message.len() <= MAX_OPENING => Ok(Some(message)),
            Step::Continue(message) => self.fail(AuthError::TooLong(message.len())),
            Step::Failed(error) => self.fail(error),
            // Nobody has proved anything.
            Step::Done { .. } => self.fail(AuthError::Malformed),
        }
    }

    /// Processes the peer's message. Call it once per whole CONNPROP, and once with `None` if the connection is of
    /// version 1. The caller sends the result in a CONNPROP.
    ///
    /// # Errors
    /// The connection must end.
    pub fn receive(&mut self, message: Option<&[u8]>) -> Result<Option<Vec<u8>>, AuthError> {
        let handshake = match (&mut self.state, message) {
            (State::Off, Some([])) if self.role == Role::Client => return self.fail(AuthError::KeyRequired),
            (State::Running(_) | State::Authenticated(_), Some([])) if self.role == Role::Client => {
                return self.fail(AuthError::KeyRefused);
            }
            (State::Off, _) | (State::Authenticated(_) | State::Unauthenticated, None) => return Ok(None),
            (State::Failed(error), _) => return Err(*error),
            (State::Authenticated(_) | State::Unauthenticated, Some(_)) => {
                return self.fail(AuthError::Unexpected);
            }
            (State::Running(_), None) if self.required => return self.fail(AuthError::Missing),
            (State::Running(_), None) => {
                self.state = State::Unauthenticated;
                return Ok(None);
            }
            (State::Running(handshake), Some(_)) => handshake,
        };
        self.steps += 1;
        let too_long = message.map(<[u8]>::len).filter(|len| *len > MAX_MESSAGE);
        let step = match too_long {
            Some(len) => Step::Failed(AuthError::TooLong(len)),
            None if self.steps > MAX_STEPS => Step::Failed(AuthError::TooManySteps),
            None => handshake.step(message),
        };
        match step {
            Step::Continue(answer) if answer.len() <= MAX_MESSAGE => Ok(Some(answer)),
            Step::Continue(answer) => self.fail(AuthError::TooLong(answer.len())),
            Step::Done { peer, last } => {
                self.state = State::Authenticated(peer);
                Ok(last)
            }
            Step::Failed(error) => self.fail(error),
        }
    }

    #[cold]
    fn fail<T>(&mut self, error: AuthError) -> Result<T, AuthError> {
        self.state = State::Failed(error);
        Err(error)
    }

    /// Whether the exchange is unfinished: a client holds its first call.
    pub fn in_progress(&self) -> bool {
        matches!(self.state, State::Running(_))
    }

    /// Whether calls may be served and started now. A server checks it at each first call: a client that has not waited
    /// is not authenticated.
    pub fn may_go_on(&self) -> bool {
        match self.state {
            State::Off | State::Authenticated(_) => true,
            State::Running(_) | State::Unauthenticated => !self.required,
            State::Failed(_) => false,
        }
    }

    /// Reason to end the connection, if any.
    pub fn failure(&self) -> Option<AuthError> {
        match self.state {
            State::Failed(error) => Some(error),
            _ => None,
        }
    }

    /// The name that the peer has claimed, while the exchange is unfinished.
    #[doc(hidden)]
    pub fn claimed(&self) -> Option<&str> {
        match &self.state {
            State::Running(handshake) => handshake.claimed(),
            _ => None,
        }
    }

    /// The name that the peer has proved.
    pub fn peer(&self) -> Option<&str> {
        match &self.state {
            State::Authenticated(peer) => Some(peer),
            _ => None,
        }
    }
}
