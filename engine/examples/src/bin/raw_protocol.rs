//! The protocol alone: what do the messages of a connection look like?
//!
//! One function passes messages between two [`Connection`]s, without device, thread or clock, and prints each message.
//!
//! `cargo run --release --bin raw_protocol`
//!
//! A [`Connection`] has the rules of one end. It reads messages, decides which messages may be sent, and writes their
//! headers in front of payloads that its owner keeps. In the engine a shard owns it; here `exchange` does.

use std::error::Error;

use rpcrdma::CreditMode;
use rpcrdma_proto::wire::{Chunks, ReadSegment, Revision, Segment, View};
use rpcrdma_proto::{ConnConfig, Connection, Form, InboundId, Outgoing, ReceivedMessage};

/// Offset of the payload in a message buffer. The header is written before it.
const HEADROOM: usize = 256;

fn main() -> Result<(), Box<dyn Error>> {
    for credit_mode in [CreditMode::V1, CreditMode::V2Windowed] {
        println!("{credit_mode:?}");
        exchange(credit_mode)?;
    }
    Ok(())
}

fn config(credit_mode: CreditMode, server: bool) -> ConnConfig {
    ConnConfig {
        credit_mode,
        server,
        accepts_calls: server,
        credits: 4,
        max_calls: if server { 0 } else { 8 },
        xid_seed: 100,
        ..ConnConfig::default()
    }
}

/// Exchanges six calls and their replies. The server fetches an argument of the last call by RDMA Read.
fn exchange(credit_mode: CreditMode) -> Result<(), Box<dyn Error>> {
    let mut client = Connection::new(config(credit_mode, false));
    let mut server = Connection::new(config(credit_mode, true));
    let calls = (0..6).map(|token| client.start_call(token, u64::MAX, 0, false)).collect::<Result<Vec<_>, _>>()?;
    // Memory of the client: 1000 bytes of the last call, which follow the first 8 of its payload.
    let target = Segment { handle: 0x17, length: 1000, offset: 0x4000 };
    let data = [ReadSegment { position: 8, target }];
    let chunks = |out| if out == Outgoing::Call(calls[5].id) { &data[..] } else { &[] };

    let (mut answered, mut batches) = (Vec::new(), Vec::new());
    while answered.len() < 6 {
        // The client sends as many calls as the server has granted. Until the first grant, version 1 sends one call,
        // and version 2 sends CONNPROP.
        let mut served: Vec<InboundId> = Vec::new();
        for message in transmit(&mut client, b"a ca\0\0\0\0", chunks)? {
            let view = View::check(&message, Revision::Ietf00);
            println!("  client -> {}", view.as_ref().map_err(|error| error.to_string())?);
            if let ReceivedMessage::Call { id } = receive(&mut server, &message) {
                served.push(id);
            }
            while let Some(event) = server.poll_event() {
                println!("            {event:?}");
            }
        }
        batches.push(served.len());
        // The server may answer in any order. Here it answers the newest call first.
        served.into_iter().rev().for_each(|id| _ = server.reply(id, false));
        for message in transmit(&mut server, b"repl\0\0\0\x01", |_| &[])? {
            let view = View::check(&message, Revision::Ietf00);
            println!("  server -> {}", view.as_ref().map_err(|error| error.to_string())?);
            if let ReceivedMessage::Reply { token, .. } = receive(&mut client, &message) {
                println!("            call {token} is answered");
                answered.push(token);
            }
            while let Some(event) = client.poll_event() {
                println!("            {event:?}");
            }
        }
    }
    println!("  calls per turn: {batches:?}");
    assert_eq!(
        batches,
        if credit_mode == CreditMode::V1 { [1, 4, 1] } else { [0, 4, 2] },
        "the server grants 4 credits"
    );
    answered.sort_unstable();
    assert_eq!(answered, [0, 1, 2, 3, 4, 5]);
    Ok(())
}

/// Passes a message to `end`, and returns the call or reply that it completes.
fn receive(end: &mut Connection, message: &[u8]) -> ReceivedMessage {
    let header = end.layouts().decode(message);
    end.handle_message(message, header.as_ref())
}

/// Forms all messages that `from` may send now. `chunks` returns the Read list of a message.
fn transmit<'a>(
    from: &mut Connection,
    payload: &[u8],
    chunks: impl Fn(Outgoing) -> &'a [ReadSegment],
) -> Result<Vec<Vec<u8>>, Box<dyn Error>> {
    let mut messages = Vec::new();
    while let Some(out) = from.poll_transmit() {
        let reads = chunks(out);
        let form = Form { chunks: Chunks { reads, ..Chunks::NONE }, ..Form::INLINE };
        let mut buffer = vec![0; HEADROOM];
        let start = from.write_header(out, &form, &mut buffer, HEADROOM).ok_or("no room for the header")?;
        if matches!(out, Outgoing::Call(_) | Outgoing::Reply(_)) {
            buffer.extend_from_slice(payload);
        }
        messages.push(buffer.split_off(start));
    }
    Ok(messages)
}
