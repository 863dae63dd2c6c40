//! Handshake of the raw tests: the server learns only the client's needs.
#![forbid(unsafe_code)]

use rpcrdma::fabric::RemoteMemory;

use crate::cli::Idle;

/// First bytes of each message below.
const MAGIC: [u8; 4] = *b"RPRF";
/// Version of the handshake. Sides with different versions refuse each other.
const VERSION: u8 = 1;
/// Bytes of a [`Welcome`]; notifications fit in it too.
pub(crate) const WELCOME_BYTES: usize = 24;
/// Memory limit of a server per connection.
pub(crate) const MOST_MEMORY: usize = 1 << 30;
/// Receives posted beyond `depth`, so that they can be posted in chains.
pub(crate) const SPARE_RECEIVES: usize = 32;
/// Sends per signalled Send, if no operation waits for the completion.
pub(crate) const SIGNAL_EVERY: u32 = 16;

/// The client's request, in the private data of its connect request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Hello {
    /// Bytes of the client's longest message; 0: it sends none.
    pub(crate) message: u32,
    /// The server echoes messages.
    pub(crate) echo: bool,
    /// Outstanding messages.
    pub(crate) depth: u32,
    /// Bytes of exposed memory for Reads and Writes; 0: none.
    pub(crate) exposed: u64,
    /// The server posts chains instead of single requests.
    pub(crate) batch: bool,
}

const HELLO_BYTES: usize = 22;

impl Hello {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(HELLO_BYTES);
        out.extend(MAGIC);
        out.push(VERSION);
        out.push(u8::from(self.echo) | u8::from(self.batch) << 1);
        out.extend(self.message.to_be_bytes());
        out.extend(self.depth.to_be_bytes());
        out.extend(self.exposed.to_be_bytes());
        out
    }

    /// Decodes untrusted data; some devices pad it.
    pub(crate) fn decode(data: &[u8]) -> Result<Self, String> {
        let [magic @ .., version, flags] = take::<6>(data, 0)?;
        if magic != MAGIC {
            return Err("this is a server of rpcperf raw tests, and the request is for something else".into());
        }
        if version != VERSION {
            return Err(format!("raw tests version {version}, this server has {VERSION}: use the same rpcperf"));
        }
        Ok(Self {
            message: u32::from_be_bytes(take(data, 6)?),
            echo: flags & 1 != 0,
            batch: flags & 2 != 0,
            depth: u32::from_be_bytes(take(data, 10)?),
            exposed: u64::from_be_bytes(take(data, 14)?),
        })
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

/// The server's first message: it is ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Welcome {
    /// The exposed memory.
    pub(crate) remote: RemoteMemory,
    pub(crate) server: ServerInfo,
}

/// Description of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ServerInfo {
    /// Core of the server.
    pub(crate) core: u32,
    /// Idle policy of the server.
    pub(crate) idle: Idle,
}

/// The index is the code on the wire.
const IDLE_CODES: [Idle; 4] = [Idle::Poll, Idle::Adaptive, Idle::Event, Idle::Yield];

impl Welcome {
    pub(crate) fn encode(&self) -> [u8; WELCOME_BYTES] {
        let mut out = [0; WELCOME_BYTES];
        out[..4].copy_from_slice(&MAGIC);
        out[4..8].copy_from_slice(&self.remote.rkey.to_be_bytes());
        out[8..16].copy_from_slice(&self.remote.address.to_be_bytes());
        out[16..20].copy_from_slice(&self.server.core.to_be_bytes());
        out[20] = IDLE_CODES.iter().position(|&idle| idle == self.server.idle).unwrap_or_default() as u8;
        out
    }

    pub(crate) fn decode(data: &[u8]) -> Result<Self, String> {
        if take::<4>(data, 0)? != MAGIC {
            return Err("the server's first message is none of rpcperf's".into());
        }
        let [code] = take(data, 20)?;
        let idle = *IDLE_CODES.get(usize::from(code)).ok_or("the server has an idle policy that is not known here")?;
        Ok(Self {
            remote: RemoteMemory {
                rkey: u32::from_be_bytes(take(data, 4)?),
                address: u64::from_be_bytes(take(data, 8)?),
            },
            server: ServerInfo { core: u32::from_be_bytes(take(data, 16)?), idle },
        })
    }
}

fn take<const N: usize>(data: &[u8], at: usize) -> Result<[u8; N], String> {
    let bytes = data.get(at..at + N).and_then(|bytes| bytes.try_into().ok());
    bytes.ok_or_else(|| format!("a message of {} bytes is too short", data.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const HELLO: Hello = Hello { message: 65536, echo: true, depth: 128, exposed: 1 << 33, batch: false };

    #[test]
    fn there_and_back() {
        let mut bytes = HELLO.encode();
        assert_eq!(bytes.len(), HELLO_BYTES);
        bytes.resize(56, 0);
        assert_eq!(Hello::decode(&bytes), Ok(HELLO));
        for idle in IDLE_CODES {
            let remote = RemoteMemory { rkey: 7, address: u64::MAX - 1 };
            let welcome = Welcome { remote, server: ServerInfo { core: 3, idle } };
            assert_eq!(Welcome::decode(&welcome.encode()), Ok(welcome));
        }
    }

    #[test]
    fn unknown_hellos_get_a_reason() {
        let bytes = HELLO.encode();
        for n in 0..bytes.len() {
            assert!(Hello::decode(&bytes[..n]).is_err());
        }
        let mut other = bytes.clone();
        other[4] = 9;
        assert!(Hello::decode(&other).unwrap_err().contains("version 9"));
        assert!(Welcome::decode(&[0; WELCOME_BYTES]).is_err());
        let most = Hello { message: u32::MAX, depth: u32::MAX, exposed: u64::MAX, ..HELLO };
        assert_eq!(most.memory(), None);
    }
}
