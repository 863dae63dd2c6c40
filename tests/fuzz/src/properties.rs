//! Property sets, and the operations that change them.
//!
//! Parsed properties are emitted again. An end that changes its characteristics survives any peer.

use rpcrdma::proto::exchange::{Characteristic, CharacteristicEvent, Exchange, Verdict};
use rpcrdma::wire::optional::{Operation, OperationCode};
use rpcrdma::wire::properties::{Properties, PropertyId, PropertySet};
use rpcrdma::wire::{ErrorBody, Flags, Revision, invariants};

pub fn run(data: &[u8]) {
    let [mode, bytes @ ..] = data else { return };
    let revision = Revision::ALL[usize::from(mode & 1)];
    if mode & 2 == 0 {
        invariants::properties(bytes, revision);
    } else {
        exchange(bytes, revision);
    }
}

/// Runs the peer's steps: each is a first word with a length, and its bytes.
fn exchange(mut input: &[u8], revision: Revision) {
    let mut end = Exchange::new(revision, &Properties::default(), &[PropertyId::SegmentSize]);
    let mut xid = 0;
    while let [step, len, rest @ ..] = input {
        let (bytes, behind) = rest.split_at(rest.len().min(usize::from(*len)));
        input = behind;
        xid += 1;
        match step & 7 {
            0 => _ = end.request(xid, &[Characteristic::ReceiveSize(8192), Characteristic::SegmentCount(4)]),
            1 => _ = end.update(Characteristic::ReceiveSize(u32::from(*len) * 64)),
            2 => _ = end.resolve(Characteristic::ReceiveSize(u32::from(*len) * 64)),
            3 => {
                let verdicts = [Verdict::Done, Verdict::Rejected, Verdict::Pending];
                let mut turn = usize::from(*len);
                end.answer(|_| {
                    turn += 1;
                    verdicts[turn % 3]
                });
            }
            4 => {
                let known = end.failed(u32::from(*len), &ErrorBody::InvalHtype);
                assert!(known || *len != 0);
            }
            5 => {
                if let Ok(set) = PropertySet::parse(bytes, revision) {
                    end.adopt_connprop(&set);
                }
            }
            _ => {
                let flags = if step & 8 != 0 { Flags::RESPONSE } else { Flags::NONE };
                let _ = end.handle(u32::from(step >> 4), flags, 1 + u32::from(step & 1) * 2, bytes);
                let _ = end.handle(u32::from(step >> 4), flags, 2 + u32::from(step & 1) * 2, bytes);
            }
        }
        while let Some(event) = end.poll_event() {
            if let CharacteristicEvent::Requested(wanted) = event {
                assert!(!wanted.is_empty());
            }
        }
        // Usually reads its own messages.
        if step & 0x40 == 0 {
            while let Some(out) = end.poll_transmit() {
                assert!(out.optinfo.len() < 200, "longer than it is said to be");
                let operation = Operation::parse(out.code, &out.optinfo).expect("its own is understood");
                assert_eq!(operation.code(), out.code);
                assert_eq!(out.flags == Flags::RESPONSE, out.code == OperationCode::Respond);
            }
        }
    }
}
