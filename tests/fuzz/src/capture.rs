//! Capture files. Their records are given to what `packets` tries by itself.

use rpcrdma_tools::capture::{self, CaptureError};
use rpcrdma_tools::{iwarp, roce};

/// Runs one input.
pub fn run(data: &[u8]) {
    let (mut roce, mut iwarp) = (roce::Reassembler::default(), iwarp::Reassembler::default());
    let (mut frames, mut left) = (0, data.len());
    let read = capture::read(data, |packet| {
        frames += 1;
        assert_eq!(packet.frame, frames);
        // Each byte of the file is in one packet at most.
        left = left.checked_sub(packet.bytes.len()).expect("more bytes than there were");
        let _ = (roce.packet(&packet), iwarp.packet(&packet));
        Ok::<_, CaptureError>(())
    });
    match read {
        Ok(all) => assert_eq!(all, frames),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}
