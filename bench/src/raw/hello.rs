//! What the two sides of a raw test tell each other. The server knows no tests: the client says what it needs
//! of it.
#![forbid(unsafe_code)]

use rpcrdma::fabric::RemoteMemory;

use crate::cli::Idle;

/// Begins every message below.
const MAGIC: [u8; 4] = *b"RPRF";
/// Of this exchange. Sides of different versions refuse each other.
const VERSION: u8 = 1;
/// Bytes of a [`Welcome`], and room enough for every notification.
pub(crate) const WELCOME_BYTES: usize = 24;
/// Most memory that a server gives to one connection.
pub(crate) const MOST_MEMORY: usize = 1 << 30;
/// Receives that are posted beyond `depth`, so that they can be posted in chains.
pub(crate) const SPARE_RECEIVES: usize = 32;
/// One in so many Sends asks for a completion, where nobody waits for it.
pub(crate) const SIGNAL_EVERY: u32 = 16;

/// What the client asks for, in the private data of its connect request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Hello {
    /// Bytes of the longest message that the client sends; 0: it sends none.
    pub(crate) message: u32,
    /// Messages are to be sent back.
    pub(crate) echo: bool,
    /// Messages under way at a time.
    pub(crate) depth: u32,
    /// Bytes of memory to expose for Reads and Writes; 0: none.
    pub(crate) exposed: u64,
    /// Chains are to be posted, rather than single requests.
    pub(crate) batch: bool,
}

/// Length of a [`Hello`].
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

    /// Reads what a stranger sent; some devices pad it.
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

    /// Bytes of each buffer for messages.
    pub(crate) fn buffer_bytes(&self) -> usize {
        (self.message as usize).max(WELCOME_BYTES)
    }

    /// Receives that each side posts.
    pub(crate) fn receives(&self) -> usize {
        self.depth as usize + SPARE_RECEIVES
    }

    /// Buffers for messages that a side has to have: for its receives, and for what it sends meanwhile.
    pub(crate) fn buffers(&self) -> usize {
        self.receives() + self.depth as usize + 2 * SIGNAL_EVERY as usize
    }

    /// Memory that a server needs for this client.
    pub(crate) fn memory(&self) -> Option<usize> {
        self.buffers().checked_mul(self.buffer_bytes())?.checked_add(usize::try_from(self.exposed).ok()?)
    }
}

/// The server's first message: it is ready, and this is where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Welcome {
    /// The exposed memory.
    pub(crate) remote: RemoteMemory,
    /// Who serves.
    pub(crate) server: ServerInfo,
}

/// What a server says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ServerInfo {
    /// The core that it runs on.
    pub(crate) core: u32,
    /// What it does when there is nothing to do.
    pub(crate) idle: Idle,
}

/// The order of these is their code on the wire.
const IDLE_CODES: [Idle; 3] = [Idle::Poll, Idle::Adaptive, Idle::Event];

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
