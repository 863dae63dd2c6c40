//! Decoding and encoding of a generated type. The input is the type's index, then the bytes to decode.

use rpcrdma_xdrgen_tests::FILES;

pub fn run(data: &[u8]) {
    let Some((index, bytes)) = data.split_first_chunk() else { return };
    let types = FILES.iter().flat_map(|file| file.types);
    let Some((_, recode)) = types.clone().nth(usize::from(u16::from_be_bytes(*index)) % types.count()) else { return };
    // The encoding of a decoded value has the same length, and decodes to the same value.
    if let Ok(encoded) = recode(bytes) {
        assert_eq!(encoded.len(), bytes.len());
        assert_eq!(recode(&encoded).as_ref(), Ok(&encoded));
    }
}
