//! Pre-shared-key mechanism: each host proves knowledge of a secret.
//!
//! | | bytes |
//! | --- | --- |
//! | client → | `1`, version `1`, length of the key's name, the name, its nonce (32) |
//! | ← server | `2`, its nonce (32), proof (32) |
//! | client → | `3`, proof (32) |
//!
//! A proof is an HMAC-SHA256 under the key. It covers a label, its maker (1 client, 2 server), the name with its
//! length, the client's nonce and the server's nonce. Nonces come from the system's generator, so no message of another
//! exchange is valid in this one. Because the maker is covered, a proof cannot be reflected.
//!
//! A peer that opens an exchange gets a proof and can test keys against it offline. Keys must be random, not passwords.

use std::sync::Arc;

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use super::{AuthError, AuthHandshake, AuthStep, Mechanism, Role};

/// Shortest key, in bytes. Use 32 random bytes.
pub const MIN_KEY: usize = 16;
/// Longest name of a key, in bytes.
pub const MAX_KEY_ID: usize = 64;

const LABEL: &[u8] = b"rpcrdma host authentication psk 1";
const VERSION: u8 = 1;
const NONCE: usize = 32;
const PROOF: usize = 32;

type Nonce = [u8; NONCE];

/// Reason why a key cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(transparent)]
pub struct KeyError(KeyDefect);

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
enum KeyDefect {
    /// The key is easy to guess.
    #[error("key of {0} bytes: expected at least {MIN_KEY} (`openssl rand -out FILE 32` makes one)")]
    TooShort(usize),
    /// The name is empty, or too long for the message.
    #[error("key name of {0} bytes: expected 1 to {MAX_KEY_ID}")]
    BadName(usize),
}

struct NamedKey {
    id: String,
    /// The HMAC with the key and no message yet. It is cleared when dropped.
    mac: Hmac<Sha256>,
}

impl NamedKey {
    fn new(id: &str, key: &[u8]) -> Result<NamedKey, KeyError> {
        if id.is_empty() || id.len() > MAX_KEY_ID {
            return Err(KeyError(KeyDefect::BadName(id.len())));
        }
        if key.len() < MIN_KEY {
            return Err(KeyError(KeyDefect::TooShort(key.len())));
        }
        let mac = Hmac::new_from_slice(key).map_err(|_| KeyError(KeyDefect::TooShort(key.len())))?;
        Ok(NamedKey { id: id.to_owned(), mac })
    }

    fn proof(&self, maker: Role, client: &Nonce, server: &Nonce) -> Hmac<Sha256> {
        let maker = match maker {
            Role::Client => 1,
            Role::Server => 2,
        };
        let mut mac = self.mac.clone();
        for part in [LABEL, &[maker, self.id.len() as u8], self.id.as_bytes(), client, server] {
            mac.update(part);
        }
        mac
    }

    /// Checks a proof, in constant time.
    fn check(&self, proof: &[u8], maker: Role, client: &Nonce, server: &Nonce) -> Result<(), AuthError> {
        self.proof(maker, client, server).verify_slice(proof).map_err(|_| AuthError::WrongProof)
    }
}

/// Omits the key.
impl std::fmt::Debug for NamedKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Key").field(&self.id).finish()
    }
}

/// Mutual challenge and response with keys of both hosts. A client uses the first key; a server accepts any.
///
/// ```
/// use std::sync::Arc;
/// use rpcrdma_proto::auth::{AuthPolicy, PreSharedKey};
/// let (new, old) = ([7; 32], [6; 32]);
/// let keys = PreSharedKey::new("rack12/2026", &new)?.and("rack12/2025", &old)?;
/// let policy = AuthPolicy::Required(Arc::new(keys));
/// # Ok::<(), rpcrdma_proto::auth::KeyError>(())
/// ```
#[derive(Clone, Debug)]
pub struct PreSharedKey {
    keys: Vec<Arc<NamedKey>>,
}

impl PreSharedKey {
    /// A key and its public name, which becomes the peer's name. The name is no secret.
    ///
    /// # Errors
    /// The key is shorter than 16 bytes, or its name is empty or longer than 64.
    pub fn new(id: &str, key: &[u8]) -> Result<Self, KeyError> {
        Ok(Self { keys: vec![Arc::new(NamedKey::new(id, key)?)] })
    }

    /// Adds a key, which only a server uses. It has one key per client, or also the old key during a rotation.
    ///
    /// # Errors
    /// Those of [`new`](Self::new).
    pub fn and(mut self, id: &str, key: &[u8]) -> Result<Self, KeyError> {
        self.keys.push(Arc::new(NamedKey::new(id, key)?));
        Ok(self)
    }
}

