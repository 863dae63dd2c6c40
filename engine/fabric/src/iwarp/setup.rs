//! What the two ends of a connection agree on before the first FPDU: RFC 5044 §7.1, RFC 6581. Without I/O.
//!
//! The initiator sends first: as soon as it has the reply, a Write of nothing, so that the responder may speak, too
//! (peer-to-peer mode, RFC 6581 §9.3). The responder is silent until then; a client that is not peer-to-peer sends its
//! first message anyway.

#![forbid(unsafe_code)]

use super::config::{Crc, FpduSize, IwarpConfig, MAX_READ_DEPTH};
use super::endpoint::{Limits, Terms};
use super::wire::{Enhanced, Kind, MAX_PRIVATE_DATA, MAX_ULPDU, Setup, UNTAGGED_HEADER, fpdu_len};
use crate::{ConnectParams, FabricError};

/// What this engine puts behind its private data, so that another one knows it. Upper layers that read theirs from the
/// front, as RFC 8797 has it, do not see it.
const MARK: &[u8; 8] = b"rpcrdma\x01";
/// Bytes of private data that are left to the upper layer.
pub(super) const PRIVATE_DATA: usize = MAX_PRIVATE_DATA - 4 - MARK.len();
/// Work requests that a send queue may have.
pub(super) const MAX_SEND_WR: u32 = 1 << 16;
/// Most windows per side and queue pair: an STag has 16 bits of index to spare.
const MAX_WINDOWS: u32 = 1 << 16;

/// What a connection is to be like.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Agreed {
    /// FPDUs carry a CRC.
    pub(super) crc: bool,
    /// Reads of ours that may be outstanding.
    pub(super) ord: u16,
    /// Reads of the peer that may be outstanding.
    pub(super) ird: u16,
    /// The peer is this engine, too.
    pub(super) is_ours: bool,
}

/// What one end asks for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Wishes {
    crc: Crc,
    ird: u16,
    ord: u16,
}

impl Wishes {
    pub(super) fn new(config: &IwarpConfig, params: &ConnectParams) -> Self {
        let most = config.read_depth.min(MAX_READ_DEPTH - 1);
        // One at least: soft-iWARP refuses a peer that takes no Reads.
        let depth = |wanted: u16| wanted.clamp(1, most);
        Self { crc: config.crc, ird: depth(params.responder_resources), ord: depth(params.initiator_depth) }
    }

    /// The initiator's frame.
    pub(super) fn request(self, private_data: &[u8]) -> Setup {
        let enhanced = Enhanced {
            ird: self.ird,
            ord: self.ord,
            peer_to_peer: true,
            rtr_send: false,
            rtr_write: true,
            rtr_read: false,
        };
        self.frame(Kind::Request, self.crc == Crc::Always, enhanced, private_data)
    }

    fn frame(self, kind: Kind, crc: bool, enhanced: Enhanced, private_data: &[u8]) -> Setup {
        let private_data = [private_data, MARK].concat();
        Setup { kind, revision: 2, markers: false, crc, reject: false, enhanced: Some(enhanced), private_data }
    }

    /// The responder's: the frame to answer with, and what the connection is to be like. An error is why not.
    pub(super) fn answer(self, request: &Setup, private_data: &[u8]) -> Result<(Setup, Agreed), String> {
        let theirs = acceptable(request)?;
        if theirs.ird == 0 {
            return Err("it takes no RDMA Reads (IRD 0), by which the arguments of calls come".to_owned());
        }
        if request.crc && self.crc == Crc::Never {
            return Err("it wants CRCs, and `crc` is Never here".to_owned());
        }
        let agreed = Agreed {
            crc: request.crc || self.crc == Crc::Always,
            ord: within(self.ord, theirs.ird),
            ird: within(self.ird, theirs.ord),
            is_ours: request.private_data.ends_with(MARK),
        };
        let enhanced = Enhanced {
            ird: agreed.ird,
            ord: agreed.ord,
            peer_to_peer: theirs.peer_to_peer,
            rtr_send: false,
            rtr_write: theirs.peer_to_peer && theirs.rtr_write,
            rtr_read: theirs.peer_to_peer && !theirs.rtr_write && theirs.rtr_read,
        };
        Ok((self.frame(Kind::Reply, agreed.crc, enhanced, private_data), agreed))
    }

