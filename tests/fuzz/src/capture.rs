//! Capture files, whose packets go to the reassemblers that `packets` fuzzes directly.

use rpcrdma_tools::capture::{self, CaptureError};
use rpcrdma_tools::{iwarp, roce};

pub fn run(data: &[u8]) {
    let (mut roce, mut iwarp) = (roce::Reassembler::default(), iwarp::Reassembler::default());
    let (mut frames, mut unassigned) = (0, data.len());
    let read = capture::read(data, |packet| {
        frames += 1;
        assert_eq!(packet.frame, frames);
        // Each byte of the file is in at most one packet.
        let len = packet.bytes.len();
        unassigned = unassigned.checked_sub(len).expect("the packets together are at most as long as the file");
        let _ = (roce.read_packet(&packet), iwarp.read_packet(&packet));
        Ok::<_, CaptureError>(())
    });
    match read {
        Ok(all) => assert_eq!(all, frames),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}
