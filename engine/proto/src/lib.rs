//! One connection's rules, without I/O: no device, no clock, no thread.
//!
//! A [`Connection`] is driven by its owner, in turns of:
//! 1. *input*. Process each message in arrival order. Call [`decode`](Connection::decode) or, if that returns `None`,
//!    [`check`](Connection::check); then [`receive`](Connection::receive), for invalid messages too. An error ends the
//!    connection; the [`Event`] requests an action.
//!    - A [`Call`](Event::Call) ends with one of the commands [`reply`](Connection::reply),
//!      [`reply_error`](Connection::reply_error) and [`forget`](Connection::forget).
//!    - The owner keeps the payload of each kept [`Part`](Event::Continued), until the call or reply is complete.
//!      Without memory for it, call [`spoil_sequence`](Connection::spoil_sequence).
//!    - A call that was [`Refused`](Event::Retryable) goes out again by [`resend`](Connection::resend), or ends by
//!      [`give_up`](Connection::give_up).
//! - After all events but calls and replies, call [`exhausted`](Connection::exhausted), which may end the connection.
//!   Then call [`poll_change`](Connection::poll_change) until `None`. After [`Failed`](Event::Failed),
//!   [`Late`](Event::Late) and [`Rejected`](Event::Rejected) also call [`broken_off`](Connection::broken_off); then
//!   discard the parts received so far.
//! 2. *time*: [`pass_time`](Connection::pass_time) now and then, and [`handle_timeout`](Connection::handle_timeout)
//!    until `None` once [`next_timeout`](Connection::next_timeout) has passed. [`keep_alive`](Connection::keep_alive)
//!    makes a quiet connection send.
//! 3. *commands*, as the application has them: [`start_call`](Connection::start_call), [`cancel`](Connection::cancel),
//!    [`reply`](Connection::reply) and [`reply_error`](Connection::reply_error).
//! 4. *output*, if [`has_output`](Connection::has_output) or [`needs_transmit`](Connection::needs_transmit) is true:
//!    [`poll_transmit`](Connection::poll_transmit) until `None`. It ends with the pure grant, if one is due. Write and
//!    send each message before the next poll. [`emit_plain`](Connection::emit_plain) or
//!    [`emit_before`](Connection::emit_before) writes its header in front of the payload.
//!    [`emit_continued`](Connection::emit_continued) writes that of a part, followed by
//!    [`hold_queue`](Connection::hold_queue). A header-only message without memory goes back by
//!    [`take_back`](Connection::take_back).
//!
//! Messages arrive whole, in order and once, or the connection ends. The owner keeps [`reserve`](Connection::reserve)
//! Receives posted. `receives_ok` states whether it does so now, for all its connections.
//!
//! A connection that ends fails its calls by [`lost`](Connection::lost), until `None`. Or
//! [`interrupt`](Connection::interrupt) keeps them for [`restart`](Connection::restart) on a new connection. Calls of
//! the peer end with it in either case. A client first passes on the peer's private data by
//! [`set_private_data`](Connection::set_private_data).
//!
//! One call, and its reply:
//!
//! ```
//! use rpcrdma_proto::{CallError, ConnConfig, Connection, Event, Form, Incoming, Outgoing, PeerFault};
//!
//! /// What was received means, and where its payload begins.
//! fn receive(end: &mut Connection, message: &[u8]) -> Result<(Event, usize), PeerFault> {
//!     if let Some(incoming) = end.decode(message) {
//!         return Ok((end.receive(&incoming)?, incoming.head.len));
//!     }
//!     let checked = end.check(message);
//!     let incoming = Incoming::checked(&checked);
//!     Ok((end.receive(&incoming)?, incoming.head.len))
//! }
//!
//! /// Every message that may go out now; `payload` is that of calls and replies.
//! fn transmit(end: &mut Connection, payload: &[u8]) -> Vec<Vec<u8>> {
//!     let mut messages = Vec::new();
//!     while let Some(out) = end.poll_transmit(true) {
//!         let mut message = vec![0; 256];
//!         let start = end.emit_before(out, &Form::default(), true, &mut message, 256).expect("room");
//!         if matches!(out, Outgoing::Call(_) | Outgoing::Reply(_)) {
//!             message.extend_from_slice(payload);
//!         }
//!         messages.push(message.split_off(start));
//!     }
//!     messages
//! }
//!
//! let mut client = Connection::new(ConnConfig::default());
//! let config = ConnConfig { server: true, takes_calls: true, max_calls: 0, ..ConnConfig::default() };
//! let mut server = Connection::new(config);
//!
//! // Time is the owner's: here it stands still before the deadline of 1000 ns, and is over behind it.
//! let call = client.start_call(7, 1000, 0).expect("a slot");
//! let late = client.start_call(8, 500, 0).expect("a slot");
//! assert_eq!(client.next_timeout(), 500);
//! assert_eq!(client.handle_timeout(600), Some((late, 8, CallError::TimedOut { sent: false })));
//! assert_eq!(client.handle_timeout(600), None);
//!
//! // The first messages introduce the ends to each other; then the call goes out.
//! let (mut answered, mut turns) = (None, 0);
//! while answered.is_none() {
//!     for message in transmit(&mut client, b"a call  ") {
//!         if let (Event::Call { id }, payload) = receive(&mut server, &message)? {
//!             assert_eq!(&message[payload..], b"a call  ");
//!             server.reply(id);
//!         }
//!         assert_eq!(server.exhausted(), None);
//!     }
//!     for message in transmit(&mut server, b"a reply ") {
//!         if let (Event::Reply { call, token }, payload) = receive(&mut client, &message)? {
//!             assert_eq!(&message[payload..], b"a reply ");
//!             answered = Some((call, token));
//!         }
//!         assert_eq!(client.exhausted(), None);
//!     }
//!     turns += 1;
//!     assert!(turns < 4, "{client:?}");
//! }
//! assert_eq!(answered, Some((call, 7)));
//! assert!(client.is_idle() && server.is_idle() && !client.has_output(true));
//!
//! // The device says that the connection has ended, amid a call.
//! let call = client.start_call(9, u64::MAX, 0).expect("a slot");
//! assert_eq!(transmit(&mut client, b"a call  ").len(), 1);
//! assert_eq!(client.lost(), Some((call, 9, CallError::ConnectionLost { sent: true })));
//! assert_eq!(client.lost(), None);
//! # Ok::<(), PeerFault>(())
//! ```
//!
//! Either end may call and serve, as [`ConnConfig::max_calls`] and [`ConnConfig::takes_calls`] permit.
//!
//! The owner manages memory. The connection names calls ([`CallId`]) and served calls ([`InboundId`]); the owner keeps
//! their buffers and exposed memory beside those names.
//!
//! | file | holds |
//! | --- | --- |
//! | `config` | configuration of a connection |
//! | `event` | events and outgoing messages |
//! | `incoming` | a decoded message |
//! | `receive`, `version_1` | meaning of a message |
//! | `unusable` | unusable messages |
//! | `commands` | the owner's input: time, loss, calls and replies |
//! | `transmit` | the next outgoing message and its header |
//! | `characteristics` | changes while connected, by the rules of `exchange` |
//! | [`exchange`] | the rules of such changes |
//! | `negotiate` | version and terms |
//! | `introduce` | CONNPROP: properties and host authentication |
//! | `credits` | flow control |
//! | `calls`, `inbound` | the calls of this side, and those of the peer |
//! | `free_list` | free slots of their tables |
//! | `heads` | layouts of the peer's headers |
//! | `outbox` | outgoing messages other than calls |
//! | `sequence` | incoming continued messages |
//! | `useless` | limit of a peer's unsolicited messages |
//! | `form` | form of a message |
//! | `limits` | limits of chunks and segments of a call |
//! | `fault` | faults of a peer, refusals of a server |
//! | `call_error` | failures of a call |
//! | `counters` | counters |
//! | [`auth`] | host authentication: authentication of the other end |
//! | [`binding`] | data items of a procedure for direct placement |
//! | [`wire`] | bytes to headers and back |

