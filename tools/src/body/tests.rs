//! Tests of body decoding with any bytes, and of empty results in chunks.

use proptest::prelude::*;

use super::decoder::{BodyDecoder, Chunks};
use super::*;

proptest! {
    /// Small numbers are likely, because valid messages have them as flags and lengths.
    #[test]
    fn any_bytes_are_decoded_or_rejected(
        words in prop::collection::vec(prop_oneof![0u32..4, any::<u32>()], 0..200),
        cut in 0usize..4,
    ) {
        let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_be_bytes()).collect();
        bytes.truncate(bytes.len().saturating_sub(cut));
        let none: [&str; 0] = [];
        let bodies = Bodies::new(&none).expect("built in");
        for schema in &bodies.schemas {
            let versions = schema.programs.iter().flat_map(|program| &program.versions);
            for procedure in versions.flat_map(|version| &version.procedures) {
                for types in [&procedure.arguments[..], slice::from_ref(&procedure.results)] {
                    let (value, error) = BodyDecoder::new(schema, &bytes, 0, Chunks::default()).decode_all(types);
                    // A value needs bytes of the message, so output is bounded by input.
                    prop_assert!(value.to_string().len() <= 64 * (bytes.len() + 64));
                    prop_assert!(error.is_some() || bytes.len().is_multiple_of(4));
                }
            }
        }
    }
}

/// The server returns the Write chunk of an empty result unused, and puts the next result in the next chunk.
#[test]
fn an_empty_result_takes_its_write_chunk() {
    let source = |text: &str| Source { name: "pair.x".into(), text: text.into() };
    let xdr = "struct pair { opaque first<100>; opaque second<100>; };
               program P { version V { pair GET(void) = 1; } = 1; } = 5;";
    let eligible = source("eligible = [\"pair.first\", \"pair.second\"]");
    // A version 1 header with two Write chunks of one segment each, an accepted reply, and the lengths of the results.
    let words = |lens: [u32; 2], chunks: [u32; 2]| {
        let writes = chunks.map(|len| [1, 1, 7, len, 0, 4096]).concat();
        let message = [&[9, 1, 1, 0, 0][..], &writes, &[0, 0], &[9, 1, 0, 0, 0, 0], &lens].concat();
        message.into_iter().flat_map(u32::to_be_bytes).collect::<Vec<u8>>()
    };
    let decoded = |placement: Option<&Source>, lens, chunks| {
        let schema = xdrgen::parse(&source(xdr), placement).expect("a schema");
        let bytes = words(lens, chunks);
        let view = View::check(&bytes, rpcrdma::wire::Revision::default()).expect("a header");
        let procedure = &schema.programs[0].versions[0].procedures[0];
        let decoder = BodyDecoder::new(&schema, view.payload(), 24, Chunks::of_reply(&view));
        let body = Body::decode(procedure, "results", decoder, slice::from_ref(&procedure.results), &view);
        (body.value, body.error)
    };
    let (value, error) = decoded(Some(&eligible), [0, 5], [0, 8]);
    assert_eq!(error, None);
    assert_eq!(value["second"], json!({"bytes": 5, "chunk": "write"}));
    let (_, error) = decoded(Some(&eligible), [0, 5], [8, 0]);
    assert!(error.expect("an error").contains("item of 0 bytes in a write chunk of 8 bytes"));
    let (_, error) = decoded(None, [0, 5], [0, 8]);
    assert!(error.expect("an error").contains("placement file"));
}
