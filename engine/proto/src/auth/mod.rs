//! Host authentication (version 2 §5.2.6, §10.4).
//!
//! The specification of version 2 defines the carrier: the property
//! [`PropertyId::HostAuth`](crate::wire::properties::PropertyId::HostAuth) in CONNPROP messages. A [`Mechanism`], such
//! as [`PreSharedKey`], defines its content. A [`HostAuth`] carries one connection through the exchange:
//!
//! | client | CONNPROP | server |
//! | --- | --- | --- |
//! | [`open`](HostAuth::open) | message 1 → | [`receive`](HostAuth::receive) |
//! | [`receive`](HostAuth::receive) | ← message 2 | |
//! | | message 3 … → | [`receive`](HostAuth::receive) |
//!
//! The ends take turns, one message per CONNPROP. The client starts, in its first CONNPROP. A CONNPROP without a
//! message means that the peer does not authenticate, or stops. Version 1, which has no properties, means the same. The
//! [`AuthPolicy`] then decides about the connection. A server refuses a client with an empty message, even if the
//! client has not opened an exchange.
//!
//! # Protection and limits
//! The exchange proves which key the peer holds at that time. It does **not** protect later traffic: headers,
//! chunk lists, properties and payload travel as before. An attacker that can change fabric traffic can take the
//! connection over after the exchange. It can relay the exchange to another holder of the key, or strip it (with
//! [`AuthPolicy::Optional`]). Against such attackers, isolate the fabric or encrypt below it; RPCSEC_GSS protects
//! payloads.
#![forbid(unsafe_code)]

mod psk;
#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::Arc;

pub use psk::{KeyError, MAX_KEY_ID, MIN_KEY, PreSharedKey};

/// Longest message of an exchange, in bytes. It must also fit the peer's Receive, or be continued.
pub const MAX_MESSAGE: usize = 16 * 1024;
/// Longest opening message, in bytes. With the other properties it must fit the first CONNPROP of 1024 bytes.
pub const MAX_OPENING: usize = 512;
/// Maximum messages accepted from a peer before the exchange is complete.
pub const MAX_STEPS: u32 = 8;

/// The role of this end, for the lifetime of the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// This end made the connection, and sends first.
    Client,
    /// This end accepted the connection.
    Server,
}

/// An authentication mechanism, shared by all connections.
///
/// A mechanism has one method, `begin(&self, role: Role) -> Box<dyn AuthHandshake>`.
pub trait Mechanism: fmt::Debug + Send + Sync {
    /// Starts an exchange, for one connection.
    #[doc(hidden)]
    fn begin(&self, role: Role) -> Box<dyn AuthHandshake>;
}

/// One end of one exchange.
pub trait AuthHandshake: fmt::Debug + Send {
    /// Processes the peer's message and returns the next step. The message is untrusted, and has up to [`MAX_MESSAGE`]
    /// bytes. It is `None` only for a client's first step.
    fn step(&mut self, message: Option<&[u8]>) -> AuthStep;

    /// The name that the peer has claimed but not proved, for the log. `None` if this end does not know it.
    #[doc(hidden)]
    fn claimed(&self) -> Option<&str> {
        None
    }
}

/// The result of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AuthStep {
    /// Send this message, and wait for the peer's answer.
    Continue(Vec<u8>),
    /// The peer is authenticated.
    Done {
        /// The name that it has proved.
        peer: String,
        /// A last message to send, if the peer waits for it.
        last: Option<Vec<u8>>,
    },
    /// The exchange has failed.
    Failed(AuthError),
}

/// Whether peers have to authenticate.
#[derive(Clone, Debug, Default)]
pub enum AuthPolicy {
    /// No authentication. This end sends no message, and ignores those of the peer, except a server's refusal.
    #[default]
    Off,
    /// A peer that sends no message may continue. A peer whose attempt fails may not, because it is misconfigured or a
    /// stranger.
    Optional(Arc<dyn Mechanism>),
    /// Only an authenticated peer may continue; version 1 peers cannot.
    Required(Arc<dyn Mechanism>),
}

/// Reason why a peer is not authenticated.
///
/// The connection ends. A client learns that its server refuses it, but not why.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AuthError {
    /// Policy requires authentication, which the peer did not complete.
    #[error("peer does not authenticate itself, which the policy requires (wire.host_auth)")]
    Missing,
    /// The message is invalid for this mechanism, or was sent out of turn.
    #[error("malformed host authentication message")]
    Malformed,
    /// The key is unknown to this end.
    #[error("unknown ID of the peer's host key (wire.host_auth)")]
    UnknownKey,
    /// The proof is invalid: it was made with another key, or for another exchange.
    #[error(
        "peer's proof is wrong: its key differs from the key that this side has under the same ID \
         (wire.host_auth, or `--host-key FILE`)"
    )]
    WrongProof,
    /// A message after the end of the exchange.
    #[error("host authentication message after the end of the exchange")]
    Unexpected,
    /// The message exceeds [`MAX_MESSAGE`], or this end's opening exceeds [`MAX_OPENING`].
    #[error("host authentication message of {0} bytes exceeds the maximum")]
    TooLong(usize),
    /// The peer sent more than [`MAX_STEPS`] messages.
    #[error("host authentication exceeds {MAX_STEPS} messages")]
    TooManySteps,
    /// The system has no random numbers.
    #[error("getrandom failed: the system has no random numbers")]
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
enum AuthState {
    Off,
    /// The exchange has not started, or is not complete.
    Running(Box<dyn AuthHandshake>),
    Authenticated(String),
    /// The peer does not authenticate, and the policy allows that.
    Unauthenticated,
    Failed(AuthError),
}

