//! Handshake of the raw tests: the client's requirements, and the server's answer.
#![forbid(unsafe_code)]

use rpcrdma::xdr::{self, Decode, Decoder, Encode};

pub(crate) use crate::rpc::protocol::{RawHello as Hello, RawWelcome as Welcome};

/// First bytes of each message.
const MAGIC: &[u8; 4] = b"RPRF";
/// Version of the handshake. Sides with different versions refuse each other.
const VERSION: u32 = 2;
/// Bytes of a [`Welcome`]; notifications fit in it too.
pub(crate) const WELCOME_BYTES: usize = 24;
/// Memory limit of a server per connection, in bytes.
pub(crate) const MAX_MEMORY: usize = 1 << 30;
/// Receives posted beyond `depth`, so that they can be posted in chains.
pub(crate) const SPARE_RECEIVES: usize = 32;
/// Sends per signaled Send, if no operation waits for the completion.
pub(crate) const SIGNAL_EVERY: u32 = 16;

/// Encodes a message after its first bytes.
fn encode(head: &[u8], body: &impl Encode) -> Vec<u8> {
    // A vector has room for any message.
    [head, &xdr::encode(body).unwrap_or_default()].concat()
}

impl Hello {
    pub(crate) fn encode(&self) -> Vec<u8> {
        encode(&[*MAGIC, VERSION.to_be_bytes()].concat(), self)
    }

    /// Decodes untrusted private data, which some devices pad.
    pub(crate) fn decode(data: &[u8]) -> Result<Self, String> {
        let mut from = Decoder::new(data);
        let short = |error| format!("a message of {} bytes is too short, or malformed: {error}", data.len());
        if from.fixed::<4>("magic").map_err(short)? != *MAGIC {
            return Err("expected the request of an rpcperf raw test: this server serves nothing else".into());
        }
        match from.u32("version").map_err(short)? {
            VERSION => Decode::decode(&mut from).map_err(short),
            version => {
                Err(format!("raw tests of version {version}, but this server has {VERSION}: use the same rpcperf"))
            }
        }
    }

    /// Bytes of each message buffer.
    pub(crate) fn buffer_bytes(&self) -> usize {
        (self.message as usize).max(WELCOME_BYTES)
    }

    /// Receives of each side.
    pub(crate) fn receives(&self) -> usize {
        self.depth as usize + SPARE_RECEIVES
    }

    /// Message buffers of each side: for its receives and its outstanding Sends.
    pub(crate) fn buffers(&self) -> usize {
        self.receives() + self.depth as usize + 2 * SIGNAL_EVERY as usize
    }

    /// Memory of a server for this client, in bytes.
    pub(crate) fn memory(&self) -> Option<usize> {
        self.buffers().checked_mul(self.buffer_bytes())?.checked_add(usize::try_from(self.exposed).ok()?)
    }
}

impl Welcome {
    pub(crate) fn encode(&self) -> Vec<u8> {
        encode(MAGIC, self)
    }

    pub(crate) fn decode(data: &[u8]) -> Result<Self, String> {
        let body = data.strip_prefix(MAGIC).ok_or("the server's first message is not one of rpcperf")?;
        Decode::decode(&mut Decoder::new(body)).map_err(|error| error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rpc::protocol::IdlePolicy;

    const HELLO: Hello = Hello { message: 65536, echo: true, depth: 128, exposed: 1 << 33, batch: false };

    #[test]
    fn messages_decode_to_their_originals() {
        let mut bytes = HELLO.encode();
        bytes.resize(56, 0);
        assert_eq!(Hello::decode(&bytes), Ok(HELLO));
        let welcome = Welcome { rkey: 7, address: u64::MAX - 1, core: 3, idle: IdlePolicy::Yield };
        assert_eq!(welcome.encode().len(), WELCOME_BYTES);
        assert_eq!(Welcome::decode(&welcome.encode()), Ok(welcome));
    }

    #[test]
    fn invalid_messages_are_refused_with_a_reason() {
        let bytes = HELLO.encode();
        for n in 0..bytes.len() {
            assert!(Hello::decode(&bytes[..n]).is_err());
        }
        let mut other = bytes.clone();
        other[7] = 9;
        assert!(Hello::decode(&other).unwrap_err().contains("version 9"));
        assert!(Welcome::decode(&[0; WELCOME_BYTES]).is_err());
        let largest = Hello { message: u32::MAX, depth: u32::MAX, exposed: u64::MAX, ..HELLO };
        assert_eq!(largest.memory(), None);
    }
}
