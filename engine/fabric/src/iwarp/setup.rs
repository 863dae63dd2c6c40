//! Connection setup before the first FPDU: RFC 5044 §7.1, RFC 6581. Without I/O.
//!
//! The initiator sends first. After the reply it sends an empty Write. Then the responder may send too (peer-to-peer
//! mode, RFC 6581 §9.3). The responder is silent until then; a client that is not peer-to-peer sends its first message
//! anyway.

#![forbid(unsafe_code)]

use super::config::{Crc, FpduSize, IwarpConfig, MAX_READ_DEPTH};
use super::wire::{Enhanced, Fault, Kind, MAX_PRIVATE_DATA, MAX_ULPDU, Setup, fpdu_len};
use crate::ConnectParams;

/// Identification of this engine, behind the private data. Upper layers that read theirs from the front, as in RFC
/// 8797, do not see it.
const MARK: &[u8; 8] = b"rpcrdma\x01";
/// The MPA revision in use.
const REVISION: u8 = 2;
/// A depth without negotiation (RFC 6581 §9.1).
const NOT_NEGOTIATED: u16 = MAX_READ_DEPTH;
/// The assumed values of a request that is not enhanced. Its sender has stated no depth: it gets one Read at a time.
const NOT_ENHANCED: Enhanced =
    Enhanced { ird: 1, ord: NOT_NEGOTIATED, peer_to_peer: false, rtr_send: false, rtr_write: false, rtr_read: false };
/// Bytes of private data that are left to the upper layer.
pub(super) const PRIVATE_DATA: usize = MAX_PRIVATE_DATA - 4 - MARK.len();

/// The negotiated terms of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Negotiated {
    /// FPDUs carry a CRC.
    pub(super) crc: bool,
    /// Reads of ours that may be outstanding.
    pub(super) ord: u16,
    /// Reads of the peer that may be outstanding.
    pub(super) ird: u16,
    /// Whether the initiator's first message is an empty Write, awaited by the peer.
    pub(super) rtr: bool,
    /// The peer is this engine, too.
    pub(super) is_ours: bool,
}

/// The initiator's reason to decline the reply's offer, and its Terminate fault.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Refusal {
    pub(super) fault: Fault,
    pub(super) why: String,
    /// The message carries a CRC.
    pub(super) crc: bool,
}

/// The parameters that one end requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct RequestedParameters {
    crc: Crc,
    ird: u16,
    ord: u16,
}

impl RequestedParameters {
    pub(super) fn new(config: &IwarpConfig, params: &ConnectParams) -> Self {
        let most = config.read_depth.min(MAX_READ_DEPTH - 1);
        // One at least: soft-iWARP refuses a peer that takes no Reads.
        let depth = |wanted: u16| wanted.clamp(1, most);
        Self { crc: config.crc, ird: depth(params.responder_resources), ord: depth(params.initiator_depth) }
    }

    /// Our depths, with an empty Write as the ready-to-receive indication in peer-to-peer mode.
    fn enhanced(self, peer_to_peer: bool) -> Enhanced {
        Enhanced { ird: self.ird, ord: self.ord, peer_to_peer, rtr_write: peer_to_peer, ..Enhanced::default() }
    }

    /// The initiator's frame.
    pub(super) fn request(self, private_data: &[u8]) -> Setup {
        Setup {
            crc: self.crc == Crc::Always,
            enhanced: Some(self.enhanced(true)),
            private_data: [private_data, MARK].concat(),
            ..Setup::new(Kind::Request, REVISION)
        }
    }

    /// The responder's reply frame and the connection's terms; or the refusal.
    pub(super) fn answer(self, request: &Setup, private_data: &[u8]) -> Result<(Setup, Negotiated), String> {
        self.check(request)?;
        let theirs = request.enhanced.unwrap_or(NOT_ENHANCED);
        let rtr_read = theirs.peer_to_peer && !theirs.rtr_write && theirs.rtr_read;
        if theirs.ird == 0 {
            return Err("it takes no RDMA Reads (IRD 0), by which the arguments of calls come".to_owned());
        }
        let agreed = Negotiated {
            crc: request.crc || self.crc == Crc::Always,
            ord: lower(self.ord, theirs.ird),
            // The initiator's ready message may be a Read: one must fit.
            ird: lower(self.ird, theirs.ord).max(rtr_read.into()),
            rtr: false,
            is_ours: request.private_data.ends_with(MARK),
        };
        // The answer is enhanced as the request is (RFC 6581 §10).
        let enhanced = request.enhanced.map(|_| Enhanced {
            // Values that the initiator excludes are not negotiated (RFC 6581 §9.1).
            ird: if is_negotiated(theirs.ord) { agreed.ird } else { NOT_NEGOTIATED },
            ord: if is_negotiated(theirs.ird) { agreed.ord } else { NOT_NEGOTIATED },
            // One that is possible here is named even if the initiator has named none such (RFC 6581 §9.2).
            rtr_write: theirs.peer_to_peer && !rtr_read,
            rtr_read,
            ..self.enhanced(theirs.peer_to_peer)
        });
        let private_data = [private_data, MARK].concat();
        let reply = Setup { crc: agreed.crc, enhanced, private_data, ..Setup::new(Kind::Reply, request.revision) };
        Ok((reply, agreed))
    }

