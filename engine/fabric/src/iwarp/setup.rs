//! Connection setup before the first FPDU, without I/O (RFC 5044 §7.1, RFC 6581).
//!
//! In peer-to-peer mode (RFC 6581 §9.3) the initiator sends an empty Write after it has received the reply. The
//! responder may send only after that. An initiator without peer-to-peer mode sends its first message instead.

#![forbid(unsafe_code)]

use super::config::{Crc, FpduSize, IwarpFabricConfig, MAX_READ_DEPTH};
use super::wire::{EnhancedData, MAX_PRIVATE_DATA, MAX_ULPDU, MpaFrame, MpaFrameKind, TerminateFault, fpdu_len};
use crate::ConnectParams;

/// Identification of this engine, after the private data. Upper layers that decode their private data from the front,
/// as in RFC 8797, ignore it.
const ENGINE_ID: &[u8; 8] = b"rpcrdma\x01";
/// The MPA revision in use.
const REVISION: u8 = 2;
/// The read depth that excludes negotiation (RFC 6581 §9.1).
const NOT_NEGOTIATED: u16 = MAX_READ_DEPTH;
/// The assumed values of a request without enhanced data. Its sender states no depth, so it gets one Read at a time.
const NOT_ENHANCED: EnhancedData = EnhancedData {
    ird: 1,
    ord: NOT_NEGOTIATED,
    peer_to_peer: false,
    rtr_send: false,
    rtr_write: false,
    rtr_read: false,
};
/// Bytes of private data available to the upper layer.
pub(super) const PRIVATE_DATA: usize = MAX_PRIVATE_DATA - 4 - ENGINE_ID.len();

/// The negotiated terms of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Negotiated {
    /// Whether FPDUs carry a CRC.
    pub(super) crc: bool,
    /// Maximum outstanding RDMA Reads of this side.
    pub(super) ord: u16,
    /// Maximum outstanding RDMA Reads of the peer.
    pub(super) ird: u16,
    /// Whether the responder waits for an empty Write as the ready-to-receive (RTR) message.
    pub(super) rtr: bool,
    /// Whether the peer also runs this engine.
    pub(super) is_same_engine: bool,
}