/// A struct with the default of each field.
macro_rules! with_defaults {
    (
        $(#[$meta:meta])* pub struct $name:ident$(<$life:lifetime>)? {
            $($(#[$of_field:meta])* pub $field:ident: $type:ty = $default:expr,)*
        }
    ) => {
        $(#[$meta])*
        pub struct $name$(<$life>)? { $($(#[$of_field])* pub $field: $type,)* }

        impl$(<$life>)? Default for $name$(<$life>)? {
            fn default() -> Self {
                Self { $($field: $default,)* }
            }
        }
    };
}

pub mod auth;
pub mod binding;
mod call_error;
mod calls;
mod characteristics;
mod commands;
mod config;
mod counters;
mod credits;
mod event;
pub mod exchange;
mod fault;
mod form;
mod free_list;
mod heads;
mod inbound;
mod incoming;
mod introduce;
mod limits;
mod negotiate;
mod outbox;
mod receive;
mod sequence;
#[cfg(test)]
mod tests;
mod transmit;
mod unusable;
mod useless;
mod version_1;
pub mod wire;

#[doc(hidden)]
pub use call_error::Defect;
pub use call_error::{CallError, Fault, InvalidCall, Sent};
pub use calls::CallId;
use calls::CallTable;
use characteristics::Changes;
pub use config::ConnConfig;
pub use counters::Counters;
pub use credits::{CreditMode, CreditWords, Credits, MAX_CREDITS, MIN_CREDITS};
pub use event::{Event, Outgoing};
#[doc(hidden)]
pub use fault::Failing;
pub use fault::{Knob, PeerFault, Refusal, Rejected};
pub use form::{CallForm, CallLengths, CallPlan, FormLimits, LEAST_LAST_PART, ReplyForm, choose_call, choose_reply};
use heads::Heads;
pub use inbound::InboundId;
use inbound::InboundTable;
pub use incoming::{Incoming, Lists};
use introduce::Introduction;
pub use limits::{LIMITS, MAX_CHUNKS, MAX_READ_SEGMENTS, MAX_SEGMENTS, MAX_WRITE_SEGMENTS};
use negotiate::Session;
pub use negotiate::{FIRST_MESSAGE_LEN, Phase, Terms, connect_data};
use outbox::Outbox;
use sequence::Sequences;
pub use transmit::Form;
use useless::Useless;

use crate::auth::HostAuth;
use crate::wire::Version;
use crate::wire::private_data::PrivateData;

/// One connection. See the module page for how to drive it. Fields that each message needs come first, together.
#[derive(Debug)]
#[repr(C)]
pub struct Connection {
    credits: Credits,
    session: Session,
    heads: Heads,
    sequences: Sequences,
    outbox: Outbox,
    calls: CallTable,
    inbound: InboundTable,
    counters: Counters,
    config: ConnConfig,
    // Rarely used.
    useless: Useless,
    introduction: Introduction,
    changes: Changes,
}

impl Connection {
    /// A connection that has just been established.
    pub fn new(config: ConnConfig) -> Self {
        let credits = config.credits.clamp(MIN_CREDITS, MAX_CREDITS);
        let config = ConnConfig { credits, ..config };
        let session = Session::new(&config);
        let inbound = InboundTable::new(if config.takes_calls { credits as usize + 1 } else { 0 });
        let mut connection = Self {
            credits: config.new_credits(session.version()),
            session,
            heads: Heads::new(&config),
            sequences: Sequences::default(),
            outbox: Outbox::new(inbound.capacity()),
            calls: CallTable::new(config.max_calls, config.xid_seed),
            inbound,
            counters: Counters::default(),
            useless: Useless::new(config.useless_per_second),
            introduction: Introduction::new(&config),
            changes: Changes::new(&config),
            config,
        };
        connection.begin();
        connection
    }

    /// Bytes at its beginning that each message needs.
    pub const HOT_BYTES: usize = std::mem::offset_of!(Self, config);

    /// Addresses of the tables that most messages need, for prefetching.
    #[inline]
    pub fn tables(&self) -> [*const u8; 3] {
        let [calls, free_calls] = self.calls.first_places();
        [calls, free_calls, self.inbound.first_place()]
    }

    /// Authentication of the peer. If it has already [failed](HostAuth::failure), the connection must end.
    pub fn auth(&self) -> &HostAuth {
        &self.introduction.auth
    }

    /// Whether a client may call: negotiation and authentication are complete.
    pub fn is_open(&self) -> bool {
        self.session.open
    }

    /// Whether version and authentication let this side call.
    pub fn may_call(&self) -> bool {
        self.session.phase == Phase::Settled && self.auth().may_go_on() && (self.is_open() || self.config.server)
    }

    /// Sets the private data of the peer's connect message (client only). It determines the terms of version 1.
    pub fn set_private_data(&mut self, peer: Option<PrivateData>) {
        self.config.private_data = peer;
        if self.session.version() == Version::V1 {
            self.session.terms = Terms::version_1(&self.config);
        }
    }

    /// Its configuration.
    pub fn config(&self) -> &ConnConfig {
        &self.config
    }

    /// Terms of this side's messages, as negotiated so far.
    #[inline]
    pub fn terms(&self) -> &Terms {
        &self.session.terms
    }

    /// Whether a client has received a message of version 2 other than ERR_VERS: its server speaks that version.
    pub fn has_heard_version_2(&self) -> bool {
        self.session.heard_version_2
    }

    /// The server's error about a client's first message, other than ERR_VERS, if no other message followed.
    pub fn first_error(&self) -> Option<wire::ErrorBody> {
        self.session.first_error.filter(|_| self.session.phase == Phase::Hello)
    }

    /// State of the version negotiation.
    pub fn phase(&self) -> Phase {
        self.session.phase
    }

    /// Limits that decide the form of this side's messages.
    pub fn form_limits(&self) -> FormLimits {
        self.session.terms.form_limits(&self.config)
    }

    /// Receives that must be in reserve for this connection.
    pub fn reserve(&self) -> u32 {
        self.config.reserve().max(self.credits.reserve())
    }

    /// Receives of the [`reserve`](Self::reserve) that unanswered calls make unnecessary now. Such a call has used a
    /// credit of the peer and holds its buffer.
    pub fn spared(&self) -> u32 {
        match self.session.version() {
            Version::V1 => self.credits.credit_limit().min(self.inbound.len() as u32),
            Version::V2 => self.credits.spared(self.room()),
        }
    }

    /// Offers the peer another credit limit; see [`Credits::set_credit_limit`].
    pub fn set_credit_limit(&mut self, credit_limit: u32) {
        self.credits.set_credit_limit(credit_limit);
        self.config.credits = self.credits.credit_limit().max(MIN_CREDITS);
        if self.config.takes_calls {
            self.inbound.fit(self.config.credits as usize + 1);
        }
    }

    /// Requests a pure grant in this turn, as a keep-alive. See version 2 §4.3.1.2. Version 1 has no such message.
    pub fn keep_alive(&mut self) {
        self.outbox.ping = self.session.version() == Version::V2 && self.session.phase == Phase::Settled;
    }

    /// Counters so far.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// The flow control state.
    pub fn credits(&self) -> &Credits {
        &self.credits
    }

    /// Slots for calls of this side; see [`call_slot`](Self::call_slot).
    pub fn call_slots(&self) -> usize {
        self.calls.capacity()
    }

    /// The dense slot number of a call of this side, for the owner's table. It is reused only after the reply.
    #[inline]
    pub fn call_slot(&self, call: CallId) -> usize {
        self.calls.slot(call)
    }

    /// Slots for calls of the peer; see [`InboundId::index`].
    pub fn inbound_slots(&self) -> usize {
        self.inbound.capacity()
    }
}