    /// The initiator's: what the connection is to be like by this answer. An error is why it cannot be.
    pub(super) fn conclude(self, reply: &Setup) -> Result<Agreed, String> {
        let theirs = acceptable(reply)?;
        if reply.crc && self.crc == Crc::Never {
            return Err("it wants CRCs, and `crc` is Never here".to_owned());
        }
        if !reply.crc && self.crc == Crc::Always {
            return Err("it makes no CRCs, and `crc` is Always here".to_owned());
        }
        if is_said(theirs.ord) && theirs.ord > self.ird {
            return Err(format!("it wants {} Reads at a time, of which {} are taken here", theirs.ord, self.ird));
        }
        let is_ours = reply.private_data.ends_with(MARK);
        Ok(Agreed { crc: reply.crc, ord: within(self.ord, theirs.ird), ird: self.ird, is_ours })
    }
}

/// The longest FPDU: what one segment of a loopback device holds, whose MTU is 65536, behind the headers of IPv6 and of
/// TCP with its timestamps. A little more, as the format allows, would leave a small segment behind what each write of
/// several of them has filled.
const LONGEST_FPDU: usize = 65536 - 40 - 32;

/// The terms of a connection: what was agreed on, and what a segment of the path to the peer carries.
pub(super) fn terms(config: &IwarpConfig, agreed: Agreed, segment: impl FnOnce() -> usize, waits: bool) -> Terms {
    let longest = match config.fpdu_size {
        FpduSize::Auto if agreed.is_ours => LONGEST_FPDU,
        FpduSize::Longest => LONGEST_FPDU,
        FpduSize::Auto | FpduSize::Segment => segment() & !3,
    };
    // Without the length, the pad, of which there is none, and the CRC.
    let longest = longest - (fpdu_len(2) - 2);
    Terms {
        crc: agreed.crc,
        max_ulpdu: longest.clamp(UNTAGGED_HEADER + 4, MAX_ULPDU),
        max_message: config.max_message,
        ord: agreed.ord,
        ird: agreed.ird,
        waits,
    }
}

/// What a new queue pair is made with.
pub(super) fn limits(params: &ConnectParams) -> Result<Limits, FabricError> {
    let misuse = |what: &str, got: usize, most: usize| {
        if got <= most { Ok(()) } else { Err(FabricError::Misuse(format!("{what}: {got}; at most {most}"))) }
    };
    misuse("bytes of private data", params.private_data.len(), PRIVATE_DATA)?;
    misuse("send_queue_depth", params.send_queue_depth as usize, MAX_SEND_WR as usize)?;
    misuse("windows", params.windows as usize, MAX_WINDOWS as usize)?;
    Ok(Limits {
        send_queue_depth: params.send_queue_depth as usize,
        own_receive_queue: params.own_receive_queue.map(|depth| depth as usize),
        windows: params.windows,
        rnr_retry: params.rnr_retry,
    })
}

/// What the upper layer of the sender says.
pub(super) fn private_data(frame: &Setup) -> Vec<u8> {
    frame.private_data.strip_suffix(MARK).unwrap_or(&frame.private_data).to_vec()
}

/// The responder's refusal.
pub(super) fn rejection(private_data: &[u8]) -> Setup {
    let private_data = private_data[..private_data.len().min(PRIVATE_DATA)].to_vec();
    Setup { kind: Kind::Reply, revision: 2, markers: false, crc: false, reject: true, enhanced: None, private_data }
}

/// Whether a depth is one: all ones say that nothing is negotiated (RFC 6581 §9.1).
fn is_said(depth: u16) -> bool {
    depth < MAX_READ_DEPTH
}

fn within(ours: u16, theirs: u16) -> u16 {
    if is_said(theirs) { ours.min(theirs) } else { ours }
}

