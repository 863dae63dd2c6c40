//! Captured packets, and the messages that are reassembled from them.

use pcap_parser::Linktype;
use rpcrdma::wire::{Revision, View};
use rpcrdma_tools::capture::Packet;
use rpcrdma_tools::iwarp::{self, CaptureEvent};
use rpcrdma_tools::roce;

const LINKS: [Linktype; 6] =
    [Linktype::ETHERNET, Linktype::LINUX_SLL, Linktype::LINUX_SLL2, Linktype::RAW, Linktype::IPV6, Linktype::NULL];

/// Runs an input: the link type, then packets, each of them after its length.
pub fn run(data: &[u8]) {
    let [link, rest @ ..] = data else { return };
    let mut rest = rest;
    let link = LINKS[usize::from(link & 7).min(5)];
    let (mut roce, mut iwarp) = (roce::Reassembler::default(), iwarp::Reassembler::default());
    let (mut frame, mut unassigned) = (0, rest.len());
    while let [len, following @ ..] = rest {
        let (bytes, following) = following.split_at(following.len().min(usize::from(*len)));
        rest = following;
        frame += 1;
        let packet = Packet::new(frame, link, bytes);
        for found in roce.read_packet(&packet).map(CaptureEvent::Send).into_iter().chain(iwarp.read_packet(&packet)) {
            let message = match found {
                CaptureEvent::Send(message) => message,
                CaptureEvent::Terminate { frame: at, terminate, .. } => {
                    assert_eq!(at, frame);
                    assert!(!terminate.to_string().is_empty());
                    continue;
                }
                CaptureEvent::Unreadable { frame: at, reason, .. } => {
                    assert_eq!(at, frame);
                    assert!(!reason.is_empty());
                    continue;
                }
            };
            assert_eq!(message.frame, frame);
            // Each byte of the input is in at most one message.
            unassigned = unassigned
                .checked_sub(message.bytes.len())
                .expect("the messages together are at most as long as the input");
            let _ = View::check(&message.bytes, Revision::Ietf00).map(|view| view.to_string());
        }
    }
    assert!(roce.unfinished() + roce.retransmitted() + roce.truncated() <= frame);
    assert!(iwarp.with_gaps() <= frame);
}
