//! Messages that need no further thought: calls and replies in one piece, in the layout that both ends have
//! settled on, without chunks, or calls with one in each direction at most.
//!
//! [`Connection::handle_message`] would take them, too, and come to the same end.

use super::{Connection, CreditWords, Event, PeerFault};
use crate::wire::{Plain, PlainChunks, PlainLayout};

impl Connection {
    /// Reads a received message if it is such a one, to be [handled](Self::handle_plain) then. Else `None`,
    /// and it was not looked at yet as far as the connection is concerned.
    #[inline(always)]
    pub fn plain(&self, message: &[u8]) -> Option<Plain> {
        self.plain?.read(message)
    }

    /// The same for a call with chunks, few enough to be read in one go, where calls may have any: to be
    /// handled [as such](Self::handle_plain_with_chunks).
    #[inline]
    pub fn plain_with_chunks(&self, message: &[u8]) -> Option<(Plain, PlainChunks)> {
        if self.takes_chunks() { self.plain?.read_with_chunks(message) } else { None }
    }

    /// Takes a call that is [plain, but for its chunks](Self::plain_with_chunks).
    ///
    /// # Errors
    /// As [`handle_message`](Self::handle_message).
    #[inline]
    pub fn handle_plain_with_chunks(&mut self, message: &Plain) -> Result<Event, PeerFault> {
        self.counters.chunked_received += u64::from(self.serves);
        self.handle_plain(message)
    }

    /// Takes a message that is [plain](Self::plain): a call, a reply, or nothing of use.
    ///
    /// # Errors
    /// As [`handle_message`](Self::handle_message).
    #[inline(always)]
    pub fn handle_plain(&mut self, message: &Plain) -> Result<Event, PeerFault> {
        self.counters.received += 1;
        if self.plain == Some(PlainLayout::V2Windowed) {
            self.credits.on_receive_windowed(message.received, message.credit)?;
        } else if self.plain == Some(PlainLayout::V1) {
            return self.handle_plain_v1(message);
        } else {
            self.credits.on_receive(CreditWords { credit: message.credit, received: None }, true, true)?;
        }
        if message.response { Ok(self.answered(message.xid)) } else { self.admit(message.xid) }
    }

    #[inline(always)]
    fn handle_plain_v1(&mut self, message: &Plain) -> Result<Event, PeerFault> {
        if !message.response {
            if !self.config.takes_calls {
                return Ok(self.reject(super::Rejected::Unexpected));
            }
            self.check_overrun()?;
            return self.admit(message.xid);
        }
        let event = self.answered(message.xid);
        self.credit_v1(&event, message.credit)?;
        Ok(event)
    }
}