    /// The initiator's terms by this answer. An error is why it cannot be.
    pub(super) fn conclude(self, reply: &Setup) -> Result<Negotiated, Refusal> {
        // If either end requires a CRC (RFC 5044 §7.1.1).
        let crc = reply.crc || self.crc == Crc::Always;
        let refusal = |fault, why: String| Refusal { fault, why, crc };
        let enhanced = self.check(reply).and_then(|()| reply.enhanced.ok_or("its answer is not enhanced".to_owned()));
        let theirs = enhanced.map_err(|why| refusal(Fault::MpaCatastrophic, why))?;
        if is_negotiated(theirs.ord) && theirs.ord > self.ird {
            let why = format!("it wants {} Reads at a time, of which {} are taken here", theirs.ord, self.ird);
            return Err(refusal(Fault::InsufficientIrd, why));
        }
        if theirs.peer_to_peer && !theirs.rtr_write {
            let why = "it wants another first message than an empty Write".to_owned();
            return Err(refusal(Fault::NoRtrOption, why));
        }
        let is_ours = reply.private_data.ends_with(MARK);
        Ok(Negotiated { crc, ord: lower(self.ord, theirs.ird), ird: self.ird, rtr: theirs.peer_to_peer, is_ours })
    }

    /// The responder's refusal of a request.
    pub(super) fn rejection(self, request: &Setup, private_data: &[u8]) -> Setup {
        let private_data = private_data[..private_data.len().min(PRIVATE_DATA)].to_vec();
        // In the revision that the initiator understands.
        let enhanced = request.enhanced.filter(|_| request.revision >= REVISION);
        let enhanced = enhanced.map(|theirs| self.enhanced(theirs.peer_to_peer));
        let revision = request.revision.clamp(1, REVISION);
        Setup { reject: true, enhanced, private_data, ..Setup::new(Kind::Reply, revision) }
    }

    /// Refuses options that this engine does not support.
    fn check(self, frame: &Setup) -> Result<(), String> {
        if frame.markers {
            return Err("it wants markers, which are not made here (RFC 5044 §4.3)".to_owned());
        }
        if !(1..=REVISION).contains(&frame.revision) {
            return Err(format!("MPA revision {}, of which 1 and {REVISION} are spoken here", frame.revision));
        }
        if frame.crc && self.crc == Crc::Never {
            return Err("it wants CRCs, and `crc` is Never here".to_owned());
        }
        Ok(())
    }
}

/// MULPDU is never less (RFC 5044 §3), however short the segments.
const LEAST_ULPDU: usize = 128;
/// The longest FPDU: a segment of a loopback device (MTU 65536). The IPv6 and TCP headers with timestamps are
/// subtracted. A little more, as the format allows, would leave a small segment after each full write.
const LONGEST_FPDU: usize = 65536 - 40 - 32;

/// Most bytes of a ULPDU to this peer, on a path whose TCP segments hold so many bytes.
pub(super) fn max_ulpdu(size: FpduSize, is_ours: bool, segment: usize) -> usize {
    let longest = match size {
        FpduSize::Auto if is_ours => LONGEST_FPDU,
        FpduSize::Longest => LONGEST_FPDU,
        FpduSize::Auto | FpduSize::Segment => segment & !3,
    };
    // Without the length, the CRC, and the pad, which is empty.
    let longest = longest - (fpdu_len(2) - 2);
    longest.clamp(LEAST_ULPDU, MAX_ULPDU)
}

/// The private data of the sender's upper layer.
pub(super) fn private_data(frame: &Setup) -> Vec<u8> {
    frame.private_data.strip_suffix(MARK).unwrap_or(&frame.private_data).to_vec()
}

/// Whether a depth is negotiated: all ones mean not (RFC 6581 §9.1).
fn is_negotiated(depth: u16) -> bool {
    depth < NOT_NEGOTIATED
}