impl Mechanism for PreSharedKey {
    fn begin(&self, role: Role) -> Box<dyn AuthHandshake> {
        match (role, self.keys.first()) {
            (Role::Client, Some(key)) => Box::new(ClientHandshake::Start(Arc::clone(key))),
            _ => Box::new(ServerHandshake::Start(self.keys.clone())),
        }
    }
}

#[derive(Debug)]
enum ClientHandshake {
    Start(Arc<NamedKey>),
    Challenged(Arc<NamedKey>, Nonce),
    Finished,
}

impl ClientHandshake {
    fn proceed(&mut self, message: Option<&[u8]>) -> Result<AuthStep, AuthError> {
        match (std::mem::replace(self, ClientHandshake::Finished), message) {
            (ClientHandshake::Start(key), None) => {
                let nonce = generate_nonce()?;
                let opening = [&[1, VERSION, key.id.len() as u8], key.id.as_bytes(), &nonce].concat();
                *self = ClientHandshake::Challenged(key, nonce);
                Ok(AuthStep::Continue(opening))
            }
            (ClientHandshake::Challenged(key, ours), Some(message)) => {
                let (theirs, proof) = parse_challenge(message).ok_or(AuthError::Malformed)?;
                key.check(proof, Role::Server, &ours, theirs)?;
                let proof = key.proof(Role::Client, &ours, theirs).finalize().into_bytes();
                Ok(AuthStep::Done { peer: key.id.clone(), last: Some([&[3], &proof[..]].concat()) })
            }
            _ => Err(AuthError::Malformed),
        }
    }
}

impl AuthHandshake for ClientHandshake {
    fn step(&mut self, message: Option<&[u8]>) -> AuthStep {
        self.proceed(message).unwrap_or_else(AuthStep::Failed)
    }
}

#[derive(Debug)]
enum ServerHandshake {
    Start(Vec<Arc<NamedKey>>),
    /// The key, the client's nonce, and the server's nonce.
    Challenged(Arc<NamedKey>, Nonce, Nonce),
    Finished,
}

impl ServerHandshake {
    fn proceed(&mut self, message: &[u8]) -> Result<AuthStep, AuthError> {
        match std::mem::replace(self, ServerHandshake::Finished) {
            ServerHandshake::Start(keys) => {
                let (id, theirs) = parse_opening(message).ok_or(AuthError::Malformed)?;
                let key = keys.into_iter().find(|key| key.id.as_bytes() == id).ok_or(AuthError::UnknownKey)?;
                let ours = generate_nonce()?;
                let proof = key.proof(Role::Server, theirs, &ours).finalize().into_bytes();
                *self = ServerHandshake::Challenged(key, *theirs, ours);
                Ok(AuthStep::Continue([&[2], &ours[..], &proof[..]].concat()))
            }
            ServerHandshake::Challenged(key, theirs, ours) => match message {
                [3, proof @ ..] if proof.len() == PROOF => {
                    key.check(proof, Role::Client, &theirs, &ours)?;
                    Ok(AuthStep::Done { peer: key.id.clone(), last: None })
                }
                _ => Err(AuthError::Malformed),
            },
            ServerHandshake::Finished => Err(AuthError::Malformed),
        }
    }
}

impl AuthHandshake for ServerHandshake {
    fn step(&mut self, message: Option<&[u8]>) -> AuthStep {
        self.proceed(message.unwrap_or_default()).unwrap_or_else(AuthStep::Failed)
    }

    /// The server's first answer shows a client whether both ends have the same key. A client with another key
    /// disconnects then, and the server knows only the name that the client has claimed.
    fn claimed(&self) -> Option<&str> {
        match self {
            ServerHandshake::Challenged(key, ..) => Some(&key.id),
            _ => None,
        }
    }
}

/// The key's name and the client's nonce.
fn parse_opening(message: &[u8]) -> Option<(&[u8], &Nonce)> {
    let [1, VERSION, len, rest @ ..] = message else { return None };
    let (id, nonce) = rest.split_at_checked(usize::from(*len))?;
    Some((id, nonce.try_into().ok()?))
}

/// The server's nonce and its proof.
fn parse_challenge(message: &[u8]) -> Option<(&Nonce, &[u8])> {
    let (2, rest) = message.split_first()? else { return None };
    let (nonce, proof) = rest.split_first_chunk()?;
    (proof.len() == PROOF).then_some((nonce, proof))
}

fn generate_nonce() -> Result<Nonce, AuthError> {
    let mut nonce = [0; NONCE];
    getrandom::fill(&mut nonce).map_err(|_| AuthError::NoRandom)?;
    Ok(nonce)
}
