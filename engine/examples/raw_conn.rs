//! The protocol without anything around it: two [`Connection`]s joined in one function, with no fabric, no
//! thread and no clock. Every message is printed as it crosses.
//!
//! `cargo run --example raw_conn`
//!
//! A [`Connection`] is one end's rules. It reads messages, says which may be sent, and writes their headers
//! in front of payloads that its owner keeps. In the engine the owner is a shard; here it is `main`.

use std::error::Error;

use rpcrdma::Scheme;
use rpcrdma_proto::wire::{Chunks, ReadSegment, Revision, Segment, View};
use rpcrdma_proto::{ConnConfig, Connection, Event, Form, InboundId, Incoming, Outgoing};

/// Where the payload starts in a message buffer; headers are written before it.
const HEADROOM: usize = 256;

fn main() -> Result<(), Box<dyn Error>> {
    for scheme in [Scheme::V1, Scheme::V2Windowed] {
        println!("{scheme:?}");
        exchange(scheme)?;
    }
    Ok(())
}

fn config(scheme: Scheme, server: bool) -> ConnConfig {
    ConnConfig {
        scheme,
        server,
        takes_calls: server,
        credits: 4,
        max_calls: if server { 0 } else { 8 },
        xid_seed: 100,
        ..ConnConfig::default()
    }
}

/// Six calls, the last with an argument that the server fetches by RDMA Read, and their replies.
fn exchange(scheme: Scheme) -> Result<(), Box<dyn Error>> {
    let mut client = Connection::new(config(scheme, false));
    let mut server = Connection::new(config(scheme, true));
    let calls = (0..6).map(|token| client.start_call(token, u64::MAX)).collect::<Result<Vec<_>, _>>()?;
    // The memory that the last call exposes: 1000 bytes that belong behind the first 8 of its payload.
    let target = Segment { handle: 0x17, length: 1000, offset: 0x4000 };
    let data = [ReadSegment { position: 8, target }];
    let chunks = |out| if out == Outgoing::Call(calls[5]) { &data[..] } else { &[] };

    let mut answered = 0;
    while answered < 6 {
        // As many calls go out as the server has granted: the first goes alone, for nothing is granted yet.
        let mut served: Vec<InboundId> = Vec::new();
        for message in transmit(&mut client, b"a ca\0\0\0\0", chunks)? {
            let view = View::check(&message, Revision::Ietf00);
            println!("  client -> {}", view.as_ref().map_err(|error| error.to_string())?);
            if let Event::Call { id, .. } = server.receive(&Incoming::checked(&view))? {
                served.push(id);
            }
        }
        // The server may answer in any order; here the youngest first.
        served.into_iter().rev().for_each(|id| server.reply(id));
        for message in transmit(&mut server, b"repl\0\0\0\x01", |_| &[])? {
            let view = View::check(&message, Revision::Ietf00);
            println!("  server -> {}", view.as_ref().map_err(|error| error.to_string())?);
            if let Event::Reply { token, .. } = client.receive(&Incoming::checked(&view))? {
                println!("            call {token} is answered");
                answered += 1;
            }
        }
    }
    Ok(())
}

/// Everything that `from` may send now. `chunks` gives the Read list of a message.
fn transmit<'a>(
    from: &mut Connection,
    payload: &[u8],
    chunks: impl Fn(Outgoing) -> &'a [ReadSegment],
) -> Result<Vec<Vec<u8>>, Box<dyn Error>> {
    let mut messages = Vec::new();
    while let Some(out) = from.poll_transmit(true) {
        let reads = chunks(out);
        let form = Form { chunks: Chunks { reads, ..Chunks::NONE }, external: false };
        let mut buffer = vec![0; HEADROOM];
        let start = from.emit_before(out, &form, true, &mut buffer, HEADROOM).ok_or("no room for the header")?;
        if matches!(out, Outgoing::Call(_) | Outgoing::Reply(_)) {
            buffer.extend_from_slice(payload);
        }
        messages.push(buffer.split_off(start));
    }
    Ok(messages)
}