/// Why the initiator refuses the responder's reply, and the fault for its Terminate.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct NegotiationError {
    pub(super) fault: TerminateFault,
    pub(super) reason: String,
    /// Whether the Terminate carries a CRC.
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
    pub(super) fn new(config: &IwarpFabricConfig, params: &ConnectParams) -> Self {
        let max_depth = config.read_depth.min(MAX_READ_DEPTH - 1);
        // At least 1, because soft-iWARP refuses a peer that takes no Reads.
        let depth = |requested: u16| requested.clamp(1, max_depth);
        Self { crc: config.crc, ird: depth(params.responder_resources), ord: depth(params.initiator_depth) }
    }

    /// The depths of this side, with an empty Write as the RTR message in peer-to-peer mode.
    fn enhanced(self, peer_to_peer: bool) -> EnhancedData {
        EnhancedData { ird: self.ird, ord: self.ord, peer_to_peer, rtr_write: peer_to_peer, ..EnhancedData::default() }
    }

    /// The initiator's Request Frame.
    pub(super) fn request(self, private_data: &[u8]) -> MpaFrame {
        MpaFrame {
            crc: self.crc == Crc::Always,
            enhanced: Some(self.enhanced(true)),
            private_data: [private_data, ENGINE_ID].concat(),
            ..MpaFrame::new(MpaFrameKind::Request, REVISION)
        }
    }

    /// Returns the responder's Reply Frame and the negotiated parameters, or the reason of a refusal.
    pub(super) fn reply_to(self, request: &MpaFrame, private_data: &[u8]) -> Result<(MpaFrame, Negotiated), String> {
        self.check(request)?;
        let theirs = request.enhanced.unwrap_or(NOT_ENHANCED);
        let rtr_read = theirs.peer_to_peer && !theirs.rtr_write && theirs.rtr_read;
        if theirs.ird == 0 {
            return Err("RDMA Reads, which calls need, are not accepted (IRD 0)".to_owned());
        }
        let agreed = Negotiated {
            crc: request.crc || self.crc == Crc::Always,
            ord: negotiated_depth(self.ord, theirs.ird),
            // The initiator's RTR message may be a Read, which needs a depth of 1.
            ird: negotiated_depth(self.ird, theirs.ord).max(rtr_read.into()),
            rtr: false,
            is_same_engine: request.private_data.ends_with(ENGINE_ID),
        };
        // The reply has enhanced data if the request has (RFC 6581 §10).
        let enhanced = request.enhanced.map(|_| EnhancedData {
            // Depths that the initiator excludes are not negotiated (RFC 6581 §9.1).
            ird: if is_negotiated(theirs.ord) { agreed.ird } else { NOT_NEGOTIATED },
            ord: if is_negotiated(theirs.ird) { agreed.ord } else { NOT_NEGOTIATED },
            // The reply names a supported RTR message even if the initiator offers none of them (RFC 6581 §9.2).
            rtr_write: theirs.peer_to_peer && !rtr_read,
            rtr_read,
            ..self.enhanced(theirs.peer_to_peer)
        });
        let private_data = [private_data, ENGINE_ID].concat();
        let reply = MpaFrame {
            crc: agreed.crc,
            enhanced,
            private_data,
            ..MpaFrame::new(MpaFrameKind::Reply, request.revision)
        };
        Ok((reply, agreed))
    }

    /// Returns the initiator's parameters that follow from this reply.
    ///
    /// # Errors
    /// The reply demands something that this side does not support.
    pub(super) fn accept_reply(self, reply: &MpaFrame) -> Result<Negotiated, NegotiationError> {
        // Both ends use CRCs if either requests them (RFC 5044 §7.1.1).
        let crc = reply.crc || self.crc == Crc::Always;
        let refusal = |fault, why: String| NegotiationError { fault, reason: why, crc };
        let enhanced =
            self.check(reply).and_then(|()| reply.enhanced.ok_or("reply without enhanced data (RFC 6581)".to_owned()));
        let theirs = enhanced.map_err(|why| refusal(TerminateFault::MpaCatastrophic, why))?;
        if is_negotiated(theirs.ord) && theirs.ord > self.ird {
            let why = format!("ORD {} exceeds IRD {} of this side", theirs.ord, self.ird);
            return Err(refusal(TerminateFault::InsufficientIrd, why));
        }
        if theirs.peer_to_peer && !theirs.rtr_write {
            let why = "an empty RDMA Write is not accepted as the ready-to-receive message".to_owned();
            return Err(refusal(TerminateFault::NoRtrOption, why));
        }
        let is_same_engine = reply.private_data.ends_with(ENGINE_ID);
        Ok(Negotiated {
            crc,
            ord: negotiated_depth(self.ord, theirs.ird),
            ird: self.ird,
            rtr: theirs.peer_to_peer,
            is_same_engine,
        })
    }

    /// The responder's Reply Frame that refuses a request.
    pub(super) fn rejection(self, request: &MpaFrame, private_data: &[u8]) -> MpaFrame {
        let private_data = private_data[..private_data.len().min(PRIVATE_DATA)].to_vec();
        // The rejection has a revision that the initiator understands.
        let enhanced = request.enhanced.filter(|_| request.revision >= REVISION);
        let enhanced = enhanced.map(|theirs| self.enhanced(theirs.peer_to_peer));
        let revision = request.revision.clamp(1, REVISION);
        MpaFrame { reject: true, enhanced, private_data, ..MpaFrame::new(MpaFrameKind::Reply, revision) }
    }

    /// Checks that this engine supports the options of a frame.
    fn check(self, frame: &MpaFrame) -> Result<(), String> {
        if frame.markers {
            return Err("markers (RFC 5044 §4.3) are not supported".to_owned());
        }
        if !(1..=REVISION).contains(&frame.revision) {
            return Err(format!("unsupported MPA revision {}: expected 1 or {REVISION}", frame.revision));
        }
        if frame.crc && self.crc == Crc::Never {
            return Err("CRCs are required, but `iwarp.crc` is `never` here".to_owned());
        }
        Ok(())
    }
}

