//! Property sets, and the operations that change characteristics.
//!
//! A decoded property set is encoded in equal bytes. No sequence of the peer's operations crashes an endpoint.

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
        run_exchange(bytes, revision);
    }
}

/// Runs steps of both ends. Each step consists of its kind, a length, and that many bytes.
fn run_exchange(mut input: &[u8], revision: Revision) {
    let mut end = Exchange::new(revision, &Properties::default(), &[PropertyId::SegmentSize]);
    let mut xid = 0;
    while let [step, len, rest @ ..] = input {
        let (bytes, following) = rest.split_at(rest.len().min(usize::from(*len)));
        input = following;
        xid += 1;
        match step & 7 {
            0 => _ = end.request(xid, &[Characteristic::ReceiveSize(8192), Characteristic::SegmentCount(4)]),
            1 => _ = end.update(Characteristic::ReceiveSize(u32::from(*len) * 64)),
            2 => _ = end.resolve(Characteristic::ReceiveSize(u32::from(*len) * 64)),
            3 => {
                let verdicts = [Verdict::Done, Verdict::Rejected, Verdict::Pending];
                let mut index = usize::from(*len);
                end.answer(|_| {
                    index += 1;
                    verdicts[index % 3]
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
            if let CharacteristicEvent::Requested(requested) = event {
                assert!(!requested.is_empty());
            }
        }
        // Unless bit 6 of the step is set, takes the pending messages, which must be decodable.
        if step & 0x40 == 0 {
            while let Some(out) = end.poll_transmit() {
                assert!(out.optinfo.len() < 200, "an operation is shorter than 200 bytes");
                let operation = Operation::parse(out.code, &out.optinfo).expect("a sent operation is decodable");
                assert_eq!(operation.code(), out.code);
                assert_eq!(out.flags == Flags::RESPONSE, out.code == OperationCode::Respond);
            }
        }
    }
}
