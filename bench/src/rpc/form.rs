//! Forms of payloads: sizes, client set-up, and verification by counters.
#![forbid(unsafe_code)]

use rpcrdma::CreditMode;
use rpcrdma::wire::rpc::{self, ACCEPTED_REPLY_LEN};
use rpcrdma::wire::xdr::padded;
use rpcrdma::wire::{Version, msg_len, private_data};

use super::payload::Shape;
use super::protocol::rpcperf_v5::{PROGRAM, VERSION};
use super::service;
use crate::cli::{Direction, Form, Named, RpcOp};
use crate::counters::Counters;
use crate::failure::Failure;

/// One operation in one form, under one protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WireForm {
    pub(crate) op: RpcOp,
    /// Form of the payload; inline for `null`, which has none.
    pub(crate) form: Form,
    pub(crate) mode: CreditMode,
    /// Longest Send, in bytes.
    pub(crate) inline_threshold: usize,
}

impl WireForm {
    /// The requested `form`, or the operation's default.
    pub(crate) fn new(
        op: RpcOp,
        form: Option<Form>,
        direction: Direction,
        mode: CreditMode,
        inline_threshold: usize,
    ) -> Result<Self, Failure> {
        let usual = if op.is_bulk() { Form::Chunk } else { Form::Inline };
        let wire_form = Self { op, form: form.unwrap_or(usual), mode, inline_threshold };
        let name = wire_form.form.name();
        let refused = match (op, wire_form.form, mode) {
            (RpcOp::Null, ..) if form.is_some() => "--op null carries no payload".to_owned(),
            (RpcOp::Echo, Form::Chunk, _) => {
                "the payload of an echo cannot travel in a chunk; use --op read and write".to_owned()
            }
            (_, Form::Continued, CreditMode::V1) => {
                "version 1 has one message for a call or a reply; use --version 2".to_owned()
            }
            (_, Form::Chunk | Form::Long, CreditMode::V1) if direction != Direction::Forward => {
                "version 1 has no chunks in the reverse direction (RFC 8167 section 5.3); use --form inline or --version 2"
                    .to_owned()
            }
            _ => return Ok(wire_form),
        };
        Err(Failure::Usage(format!("--form {name}: {refused}")))
    }

    /// Longest Send that both ends agree on.
    fn threshold(&self) -> usize {
        match self.mode {
            // Version 1 states thresholds in multiples of 1024 (RFC 8797).
            CreditMode::V1 => (self.inline_threshold & !1023).min(private_data::MAX_INLINE_THRESHOLD as usize),
            CreditMode::V2Windowed | CreditMode::V2Incremental => self.inline_threshold,
        }
    }

    /// Longest RPC message in one Send.
    fn room(&self) -> usize {
        self.threshold()
            - match self.mode {
                CreditMode::V1 => msg_len(Version::V1, false),
                CreditMode::V2Incremental => msg_len(Version::V2, false),
                CreditMode::V2Windowed => msg_len(Version::V2, true),
            }
    }

    /// Lengths of the call and the reply that carry a payload of `size` bytes; 0 for a message without payload.
    fn message_lengths(&self, size: usize) -> [usize; 2] {
        let call = call_header_len();
        match self.op {
            RpcOp::Null => [0, 0],
            _ if self.form == Form::Chunk => [0, 0],
            RpcOp::Echo => [call + padded(size), ACCEPTED_REPLY_LEN + padded(size)],
            RpcOp::Read => [0, ACCEPTED_REPLY_LEN + 4 + padded(size)],
            RpcOp::Write => [call + 4 + padded(size), 0],
        }
    }

    /// True if this form carries payloads of `size` bytes.
    pub(crate) fn carries(&self, size: usize) -> bool {
        let mut messages = self.message_lengths(size).into_iter().filter(|&len| len > 0);
        match self.form {
            Form::Chunk => true,
            Form::Inline => messages.all(|len| len <= self.room()),
            Form::Continued | Form::Long => messages.all(|len| len > self.room()),
        }
    }

    /// Explains which sizes this form carries.
    pub(crate) fn explain_sizes(&self) -> String {
        let (op, threshold, room) = (self.op.name(), self.threshold(), self.room());
        let headers = self.message_lengths(0).into_iter();
        match self.form {
            Form::Chunk => "any size is possible".to_owned(),
            Form::Inline => {
                let longest = room.saturating_sub(headers.max().unwrap_or(0)) & !3;
                format!(
                    "--op {op} sends its payload inline, and in the inline threshold of {threshold} bytes there is room for \
                     {longest} beside the headers; larger payloads need --form continued, chunk or long, or a larger --inline"
                )
            }
            Form::Continued | Form::Long => {
                let least = headers.filter(|&len| len > 0).min().unwrap_or(0);
                let longest = room.saturating_sub(least) & !3;
                format!(
                    "with an inline threshold of {threshold} bytes, payloads up to {longest} bytes travel inline, in whatever \
                     form was requested; use a larger -s, or a smaller --inline"
                )
            }
        }
    }

    /// True if the payload travels in RPC messages that may exceed one Send.
    pub(crate) fn is_long(&self) -> bool {
        matches!(self.form, Form::Continued | Form::Long)
    }

    /// Shape of calls with `size` bytes of payload.
    pub(crate) fn shape(&self, size: usize) -> Shape {
        Shape { op: self.op, form: self.form, size }
    }

