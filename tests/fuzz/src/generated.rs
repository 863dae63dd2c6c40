//! Index of a generated type, and bytes to decode.

use rpcrdma_xdrgen_tests::FILES;

pub fn run(data: &[u8]) {
    let Some((index, bytes)) = data.split_first_chunk() else { return };
    let types = FILES.iter().flat_map(|file| file.types);
    let Some((_, again)) = types.clone().nth(usize::from(u16::from_be_bytes(*index)) % types.count()) else { return };
    // A decodable value is encoded in as many bytes, which decode to the same value.
    if let Ok(encoded) = again(bytes) {
        assert_eq!(encoded.len(), bytes.len());
        assert_eq!(again(&encoded).as_ref(), Ok(&encoded));
    }
}