/// One connection's host authentication.
#[derive(Debug)]
pub struct HostAuth {
    role: Role,
    required: bool,
    state: AuthState,
    /// Messages received from the peer.
    steps: u32,
}

impl HostAuth {
    /// The state at the start of a connection.
    pub fn new(policy: &AuthPolicy, role: Role) -> Self {
        let (required, state) = match policy {
            AuthPolicy::Off => (false, AuthState::Off),
            AuthPolicy::Optional(mechanism) => (false, AuthState::Running(mechanism.begin(role))),
            AuthPolicy::Required(mechanism) => (true, AuthState::Running(mechanism.begin(role))),
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
        let AuthState::Running(handshake) = &mut self.state else { return Ok(None) };
        match handshake.step(None) {
            AuthStep::Continue(message) if message.len() <= MAX_OPENING => Ok(Some(message)),
            AuthStep::Continue(message) => self.fail(AuthError::TooLong(message.len())),
            AuthStep::Failed(error) => self.fail(error),
            // The server has not proved anything yet.
            AuthStep::Done { .. } => self.fail(AuthError::Malformed),
        }
    }

    /// Processes the peer's message. Call it once per whole CONNPROP, and once with `None` if the connection is of
    /// version 1. The caller sends the result in a CONNPROP.
    ///
    /// # Errors
    /// The connection must end.
    pub fn receive(&mut self, message: Option<&[u8]>) -> Result<Option<Vec<u8>>, AuthError> {
        let handshake = match (&mut self.state, message) {
            (AuthState::Off, Some([])) if self.role == Role::Client => return self.fail(AuthError::KeyRequired),
            (AuthState::Running(_) | AuthState::Authenticated(_), Some([])) if self.role == Role::Client => {
                return self.fail(AuthError::KeyRefused);
            }
            (AuthState::Off, _) | (AuthState::Authenticated(_) | AuthState::Unauthenticated, None) => return Ok(None),
            (AuthState::Failed(error), _) => return Err(*error),
            (AuthState::Authenticated(_) | AuthState::Unauthenticated, Some(_)) => {
                return self.fail(AuthError::Unexpected);
            }
            (AuthState::Running(_), None) if self.required => return self.fail(AuthError::Missing),
            (AuthState::Running(_), None) => {
                self.state = AuthState::Unauthenticated;
                return Ok(None);
            }
            (AuthState::Running(handshake), Some(_)) => handshake,
        };
        self.steps += 1;
        let too_long = message.map(<[u8]>::len).filter(|len| *len > MAX_MESSAGE);
        let step = match too_long {
            Some(len) => AuthStep::Failed(AuthError::TooLong(len)),
            None if self.steps > MAX_STEPS => AuthStep::Failed(AuthError::TooManySteps),
            None => handshake.step(message),
        };
        match step {
            AuthStep::Continue(answer) if answer.len() <= MAX_MESSAGE => Ok(Some(answer)),
            AuthStep::Continue(answer) => self.fail(AuthError::TooLong(answer.len())),
            AuthStep::Done { peer, last } => {
                self.state = AuthState::Authenticated(peer);
                Ok(last)
            }
            AuthStep::Failed(error) => self.fail(error),
        }
    }

    #[cold]
    fn fail<T>(&mut self, error: AuthError) -> Result<T, AuthError> {
        self.state = AuthState::Failed(error);
        Err(error)
    }

    /// Whether the exchange is incomplete. A client then delays its first call.
    pub fn in_progress(&self) -> bool {
        matches!(self.state, AuthState::Running(_))
    }

    /// Whether calls may be started and served now. A client that calls before the exchange is complete is not
    /// authenticated.
    pub fn permits_calls(&self) -> bool {
        match self.state {
            AuthState::Off | AuthState::Authenticated(_) => true,
            AuthState::Running(_) | AuthState::Unauthenticated => !self.required,
            AuthState::Failed(_) => false,
        }
    }

    /// The reason to end the connection, if authentication has failed.
    pub fn failure(&self) -> Option<AuthError> {
        match self.state {
            AuthState::Failed(error) => Some(error),
            _ => None,
        }
    }

    /// The name that the peer has claimed, while the exchange is unfinished.
    #[doc(hidden)]
    pub fn claimed(&self) -> Option<&str> {
        match &self.state {
            AuthState::Running(handshake) => handshake.claimed(),
            _ => None,
        }
    }

    /// The name that the peer has proved.
    pub fn peer(&self) -> Option<&str> {
        match &self.state {
            AuthState::Authenticated(peer) => Some(peer),
            _ => None,
        }
    }
}