/// The depth that both ends allow.
fn lower(ours: u16, theirs: u16) -> u16 {
    if is_negotiated(theirs) { ours.min(theirs) } else { ours }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn requested(crc: Crc, ird: u16, ord: u16) -> RequestedParameters {
        let config = IwarpConfig { crc, ..IwarpConfig::default() };
        RequestedParameters::new(
            &config,
            &ConnectParams { responder_resources: ird, initiator_depth: ord, ..ConnectParams::default() },
        )
    }

    #[test]
    fn both_ends_come_to_the_same() {
        for (asked, answering, crc) in [
            (Crc::Never, Crc::IfAsked, Some(false)),
            (Crc::IfAsked, Crc::IfAsked, Some(false)),
            (Crc::Always, Crc::IfAsked, Some(true)),
            (Crc::IfAsked, Crc::Always, Some(true)),
            (Crc::Always, Crc::Always, Some(true)),
            (Crc::Always, Crc::Never, None),
        ] {
            let (ours, theirs) = (requested(asked, 8, 4), requested(answering, 3, 16));
            let request = ours.request(b"hello");
            assert_eq!(private_data(&request), b"hello");
            let Ok((reply, there)) = theirs.answer(&request, b"answer") else {
                assert_eq!(crc, None);
                continue;
            };
            let here = ours.conclude(&reply).expect("an agreement");
            assert_eq!((Some(here.crc), here.crc), (crc, there.crc));
            assert_eq!((here.ord, there.ird), (3, 3));
            assert_eq!((here.ird, there.ord), (8, 8));
            assert!(here.is_ours && there.is_ours);
            assert_eq!(private_data(&reply), b"answer");
        }
        let reply =
            requested(Crc::Always, 1, 1).answer(&requested(Crc::Never, 1, 1).request(b""), b"").expect("a reply").0;
        assert!(requested(Crc::Never, 1, 1).conclude(&reply).expect_err("CRCs").why.contains("Never"));
    }

    /// The longest FPDU of either kind fills a segment; none is longer.
    #[test]
    fn fpdus_are_bounded_by_the_segment() {
        use crate::iwarp::wire::{TAGGED_HEADER, UNTAGGED_HEADER};
        for segment in [536, 1220, 1440, 1447, 1448, 1460, 8948, 65_483] {
            for (size, is_ours) in [(FpduSize::Auto, false), (FpduSize::Segment, false), (FpduSize::Segment, true)] {
                let ulpdu = max_ulpdu(size, is_ours, segment);
                for header in [TAGGED_HEADER, UNTAGGED_HEADER] {
                    // As `outbound` cuts them: all but the last of a message are multiples of four.
                    let fpdu = fpdu_len(header + ((ulpdu - header) & !3));
                    assert_eq!(fpdu, segment & !3, "{size:?} to a segment of {segment}");
                }
                assert!((0..=ulpdu).all(|ulpdu| fpdu_len(ulpdu) <= segment));
            }
            for (size, is_ours) in [(FpduSize::Auto, true), (FpduSize::Longest, false)] {
                assert_eq!(fpdu_len(max_ulpdu(size, is_ours, segment)), LONGEST_FPDU, "{size:?}");
            }
        }
        assert_eq!(max_ulpdu(FpduSize::Segment, false, 20), LEAST_ULPDU, "however short");
    }

    #[test]
    fn the_kernels_request_is_answered_as_the_kernel_does() {
        // Of soft-iWARP: IRD 128, ORD 0, RFC 8797 behind them.
        let bytes = b"MPA ID Req Frame\x10\x02\x00\x0c\x00\x80\x00\x00\xf6\xab\x0e\x18\x01\x01\x03\x03";
        let (request, _) = Setup::decode(Kind::Request, bytes).expect("a frame").expect("whole");
        let (reply, agreed) = requested(Crc::IfAsked, 16, 16).answer(&request, &[]).expect("a reply");
        assert_eq!(agreed, Negotiated { crc: false, ord: 16, ird: 0, rtr: false, is_ours: false });
        let enhanced = reply.enhanced.expect("depths");
        assert_eq!((enhanced.ird, enhanced.ord, enhanced.peer_to_peer), (0, 16, false));
        assert_eq!(private_data(&request).len(), 8);
    }

    #[test]
    fn unsupported_features_are_refused_with_a_text() {
        let good = requested(Crc::IfAsked, 4, 4).request(b"");
        let answer = |frame: Setup| requested(Crc::IfAsked, 4, 4).answer(&frame, b"").expect_err("a refusal");
        assert!(answer(Setup { markers: true, ..good.clone() }).contains("markers"));
        assert!(answer(Setup { revision: 3, enhanced: None, ..good.clone() }).contains("revision 3"));
        let mut unread = good.clone();
        unread.enhanced.as_mut().expect("depths").ird = 0;
        assert!(answer(unread).contains("IRD 0"));
        let mut greedy = requested(Crc::IfAsked, 4, 9).answer(&good, b"").expect("a reply").0;
        greedy.enhanced.as_mut().expect("depths").ord = 9;
        let unwanted = requested(Crc::IfAsked, 4, 4).conclude(&greedy).expect_err("too many");
        assert!(unwanted.fault == Fault::InsufficientIrd && unwanted.why.contains("9 Reads"));
    }

    #[test]
    fn a_request_that_is_not_enhanced_is_answered_so() {
        let (ours, full) = (requested(Crc::IfAsked, 4, 5), requested(Crc::IfAsked, 4, 4).request(b"hello"));
        for revision in [1, 2] {
            let request = Setup { revision, enhanced: None, ..full.clone() };
            let (reply, agreed) = ours.answer(&request, b"answer").expect("a reply");
            assert_eq!((reply.revision, reply.enhanced), (revision, None));
            assert_eq!((agreed.ord, agreed.ird, agreed.rtr), (1, 4, false), "one Read at a time");
            assert_eq!(private_data(&reply), b"answer");
            // This side has requested an enhanced one.
            assert!(ours.conclude(&reply).expect_err("no depths").why.contains("not enhanced"));
        }
    }

    /// The depths and flags of a frame, changed.
    fn changed(mut frame: Setup, change: impl FnOnce(&mut Enhanced)) -> Setup {
        change(frame.enhanced.as_mut().expect("it is enhanced"));
        frame
    }

    #[test]
    fn crcs_are_made_if_either_end_has_asked_for_them() {
        let ours = requested(Crc::Always, 4, 4);
        let reply = requested(Crc::IfAsked, 4, 4).answer(&ours.request(b""), b"").expect("a reply").0;
        assert!(ours.conclude(&Setup { crc: false, ..reply }).expect("it need not say so").crc);
    }

    #[test]
    fn depths_that_are_not_to_be_negotiated_are_not() {
        let ours = requested(Crc::IfAsked, 4, 5);
        let request =
            changed(requested(Crc::IfAsked, 8, 8).request(b""), |depths| (depths.ird, depths.ord) = (0x3FFF, 0x3FFF));
        let (reply, agreed) = ours.answer(&request, b"").expect("a reply");
        let depths = reply.enhanced.expect("depths");
        assert_eq!((depths.ird, depths.ord), (0x3FFF, 0x3FFF));
        assert_eq!((agreed.ird, agreed.ord), (4, 5), "ours are as they were");
        let here = requested(Crc::IfAsked, 8, 8).conclude(&reply).expect("an agreement");
        assert_eq!((here.ird, here.ord), (8, 8));
    }

    #[test]
    fn the_first_message_is_one_that_both_ends_know() {
        let (asks, answers) = (requested(Crc::IfAsked, 4, 0), requested(Crc::IfAsked, 4, 4));
        let flags = |reply: &Setup| {
            let Enhanced { peer_to_peer, rtr_send, rtr_write, rtr_read, ird, .. } = reply.enhanced.expect("flags");
            (peer_to_peer, [rtr_send, rtr_write, rtr_read], ird)
        };
        let request = |write, read| {
            changed(asks.request(b""), |flags| (flags.ord, flags.rtr_write, flags.rtr_read) = (0, write, read))
        };
        // By a Read: one at least must fit.
        let (reply, agreed) = answers.answer(&request(false, true), b"").expect("a reply");
        assert_eq!((flags(&reply), agreed.ird), ((true, [false, false, true], 1), 1));
        // Unknown ones are not agreed on; known ones are named.
        let (reply, _) = answers.answer(&request(false, false), b"").expect("a reply");
        assert_eq!(flags(&reply).1, [false, true, false]);
        let unwanted = asks.conclude(&changed(reply, |flags| flags.rtr_write = false)).expect_err("none is left");
        assert_eq!(unwanted.fault, Fault::NoRtrOption);
        // A client that is not peer-to-peer sends none.
        let plain = changed(asks.request(b""), |flags| flags.peer_to_peer = false);
        let (reply, _) = answers.answer(&plain, b"").expect("a reply");
        assert_eq!(flags(&reply).1, [false; 3]);
        assert!(!asks.conclude(&reply).expect("an agreement").rtr);
    }

    #[test]
    fn a_refusal_is_in_the_revision_of_the_request() {
        let ours = requested(Crc::IfAsked, 4, 5);
        let enhanced = ours.rejection(&ours.request(b""), b"why");
        assert!(enhanced.reject && enhanced.revision == 2 && enhanced.private_data == b"why");
        assert_eq!(enhanced.enhanced.map(|depths| (depths.ird, depths.ord, depths.peer_to_peer)), Some((4, 5, true)));
        let first = Setup { revision: 1, enhanced: None, ..ours.request(b"") };
        let refusal = ours.rejection(&first, b"why");
        assert_eq!((refusal.revision, refusal.enhanced), (1, None));
        let later = Setup { revision: 9, enhanced: None, ..ours.request(b"") };
        assert_eq!(ours.rejection(&later, b"").revision, 2);
    }
}
