//! Capture files, read into the reassemblers that `packets` fuzzes directly.

use rpcrdma_tools::capture::{self, CaptureError};
use rpcrdma_tools::{iwarp, roce};

pub fn run(data: &[u8]) {
    let (mut roce, mut iwarp) = (roce::Reassembler::default(), iwarp::Reassembler::default());
    let (mut frames, mut left) = (0, data.len());
    let read = capture::read(data, |packet| {
        frames += 1;
        assert_eq!(packet.frame, frames);
        // Each byte of the file is in at most one packet.
        left = left.checked_sub(packet.bytes.len()).expect("more bytes than there were");
        let _ = (roce.packet(&packet), iwarp.packet(&packet));
        Ok::<_, CaptureError>(())
    });
    match read {
        Ok(all) => assert_eq!(all, frames),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}
