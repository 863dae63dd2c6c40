//! The protocol of one connection, without I/O, clock or threads.
//!
//! A [`Connection`] is a state machine. Its owner moves the bytes, keeps the memory and knows the time:
//!
//! - *Input.* Pass each message to [`handle_message`](Connection::handle_message), in arrival order, with its header if
//!   that can be [decoded by its layout](HeaderLayouts::decode). The result is the call or reply that the message
//!   completes. If it completes none, take the [`Event`]s of [`poll_event`](Connection::poll_event).
//! - *Time.* Call [`handle_timeout`](Connection::handle_timeout) until `None` once
//!   [`next_deadline`](CallTable::next_deadline) has passed, and [`advance_time`](Connection::advance_time) at
//!   intervals.
//! - *Commands*, in any order: [`start_call`](Connection::start_call), [`cancel`](Connection::cancel),
//!   [`reply`](Connection::reply), [`reply_error`](Connection::reply_error) and others.
//! - *Output.* While [`has_output`](Connection::has_output), call [`poll_transmit`](Connection::poll_transmit) until
//!   `None`. [`write_header`](Connection::write_header) writes the header of each message in front of its payload.
//!
//! The transport delivers messages whole, in order and once, or ends the connection. The owner keeps the
//! [reserve](ConnectionStatus::reserve) of Receives posted, and states by
//! [`set_receives_ready`](Connection::set_receives_ready) whether it does so for all its connections.
//!
//! When the connection ends, call [`fail_next_call`](Connection::fail_next_call) until `None` to fail this side's
//! calls, or [`interrupt`](Connection::interrupt) to keep them for [`restart`](Connection::restart) on a new
//! connection. In either case the peer's calls end with the connection.
//!
//! ```
//! use rpcrdma_proto::{CallError, ConnConfig, Connection, Event, Form, Outgoing, ReceivedMessage};
//!
//! /// Writes all messages that may be sent now. Calls and replies have this payload.
//! fn transmit(end: &mut Connection, payload: &[u8]) -> Vec<Vec<u8>> {
//!     let mut messages = Vec::new();
//!     while let Some(out) = end.poll_transmit() {
//!         let room = if let Outgoing::Control { room } = out { room } else { Outgoing::SHORT };
//!         let mut message = vec![0; room];
//!         let start = end.write_header(out, &Form::INLINE, &mut message, room).expect("room");
//!         if matches!(out, Outgoing::Call(_) | Outgoing::Reply(_)) {
//!             message.extend_from_slice(payload);
//!         }
//!         messages.push(message.split_off(start));
//!     }
//!     messages
//! }
//!
//! /// Processes a message, and returns the call or reply that it completes.
//! fn receive(end: &mut Connection, message: &[u8]) -> ReceivedMessage {
//!     let header = end.layouts().decode(message);
//!     end.handle_message(message, header.as_ref())
//! }
//!
//! let mut client = Connection::new(ConnConfig::default());
//! let config = ConnConfig { server: true, accepts_calls: true, max_calls: 0, ..ConnConfig::default() };
//! let mut server = Connection::new(config);
//!
//! // The first messages exchange properties. Then the client sends the call.
//! let call = client.start_call(7, u64::MAX, 0, false).expect("a slot").id;
//! let mut answered = None;
//! while answered.is_none() {
//!     for message in transmit(&mut client, b"a call  ") {
//!         if let ReceivedMessage::Call { id } = receive(&mut server, &message) {
//!             assert!(message.ends_with(b"a call  "));
//!             server.reply(id, false);
//!         }
//!         assert_eq!(server.poll_event(), None);
//!     }
//!     for message in transmit(&mut server, b"a reply ") {
//!         if let ReceivedMessage::Reply { call, token } = receive(&mut client, &message) {
//!             assert!(message.ends_with(b"a reply "));
//!             answered = Some((call, token));
//!         }
//!         while let Some(event) = client.poll_event() {
//!             assert_eq!(event, Event::Negotiated);
//!         }
//!     }
//! }
//! assert_eq!(answered, Some((call, 7)));
//! assert!(client.status().is_idle && server.status().is_idle && !client.has_output());
//!
//! // The device reports that the connection has ended, before a call was sent.
//! let call = client.start_call(8, u64::MAX, 0, false).expect("a slot").id;
//! assert_eq!(client.fail_next_call(), Some((call, 8, CallError::ConnectionLost { sent: false })));
//! ```
//!
//! Either end may call and serve, as [`ConnConfig::max_calls`] and [`ConnConfig::accepts_calls`] permit. The connection
//! names calls ([`CallId`]) and served calls ([`InboundId`]); the owner keeps their buffers and exposed memory in
//! tables of its own.
//!
//! | file | holds |
//! | --- | --- |
//! | `config` | configuration of a connection |
//! | `event` | events and outgoing messages |
//! | `decoded_header` | a decoded header |
//! | `connection` | the state machine: input, commands, output, changes of characteristics |
//! | `negotiate` | version, terms and authentication as negotiated |
//! | `connprop` | CONNPROP: properties and host authentication |
//! | [`exchange`] | the rules for changes of characteristics |
//! | `credits` | flow control |
//! | `calls`, `inbound` | the calls of this side, and those of the peer |
//! | `layouts` | layouts of the peer's headers |
//! | `outbox` | outgoing messages other than calls |
//! | `reassembly` | incoming continued messages |
//! | `unsolicited` | limit of a peer's unsolicited messages |
//! | `form` | form of a message |
//! | `limits` | limits of chunks and segments of a call |
//! | `fault` | faults of a peer, refusals of a server |
//! | `call_error` | failures of a call |
//! | `counters` | counters |
//! | [`auth`] | host authentication: authentication of the other end |
//! | [`binding`] | data items of a procedure for direct placement |
//! | [`wire`] | bytes to headers and back |