/// Minimum MULPDU (RFC 5044 §3), however short the TCP segments are.
const MIN_ULPDU: usize = 128;
/// The longest FPDU: a TCP segment of a loopback device (MTU 65536), without IPv6 header and TCP header with
/// timestamps. The format's maximum would leave a small segment after each full one.
const MAX_FPDU: usize = 65536 - 40 - 32;

/// Maximum bytes of a ULPDU to this peer, on a path whose TCP segments hold `segment` bytes.
pub(super) fn max_ulpdu(size: FpduSize, is_same_engine: bool, segment: usize) -> usize {
    let longest = match size {
        FpduSize::Auto if is_same_engine => MAX_FPDU,
        FpduSize::Longest => MAX_FPDU,
        FpduSize::Auto | FpduSize::Segment => segment & !3,
    };
    // Subtract the length and the CRC. There is no pad.
    let longest = longest - (fpdu_len(2) - 2);
    longest.clamp(MIN_ULPDU, MAX_ULPDU)
}

/// The private data of the sender's upper layer, without the engine's identification.
pub(super) fn private_data(frame: &MpaFrame) -> Vec<u8> {
    frame.private_data.strip_suffix(ENGINE_ID).unwrap_or(&frame.private_data).to_vec()
}

/// Whether a depth is negotiated. All ones exclude negotiation (RFC 6581 §9.1).
fn is_negotiated(depth: u16) -> bool {
    depth < NOT_NEGOTIATED
}

