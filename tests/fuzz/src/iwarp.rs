//! Bytes of an iWARP connection: a stream of FPDUs, set-up frames, and Terminate messages.

use rpcrdma::fabric::iwarp::wire::{crc32c, fpdu_len, invariants};

/// Input: the kind, the number of cuts of a stream, the cuts, then the bytes.
pub fn run(data: &[u8]) {
    let [mode, cuts, rest @ ..] = data else { return };
    let (cuts, bytes) = rest.split_at(rest.len().min(usize::from(*cuts)));
    let cuts: Vec<usize> = cuts.iter().map(|cut| usize::from(*cut)).collect();
    match mode & 3 {
        0 => invariants::stream(bytes, false, &cuts),
        1 => invariants::stream(&with_crcs(bytes), true, &cuts),
        2 => invariants::setup(bytes),
        _ => invariants::terminate(bytes),
    }
}

/// Returns the stream with a correct CRC in each complete FPDU.
fn with_crcs(stream: &[u8]) -> Vec<u8> {
    let mut stream = stream.to_vec();
    let mut rest = &mut stream[..];
    while let Some(len) = rest.first_chunk() {
        let len = fpdu_len(usize::from(u16::from_be_bytes(*len)));
        let Some((fpdu, following)) = rest.split_at_mut_checked(len) else { break };
        let (covered, crc) = fpdu.split_last_chunk_mut().expect("an FPDU has a CRC");
        *crc = crc32c(covered).to_le_bytes();
        rest = following;
    }
    stream
}
