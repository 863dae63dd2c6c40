//! Model: all inputs of two ends, or of a hostile peer.

use proptest::prelude::*;

use super::*;
use crate::wire::properties::ReverseSupport;

#[derive(Clone, Debug)]
enum ExchangeStep {
    Request(bool, Vec<Characteristic>),
    Answer(bool, Verdict),
    Update(bool, Characteristic),
    Resolve(bool, Characteristic),
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

fn step() -> impl Strategy<Value = ExchangeStep> {
    let verdict = prop_oneof![Just(Verdict::Done), Just(Verdict::Rejected), Just(Verdict::Pending)];
    let end = any::<bool>;
    prop_oneof![
        2 => (end(), prop::collection::vec(value(), 1..4)).prop_map(|(end, wanted)| ExchangeStep::Request(end, wanted)),
        3 => (end(), verdict).prop_map(|(end, verdict)| ExchangeStep::Answer(end, verdict)),
        2 => (end(), value()).prop_map(|(end, value)| ExchangeStep::Update(end, value)),
        2 => (end(), value()).prop_map(|(end, value)| ExchangeStep::Resolve(end, value)),
        6 => end().prop_map(ExchangeStep::Deliver),
    ]
}

/// One end, and what its owner expects: requests without an outcome, by kind.
struct End {
    exchange: Exchange,
    requested: u64,
    ended: u64,
    pending: IdSet,
}

impl End {
    fn check_events(&mut self) {
        while let Some(event) = self.exchange.poll_event() {
            let CharacteristicEvent::Answer { wanted, outcome } = event else { continue };
            match outcome {
                ChangeOutcome::Pending => assert!(self.pending.insert(wanted.id()), "pending twice"),
                ChangeOutcome::Partial(_) => {
                    assert!(self.pending.remove(&wanted.id()));
                    self.ended += 1;
                }
                ChangeOutcome::Done | ChangeOutcome::Rejected => {
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
    to.exchange
        .handle(out.xid, out.flags, out.code.code(), &out.optinfo)
        .expect("an operation of another end is valid");
    to.check_events();
    true
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// In the end both know each other's values, and each request has ended once.
    #[test]
    fn both_ends_agree_in_the_end_and_every_request_ends_once(steps in prop::collection::vec(step(), 0..80)) {
        let new_end = || End {
            exchange: Exchange::new(Revision::Ietf00, &Properties::default(), &[]),
            requested: 0,
            ended: 0,
            pending: IdSet::default(),
        };
        let mut ends = [new_end(), new_end()];
        for (xid, step) in steps.into_iter().enumerate() {
            match step {
                ExchangeStep::Request(end, wanted) => {
                    let end = &mut ends[usize::from(end)];
                    if end.exchange.request(xid as u32, &wanted).is_ok() {
                        end.requested += wanted.len() as u64;
                    }
                }
                ExchangeStep::Answer(end, verdict) => _ = ends[usize::from(end)].exchange.answer(|_| verdict),
                ExchangeStep::Update(end, value) => {
                    ends[usize::from(end)].exchange.update(value).expect("nothing is constant");
                }
                ExchangeStep::Resolve(end, value) => {
                    let end = &mut ends[usize::from(end)].exchange;
                    let is_pending = end.answered_pending.contains(&value.id());
                    prop_assert_eq!(end.resolve(value).is_ok(), is_pending);
                }
                ExchangeStep::Deliver(from) => _ = deliver(&mut ends, usize::from(from)),
            }
        }
        // Undecided requests are decided and pending ones resolved, until nothing is left to send.
        loop {
            let mut progressed = false;
            for from in 0..2 {
                while deliver(&mut ends, from) {
                    progressed = true;
                }
                let exchange = &mut ends[from].exchange;
                progressed |= exchange.answer(|_| Verdict::Rejected);
                for value in Characteristic::all(exchange.local()) {
                    progressed |= exchange.resolve(value).is_ok();
                }
            }
            if !progressed {
                break;
            }
        }
        prop_assert_eq!(ends[0].exchange.peer(), ends[1].exchange.local());
        prop_assert_eq!(ends[1].exchange.peer(), ends[0].exchange.local());
        for end in &ends {
            prop_assert_eq!(end.requested, end.ended);
            prop_assert!(end.pending.is_empty());
            prop_assert_eq!(end.exchange.unexpected(), 0);
            prop_assert!(end.exchange.request.is_none() && end.exchange.peer_request.is_none());
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
            // A request is open most of the time.
            _ = end.request(xid, &[Characteristic::ReceiveSize(8192)]);
            let result = end.handle(xid, Flags(flags), code, &optinfo);
            if let Err(ExchangeError::UnknownOperation(_)) = result {
                prop_assert!(!(1..=4).contains(&code));
            }
            prop_assert!(end.events.len() <= 2 * COUNT);
            while end.poll_event().is_some() {}
            let answers = end.queue.iter().filter(|message| matches!(message, QueuedOperation::Answer { .. })).count();
            prop_assert!(answers + usize::from(end.peer_request.is_some()) <= MAX_ANSWERS);
        }
        while let Some(out) = end.poll_transmit() {
            prop_assert!(Operation::parse(out.code, &out.optinfo).is_ok());
            prop_assert!(out.optinfo.len() < 200);
        }
    }
}
