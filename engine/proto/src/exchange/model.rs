//! Model: all inputs of two ends, or of a hostile peer.

use proptest::prelude::*;

use super::*;
use crate::wire::properties::ReverseSupport;

#[derive(Clone, Debug)]
enum Step {
    Request(bool, Vec<Characteristic>),
    Answer(bool, Verdict),
    Update(bool, Characteristic),
    Settle(bool, Characteristic),
    Deliver(bool),
}

fn value() -> impl Strategy<Value = Characteristic> {
    prop_oneof![
        (0u32..4).prop_map(|n| Characteristic::ReceiveSize(1024 << n)),
        (0u32..4).prop_map(|n| Characteristic::SendSize(1024 << n)),
        (0u32..4).prop_map(Characteristic::SegmentCount),
        (0u32..3).prop_map(|n| Characteristic::ReverseSupport(ReverseSupport::from_code(n))),
        any::<bool>().prop_map(Characteristic::RemoteInvalidation),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    let verdict = prop_oneof![Just(Verdict::Done), Just(Verdict::Rejected), Just(Verdict::Pending)];
    let end = any::<bool>;
    prop_oneof![
        2 => (end(), prop::collection::vec(value(), 1..4)).prop_map(|(end, wanted)| Step::Request(end, wanted)),
        3 => (end(), verdict).prop_map(|(end, verdict)| Step::Answer(end, verdict)),
        2 => (end(), value()).prop_map(|(end, value)| Step::Update(end, value)),
        2 => (end(), value()).prop_map(|(end, value)| Step::Settle(end, value)),
        6 => end().prop_map(Step::Deliver),
    ]
}

/// One end, and its owner's view: answers owed, by kind.
struct End {
    exchange: Exchange,
    requested: u64,
    ended: u64,
    pending: IdSet,
}

impl End {
    fn watch(&mut self) {
        while let Some(event) = self.exchange.poll_event() {
            let Event::Answer { wanted, outcome } = event else { continue };
            match outcome {
                Outcome::Pending => assert!(self.pending.insert(wanted.id()), "pending twice"),
                Outcome::Partial(_) => {
                    assert!(self.pending.remove(&wanted.id()));
                    self.ended += 1;
                }
                Outcome::Done | Outcome::Rejected => {
                    self.pending.remove(&wanted.id());
                    self.ended += 1;
                }
            }
        }
    }
}

fn deliver(ends: &mut [End; 2], from: usize) -> bool {
    let Some(out) = ends[from].exchange.poll_transmit() else { return false };
    let to = &mut ends[1 - from];
    to.exchange.handle(out.xid, out.flags, out.code.code(), &out.optinfo).expect("an end understands its like");
    to.watch();
    true
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// In the end both know each other's values, and each request has ended once.
    #[test]
    fn both_ends_agree_in_the_end_and_every_request_ends_once(steps in prop::collection::vec(step(), 0..80)) {
        let new = || End {
            exchange: Exchange::new(Revision::Ietf00, &Properties::default(), &[]),
            requested: 0,
            ended: 0,
            pending: IdSet::default(),
        };
        let mut ends = [new(), new()];
        for (xid, step) in steps.into_iter().enumerate() {
            match step {
                Step::Request(end, wanted) => {
                    let end = &mut ends[usize::from(end)];
                    if end.exchange.request(xid as u32, &wanted).is_ok() {
                        end.requested += wanted.len() as u64;
                    }
                }
                Step::Answer(end, verdict) => _ = ends[usize::from(end)].exchange.answer(|_| verdict),
                Step::Update(end, value) => {
                    ends[usize::from(end)].exchange.update(value).expect("nothing is constant");
                }
                Step::Settle(end, value) => {
                    let end = &mut ends[usize::from(end)].exchange;
                    let owed = end.owed.contains(&value.id());
                    prop_assert_eq!(end.settle(value).is_ok(), owed);
                }
                Step::Deliver(from) => _ = deliver(&mut ends, usize::from(from)),
            }
        }
        // Until nothing moves: undecided requests are decided, pending ones settled.
        loop {
            let mut moved = false;
            for at in 0..2 {
                while deliver(&mut ends, at) {
                    moved = true;
                }
                let exchange = &mut ends[at].exchange;
                moved |= exchange.answer(|_| Verdict::Rejected);
                for value in Characteristic::all(exchange.local()) {
                    moved |= exchange.settle(value).is_ok();
                }
            }
            if !moved {
                break;
            }
        }
        prop_assert_eq!(ends[0].exchange.peer(), ends[1].exchange.local());
        prop_assert_eq!(ends[1].exchange.peer(), ends[0].exchange.local());
        for end in &ends {
            prop_assert_eq!(end.requested, end.ended);
            prop_assert!(end.pending.is_empty());
            prop_assert_eq!(end.exchange.unexpected(), 0);
            prop_assert!(end.exchange.request.is_none() && end.exchange.asked.is_none());
        }
    }

    /// A hostile peer causes no panic, unbounded memory or unintelligible output.
    #[test]
    fn hostile_operations_are_harmless(
        messages in prop::collection::vec(
            (0u32..4, 0u32..8, 0u32..6, prop::collection::vec(prop_oneof![Just(0u8), 0u8..8, any::<u8>()], 0..64)),
            0..60,
        ),
    ) {
        let mut end = Exchange::new(Revision::Ietf00, &Properties::default(), &[]);
        for (xid, flags, code, optinfo) in messages {
            // Requests that are open at intervals.
            _ = end.request(xid, &[Characteristic::ReceiveSize(8192)]);
            let result = end.handle(xid, Flags(flags), code, &optinfo);
            if let Err(ExchangeError::UnknownOperation(_)) = result {
                prop_assert!(!(1..=4).contains(&code));
            }
            prop_assert!(end.events.len() <= 2 * COUNT);
            while end.poll_event().is_some() {}
            let answers = end.queue.iter().filter(|message| matches!(message, Message::Answer { .. })).count();
            prop_assert!(answers + usize::from(end.asked.is_some()) <= MAX_ANSWERS);
        }
        while let Some(out) = end.poll_transmit() {
            prop_assert!(Operation::parse(out.code, &out.optinfo).is_ok());
            prop_assert!(out.optinfo.len() < 200);
        }
    }
}
