//! CONNPROP, which carries an end's properties and host authentication before all other messages.

use super::{ConnConfig, CreditWords, negotiate};
use crate::auth::{HostAuth, Role};
use crate::wire::properties::Properties;
use crate::wire::xdr::Encoder;
use crate::wire::{Flags, HeaderType, Version};

/// Room for this side's properties, without the authentication message.
const PROPERTIES_LEN: usize = 512;

/// State of the CONNPROP exchange, and the authentication of the peer.
#[derive(Debug)]
pub(super) struct Connprop {
    /// Whether a CONNPROP of this side was sent or queued.
    pub(super) sent: bool,
    /// Whether the peer's CONNPROP has arrived.
    pub(super) received: bool,
    /// Received parts of a CONNPROP.
    pub(super) part: Vec<u8>,
    /// The unsent bytes of a CONNPROP in parts.
    unsent: Vec<u8>,
    pub(super) auth: HostAuth,
    /// The authentication message for the next CONNPROP.
    pub(super) message: Option<Vec<u8>>,
}

impl Connprop {
    pub(super) fn new(config: &ConnConfig) -> Self {
        let auth = HostAuth::new(&config.auth, if config.server { Role::Server } else { Role::Client });
        Self { sent: false, received: false, part: Vec::new(), unsent: Vec::new(), auth, message: None }
    }

    /// Maximum bytes of a CONNPROP, or of its next part, if the longest message has `threshold` bytes.
    pub(super) fn room(&self, threshold: usize) -> usize {
        let message = self.message.as_ref().map_or(0, Vec::len);
        (PROPERTIES_LEN + message + self.unsent.len()).min(threshold)
    }

    /// Writes this side's CONNPROP before `end` of `buf`, whole or in parts of at most `threshold` bytes. Returns its
    /// start, and whether more parts follow. The client's first CONNPROP is whole, because its opening has at most
    /// [`MAX_OPENING`](crate::auth::MAX_OPENING) bytes.
    pub(super) fn write(
        &mut self,
        config: &ConnConfig,
        words: CreditWords,
        threshold: usize,
        buf: &mut [u8],
        end: usize,
    ) -> Option<(usize, bool)> {
        if self.unsent.is_empty() {
            self.unsent = self.encode(config)?;
        }
        // The XID of a CONNPROP has no meaning. An ERR_VERS repeats it.
        let (xid, vers, htype) = (config.xid_seed, Version::V2.code(), HeaderType::Connprop.code());
        let mut prefix = vec![xid, vers, words.credit, htype, Flags::NONE.0];
        if let Some(received) = words.received {
            prefix[4] |= Flags::RECEIVED.0;
            prefix.push(received);
        }
        let room = end.min(threshold).checked_sub(4 * prefix.len())? & !3;
        let len = self.unsent.len().min(room);
        let has_more = len < self.unsent.len();
        if has_more {
            prefix[4] |= Flags::MORE.0;
        }
        let start = end.checked_sub(4 * prefix.len() + len)?;
        let mut out = Encoder::new(buf.get_mut(start..end)?);
        prefix.into_iter().try_for_each(|word| out.u32(word)).ok()?;
        out.bytes(self.unsent.get(..len)?).ok()?;
        self.unsent.drain(..len);
        Some((start, has_more))
    }

    /// Encodes this side's properties and authentication message.
    fn encode(&mut self, config: &ConnConfig) -> Option<Vec<u8>> {
        let message = self.message.take();
        let mut scratch = vec![0; PROPERTIES_LEN + message.as_ref().map_or(0, Vec::len)];
        let properties = Properties { host_auth: message.as_deref(), ..negotiate::properties(config) };
        let set = properties.emit(&mut scratch, config.revision).ok()?;
        let mut encoded = vec![0; set.encoded_len()];
        set.emit(&mut Encoder::new(&mut encoded)).ok()?;
        Some(encoded)
    }
}