    /// Checks that one end's counters match at least `calls` calls with `size` bytes of payload.
    pub(crate) fn verify(&self, counted: &Counters, size: usize, calls: u64) -> Result<(), Failure> {
        let messages = self.message_lengths(size);
        let bulk = u64::from(self.op != RpcOp::Null);
        let part_room = self.room() & !3;
        // Minimum of each kind of message per call; `None` allows any number.
        let (parts, chunked, long) = match self.form {
            Form::Inline => (Some(0), Some(0), Some(0)),
            Form::Chunk => (Some(0), Some(bulk), Some(0)),
            Form::Continued => {
                let parts: usize = messages.iter().map(|len| len.div_ceil(part_room).saturating_sub(1)).sum();
                (Some(parts as u64), Some(0), Some(0))
            }
            // The other message of a call may have chunk lists.
            Form::Long => (Some(0), None, Some(messages.iter().filter(|&&len| len > 0).count() as u64)),
        };
        let both =
            |kind| counted.get(&format!("{kind}_messages_sent")) + counted.get(&format!("{kind}_messages_received"));
        let found = [
            ("messages with more to follow", both("continued"), parts),
            ("messages with chunk lists", both("chunked"), chunked),
            ("messages in chunks", both("long"), long),
        ];
        for (what, count, each) in found {
            let Some(each) = each else { continue };
            if count < calls * each || (each == 0 && count > 0) {
                return Err(Failure::Run(format!(
                    "--form {}: {calls} calls had {count} {what}, and each call should have had {each}: they did \
                     not travel in this form",
                    self.form.name()
                )));
            }
        }
        Ok(())
    }
}

/// Bytes of the RPC header of a call.
fn call_header_len() -> usize {
    let header = rpc::CallHeader {
        xid: 0,
        program: PROGRAM,
        version: VERSION,
        procedure: service::ECHO,
        credential: rpc::OpaqueAuth::NONE,
        verifier: rpc::OpaqueAuth::NONE,
    };
    header.encoded_len()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wire_form(op: RpcOp, form: Option<Form>, direction: Direction, mode: CreditMode) -> Result<WireForm, Failure> {
        WireForm::new(op, form, direction, mode, 4096)
    }

    #[test]
    fn impossible_combinations_are_explained() {
        use Direction::{Both, Forward, Reverse};
        for (op, form, direction, mode, expected) in [
            (RpcOp::Null, Form::Inline, Forward, CreditMode::V2Windowed, "no payload"),
            (RpcOp::Echo, Form::Chunk, Forward, CreditMode::V2Windowed, "read and write"),
            (RpcOp::Echo, Form::Continued, Forward, CreditMode::V1, "--version 2"),
            (RpcOp::Read, Form::Chunk, Reverse, CreditMode::V1, "RFC 8167"),
            (RpcOp::Echo, Form::Long, Both, CreditMode::V1, "RFC 8167"),
        ] {
            let error = wire_form(op, Some(form), direction, mode).unwrap_err();
            assert!(matches!(&error, Failure::Usage(text) if text.contains(expected)), "{error}");
        }
        assert_eq!(wire_form(RpcOp::Read, None, Forward, CreditMode::V1).unwrap().form, Form::Chunk);
        assert_eq!(wire_form(RpcOp::Null, None, Both, CreditMode::V1).unwrap().form, Form::Inline);
    }

    #[test]
    fn each_form_carries_the_sizes_that_it_explains() {
        for (op, least) in [(RpcOp::Echo, 24), (RpcOp::Read, 28), (RpcOp::Write, 44)] {
            let of = |form| wire_form(op, Some(form), Direction::Forward, CreditMode::V2Windowed).unwrap();
            let (within, continued) = (of(Form::Inline), of(Form::Continued));
            let longest = (1..4096).rev().find(|&size| within.carries(size)).unwrap();
            assert!(within.explain_sizes().contains(&format!("room for {longest} ")), "{}", within.explain_sizes());
            let shortest = (1..9000).find(|&size| continued.carries(size)).unwrap();
            assert!(
                continued.explain_sizes().contains(&format!("up to {} ", shortest - 1)),
                "{}",
                continued.explain_sizes()
            );
            assert_eq!(shortest - 1, (within.room() - least) & !3);
            assert!(of(Form::Long).carries(shortest) && !of(Form::Long).carries(shortest - 1));
        }
        let version_1 = WireForm::new(RpcOp::Read, Some(Form::Inline), Direction::Forward, CreditMode::V1, 5000);
        assert_eq!(version_1.unwrap().threshold(), 4096);
    }

    #[test]
    fn counters_that_contradict_the_form_are_an_error() {
        let of = |op, form| wire_form(op, Some(form), Direction::Forward, CreditMode::V2Windowed).unwrap();
        let none = Counters::default();
        let continued = of(RpcOp::Read, Form::Continued);
        assert!(continued.verify(&none, 64 << 10, 1).is_err());
        let parts = Counters::from([("continued_messages_received", 160)]);
        assert!(continued.verify(&parts, 64 << 10, 10).is_ok());
        assert!(continued.verify(&parts, 64 << 10, 11).is_err());
        assert!(of(RpcOp::Read, Form::Inline).verify(&none, 64, 1).is_ok());
        assert!(of(RpcOp::Read, Form::Inline).verify(&parts, 64, 1).is_err());
        let long =
            Counters::from([("long_messages_sent", 5), ("long_messages_received", 5), ("chunked_messages_sent", 3)]);
        assert!(of(RpcOp::Echo, Form::Long).verify(&long, 64 << 10, 5).is_ok());
        assert!(of(RpcOp::Echo, Form::Long).verify(&long, 64 << 10, 6).is_err());
        assert!(of(RpcOp::Write, Form::Chunk).verify(&long, 64 << 10, 1).is_err());
        let chunks = Counters::from([("chunked_messages_sent", 5)]);
        assert!(of(RpcOp::Write, Form::Chunk).verify(&chunks, 64 << 10, 5).is_ok());
    }
}