/// The read depth that both ends allow.
fn negotiated_depth(ours: u16, theirs: u16) -> u16 {
    if is_negotiated(theirs) { ours.min(theirs) } else { ours }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn requested(crc: Crc, ird: u16, ord: u16) -> RequestedParameters {
        let config = IwarpFabricConfig { crc, ..IwarpFabricConfig::default() };
        RequestedParameters::new(
            &config,
            &ConnectParams { responder_resources: ird, initiator_depth: ord, ..ConnectParams::default() },
        )
    }

    #[test]
    fn both_ends_agree_on_the_same_parameters() {
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
            let Ok((reply, responder)) = theirs.reply_to(&request, b"answer") else {
                assert_eq!(crc, None);
                continue;
            };
            let initiator = ours.accept_reply(&reply).expect("an agreement");
            assert_eq!((Some(initiator.crc), initiator.crc), (crc, responder.crc));
            assert_eq!((initiator.ord, responder.ird), (3, 3));
            assert_eq!((initiator.ird, responder.ord), (8, 8));
            assert!(initiator.is_same_engine && responder.is_same_engine);
            assert_eq!(private_data(&reply), b"answer");
        }
        let reply =
            requested(Crc::Always, 1, 1).reply_to(&requested(Crc::Never, 1, 1).request(b""), b"").expect("a reply").0;
        assert!(requested(Crc::Never, 1, 1).accept_reply(&reply).expect_err("CRCs").reason.contains("`never`"));
    }

    /// The longest tagged and untagged FPDUs fill a TCP segment, and no FPDU is longer.
    #[test]
    fn fpdus_are_bounded_by_the_segment() {
        use crate::iwarp::wire::{TAGGED_HEADER, UNTAGGED_HEADER};
        for segment in [536, 1220, 1440, 1447, 1448, 1460, 8948, 65_483] {
            for (size, is_same_engine) in
                [(FpduSize::Auto, false), (FpduSize::Segment, false), (FpduSize::Segment, true)]
            {
                let ulpdu = max_ulpdu(size, is_same_engine, segment);
                for header in [TAGGED_HEADER, UNTAGGED_HEADER] {
                    // `outbound` makes all payloads but the last of a message multiples of four.
                    let fpdu = fpdu_len(header + ((ulpdu - header) & !3));
                    assert_eq!(fpdu, segment & !3, "{size:?} to a segment of {segment}");
                }
                assert!((0..=ulpdu).all(|ulpdu| fpdu_len(ulpdu) <= segment));
            }
            for (size, is_same_engine) in [(FpduSize::Auto, true), (FpduSize::Longest, false)] {
                assert_eq!(fpdu_len(max_ulpdu(size, is_same_engine, segment)), MAX_FPDU, "{size:?}");
            }
        }
        assert_eq!(max_ulpdu(FpduSize::Segment, false, 20), MIN_ULPDU, "the minimum applies to shorter segments");
    }

    #[test]
    fn a_soft_iwarp_request_gets_the_reply_of_the_kernel() {
        // A request of soft-iWARP: IRD 128, ORD 0, then private data of RFC 8797.
        let bytes = b"MPA ID Req Frame\x10\x02\x00\x0c\x00\x80\x00\x00\xf6\xab\x0e\x18\x01\x01\x03\x03";
        let (request, _) = MpaFrame::decode(MpaFrameKind::Request, bytes).expect("a frame").expect("whole");
        let (reply, agreed) = requested(Crc::IfAsked, 16, 16).reply_to(&request, &[]).expect("a reply");
        assert_eq!(agreed, Negotiated { crc: false, ord: 16, ird: 0, rtr: false, is_same_engine: false });
        let enhanced = reply.enhanced.expect("depths");
        assert_eq!((enhanced.ird, enhanced.ord, enhanced.peer_to_peer), (0, 16, false));
        assert_eq!(private_data(&request).len(), 8);
    }

    #[test]
    fn unsupported_features_are_refused_with_a_reason() {
        let good = requested(Crc::IfAsked, 4, 4).request(b"");
        let answer = |frame: MpaFrame| requested(Crc::IfAsked, 4, 4).reply_to(&frame, b"").expect_err("a refusal");
        assert!(answer(MpaFrame { markers: true, ..good.clone() }).contains("markers"));
        assert!(answer(MpaFrame { revision: 3, enhanced: None, ..good.clone() }).contains("revision 3"));
        let mut no_reads = good.clone();
        no_reads.enhanced.as_mut().expect("depths").ird = 0;
        assert!(answer(no_reads).contains("IRD 0"));
        let mut greedy = requested(Crc::IfAsked, 4, 9).reply_to(&good, b"").expect("a reply").0;
        greedy.enhanced.as_mut().expect("depths").ord = 9;
        let error = requested(Crc::IfAsked, 4, 4).accept_reply(&greedy).expect_err("too many");
        assert!(error.fault == TerminateFault::InsufficientIrd && error.reason.contains("ORD 9 exceeds IRD 4"));
    }

    #[test]
    fn a_request_without_enhanced_data_gets_a_reply_without_it() {
        let (ours, full) = (requested(Crc::IfAsked, 4, 5), requested(Crc::IfAsked, 4, 4).request(b"hello"));
        for revision in [1, 2] {
            let request = MpaFrame { revision, enhanced: None, ..full.clone() };
            let (reply, agreed) = ours.reply_to(&request, b"answer").expect("a reply");
            assert_eq!((reply.revision, reply.enhanced), (revision, None));
            assert_eq!((agreed.ord, agreed.ird, agreed.rtr), (1, 4, false), "one Read at a time");
            assert_eq!(private_data(&reply), b"answer");
            // The initiator requires enhanced data in the reply.
            assert!(ours.accept_reply(&reply).expect_err("no depths").reason.contains("without enhanced data"));
        }
    }

    /// Returns the frame with changed depths or flags.
    fn with_enhanced(mut frame: MpaFrame, change: impl FnOnce(&mut EnhancedData)) -> MpaFrame {
        change(frame.enhanced.as_mut().expect("it is enhanced"));
        frame
    }

    #[test]
    fn crcs_are_used_if_either_end_requests_them() {
        let ours = requested(Crc::Always, 4, 4);
        let reply = requested(Crc::IfAsked, 4, 4).reply_to(&ours.request(b""), b"").expect("a reply").0;
        assert!(ours.accept_reply(&MpaFrame { crc: false, ..reply }).expect("an agreement").crc);
    }

    #[test]
    fn excluded_read_depths_are_not_negotiated() {
        let ours = requested(Crc::IfAsked, 4, 5);
        let request = with_enhanced(requested(Crc::IfAsked, 8, 8).request(b""), |depths| {
            (depths.ird, depths.ord) = (0x3FFF, 0x3FFF)
        });
        let (reply, agreed) = ours.reply_to(&request, b"").expect("a reply");
        let depths = reply.enhanced.expect("depths");
        assert_eq!((depths.ird, depths.ord), (0x3FFF, 0x3FFF));
        assert_eq!((agreed.ird, agreed.ord), (4, 5), "the depths of this side are unchanged");
        let initiator = requested(Crc::IfAsked, 8, 8).accept_reply(&reply).expect("an agreement");
        assert_eq!((initiator.ird, initiator.ord), (8, 8));
    }

    #[test]
    fn the_rtr_message_is_one_that_both_ends_support() {
        let (asks, answers) = (requested(Crc::IfAsked, 4, 0), requested(Crc::IfAsked, 4, 4));
        let flags = |reply: &MpaFrame| {
            let EnhancedData { peer_to_peer, rtr_send, rtr_write, rtr_read, ird, .. } = reply.enhanced.expect("flags");
            (peer_to_peer, [rtr_send, rtr_write, rtr_read], ird)
        };
        let request = |write, read| {
            with_enhanced(asks.request(b""), |flags| (flags.ord, flags.rtr_write, flags.rtr_read) = (0, write, read))
        };
        // A Read as RTR message needs an IRD of at least 1.
        let (reply, agreed) = answers.reply_to(&request(false, true), b"").expect("a reply");
        assert_eq!((flags(&reply), agreed.ird), ((true, [false, false, true], 1), 1));
        // Without a common RTR message, the reply names the supported one.
        let (reply, _) = answers.reply_to(&request(false, false), b"").expect("a reply");
        assert_eq!(flags(&reply).1, [false, true, false]);
        let error = asks
            .accept_reply(&with_enhanced(reply, |flags| flags.rtr_write = false))
            .expect_err("no RTR message is left");
        assert_eq!(error.fault, TerminateFault::NoRtrOption);
        // Without peer-to-peer mode there is no RTR message.
        let client_server = with_enhanced(asks.request(b""), |flags| flags.peer_to_peer = false);
        let (reply, _) = answers.reply_to(&client_server, b"").expect("a reply");
        assert_eq!(flags(&reply).1, [false; 3]);
        assert!(!asks.accept_reply(&reply).expect("an agreement").rtr);
    }

    #[test]
    fn a_rejection_has_the_revision_of_the_request() {
        let ours = requested(Crc::IfAsked, 4, 5);
        let enhanced = ours.rejection(&ours.request(b""), b"why");
        assert!(enhanced.reject && enhanced.revision == 2 && enhanced.private_data == b"why");
        assert_eq!(enhanced.enhanced.map(|depths| (depths.ird, depths.ord, depths.peer_to_peer)), Some((4, 5, true)));
        let first = MpaFrame { revision: 1, enhanced: None, ..ours.request(b"") };
        let refusal = ours.rejection(&first, b"why");
        assert_eq!((refusal.revision, refusal.enhanced), (1, None));
        let later = MpaFrame { revision: 9, enhanced: None, ..ours.request(b"") };
        assert_eq!(ours.rejection(&later, b"").revision, 2);
    }
}