/// Declares a struct with a default for each field.
macro_rules! with_defaults {
    (
        $(#[$meta:meta])* pub struct $name:ident$(<$life:lifetime>)? {
            $($(#[$field_meta:meta])* pub $field:ident: $type:ty = $default:expr,)*
        }
    ) => {
        $(#[$meta])*
        pub struct $name$(<$life>)? { $($(#[$field_meta])* pub $field: $type,)* }

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
mod config;
mod connection;
mod connprop;
mod counters;
mod credits;
mod decoded_header;
mod event;
pub mod exchange;
mod fault;
mod form;
mod inbound;
mod layouts;
mod limits;
mod negotiate;
mod outbox;
mod reassembly;
#[cfg(test)]
mod tests;
mod unsolicited;
pub mod wire;

#[doc(hidden)]
pub use call_error::Defect;
pub use call_error::{CallError, CallProgress, ErrorParty, InvalidCall};
pub use calls::{CallId, CallTable};
pub use config::ConnConfig;
pub use connection::{CharacteristicChanges, Connection, ConnectionStatus, Form, StartedCall};
pub use counters::Counters;
pub use credits::{CreditMode, CreditWords, Credits, MAX_CREDITS, MIN_CREDITS};
pub use decoded_header::{DecodedHeader, DecodedLists};
pub use event::{Event, Outgoing, ReceivedMessage};
#[doc(hidden)]
pub use fault::HandlerFailure;
pub use fault::{Knob, PeerFault, Refusal, RejectReason};
pub use form::{CallForm, CallLengths, CallPlan, FormLimits, MIN_LAST_PART, ReplyForm, choose_call, choose_reply};
pub use inbound::{InboundId, InboundTable};
pub use layouts::{HeaderLayouts, MessageDirection};
pub use limits::{CHUNK_LIMITS, MAX_CHUNKS, MAX_READ_SEGMENTS, MAX_SEGMENTS, MAX_WRITE_SEGMENTS};
pub use negotiate::{ConnectionTerms, FIRST_MESSAGE_LEN, Phase, Session, connect_data};
