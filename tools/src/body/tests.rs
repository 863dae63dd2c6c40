//! Any bytes are decoded, or are an error.

use proptest::prelude::*;

use super::walk::{Chunks, Walk};
use super::*;

proptest! {
    /// Small numbers are likely, as they are flags and lengths of valid messages.
    #[test]
    fn any_bytes(words in prop::collection::vec(prop_oneof![0u32..4, any::<u32>()], 0..200), cut in 0usize..4) {
        let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_be_bytes()).collect();
        bytes.truncate(bytes.len().saturating_sub(cut));
        let none: [&str; 0] = [];
        let bodies = Bodies::new(&none).expect("built in");
        for schema in &bodies.schemas {
            let versions = schema.programs.iter().flat_map(|program| &program.versions);
            for procedure in versions.flat_map(|version| &version.procedures) {
                for types in [&procedure.arguments[..], slice::from_ref(&procedure.results)] {
                    let (value, error) = Walk::new(schema, &bytes, 0, Chunks::default()).all(types);
                    // Nothing is made up: a value takes bytes of the message.
                    prop_assert!(value.to_string().len() <= 64 * (bytes.len() + 64));
                    prop_assert!(error.is_some() || bytes.len().is_multiple_of(4));
                }
            }
        }
    }
}