/// What this engine does not do, and says so.
fn acceptable(frame: &Setup) -> Result<Enhanced, String> {
    if frame.markers {
        return Err("it wants markers, which are not made here (RFC 5044 §4.3)".to_owned());
    }
    match frame.enhanced {
        Some(enhanced) if frame.revision == 2 => {
            if enhanced.peer_to_peer && frame.kind == Kind::Request && !enhanced.rtr_write && !enhanced.rtr_read {
                return Err("it is peer-to-peer, and its first message can be neither a Write nor a Read".to_owned());
            }
            Ok(enhanced)
        }
        _ => Err(format!(
            "MPA revision {}{}, where 2, enhanced, is wanted: it says how many Reads may be outstanding (RFC 6581)",
            frame.revision,
            if frame.enhanced.is_some() { "" } else { ", not enhanced" }
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wishes(crc: Crc, ird: u16, ord: u16) -> Wishes {
        let config = IwarpConfig { crc, ..IwarpConfig::default() };
        Wishes::new(
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
            let (ours, theirs) = (wishes(asked, 8, 4), wishes(answering, 3, 16));
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
        let reply = wishes(Crc::Always, 1, 1).answer(&wishes(Crc::Never, 1, 1).request(b""), b"").expect("a reply").0;
        assert!(wishes(Crc::Never, 1, 1).conclude(&reply).expect_err("CRCs").contains("Never"));
    }

    /// The longest FPDU of either kind fills a segment, and no FPDU is longer.
    #[test]
    fn fpdus_are_bounded_by_the_segment() {
        use crate::iwarp::wire::TAGGED_HEADER;
        let longest = |fpdu_size, is_ours, segment: usize| {
            let config = IwarpConfig { fpdu_size, ..IwarpConfig::default() };
            let agreed = Agreed { crc: false, ord: 1, ird: 1, is_ours };
            terms(&config, agreed, || segment, false).max_ulpdu
        };
        for segment in [536, 1220, 1440, 1447, 1448, 1460, 8948, 65_483] {
            for (size, is_ours) in [(FpduSize::Auto, false), (FpduSize::Segment, false), (FpduSize::Segment, true)] {
                let ulpdu = longest(size, is_ours, segment);
                for header in [TAGGED_HEADER, UNTAGGED_HEADER] {
                    // As `outbound` cuts them: all but the last of a message are multiples of four.
                    let fpdu = fpdu_len(header + ((ulpdu - header) & !3));
                    assert_eq!(fpdu, segment & !3, "{size:?} to a segment of {segment}");
                }
                assert!((0..=ulpdu).all(|ulpdu| fpdu_len(ulpdu) <= segment));
            }
            for (size, is_ours) in [(FpduSize::Auto, true), (FpduSize::Longest, false)] {
                assert_eq!(fpdu_len(longest(size, is_ours, segment)), LONGEST_FPDU, "{size:?}");
            }
        }
        assert_eq!(longest(FpduSize::Segment, false, 20), UNTAGGED_HEADER + 4, "however short: something goes");
    }

    #[test]
    fn the_kernels_request_is_answered_as_the_kernel_does() {
        // Of soft-iWARP: IRD 128, ORD 0, RFC 8797 behind them.
        let bytes = b"MPA ID Req Frame\x10\x02\x00\x0c\x00\x80\x00\x00\xf6\xab\x0e\x18\x01\x01\x03\x03";
        let (request, _) = Setup::decode(Kind::Request, bytes).expect("a frame").expect("whole");
        let (reply, agreed) = wishes(Crc::IfAsked, 16, 16).answer(&request, &[]).expect("a reply");
        assert_eq!(agreed, Agreed { crc: false, ord: 16, ird: 0, is_ours: false });
        let enhanced = reply.enhanced.expect("depths");
        assert_eq!((enhanced.ird, enhanced.ord, enhanced.peer_to_peer), (0, 16, false));
        assert_eq!(private_data(&request).len(), 8);
    }

    #[test]
    fn what_is_not_done_here_is_refused_in_words() {
        let good = wishes(Crc::IfAsked, 4, 4).request(b"");
        let answer = |frame: Setup| wishes(Crc::IfAsked, 4, 4).answer(&frame, b"").expect_err("a refusal");
        assert!(answer(Setup { markers: true, ..good.clone() }).contains("markers"));
        assert!(answer(Setup { revision: 1, enhanced: None, ..good.clone() }).contains("revision 1"));
        let mut unread = good.clone();
        unread.enhanced.as_mut().expect("depths").ird = 0;
        assert!(answer(unread).contains("IRD 0"));
        let mut mute = good.clone();
        mute.enhanced.as_mut().expect("depths").rtr_write = false;
        assert!(answer(mute).contains("peer-to-peer"));
        let mut greedy = wishes(Crc::IfAsked, 4, 9).answer(&good, b"").expect("a reply").0;
        greedy.enhanced.as_mut().expect("depths").ord = 9;
        assert!(wishes(Crc::IfAsked, 4, 4).conclude(&greedy).expect_err("too many").contains("9 Reads"));
    }
}
