//! Tests of generated types: names, bounds, unions, lists, recursion and eligible items.

use rpcrdma_xdr::{
    BadXdr, Bulk, BulkLocation, BulkPlacement, Decode, Decoder, Encode, EncodeError, Encoder, MAX_DEPTH,
    ReceivedChunks, Recursive, decode, encode,
};
use rpcrdma_xdrgen_tests::circular::{Branch, Node, Own, Repeated};
use rpcrdma_xdrgen_tests::every::*;

/// Checks that a value is encoded as `words`, and that these decode to the value.
fn assert_encoding<'a, T: Decode<'a> + Encode + PartialEq + std::fmt::Debug>(value: &T, words: &'a [[u8; 4]]) {
    assert_eq!(encode(value).expect("within bounds"), words.as_flattened(), "{value:?}");
    assert_eq!(decode::<T>(words.as_flattened()).as_ref(), Ok(value));
}

const fn word(word: u32) -> [u8; 4] {
    word.to_be_bytes()
}

#[test]
fn generated_names_follow_the_conventions_of_rust() {
    let to = Numbers { small: -1, large: 2, wide: -3, wider: 4, single: 1.0, precise: -2.0 };
    let words = Words {
        r#type: 1,
        r#gen: 2,
        r#match: true,
        self_: Color::Green,
        from: 5,
        words: 6,
        to,
        r#fn: [Color::Red, Color::Negative],
    };
    let numbers = [!0, 2, !0, !2, 0, 4, 0x3F80_0000, 0xC000_0000, 0].map(word);
    let front = [1, 2, 1, 1, 5, 6].map(word);
    assert_encoding(&words, &[&front[..], &numbers, &[word(0), word(3_u32.wrapping_neg())]].concat());

    let (first, second) = (SomeThing { a_b: 1, a_b_: 2 }, SomeThing_ { result: [3; 8] });
    assert_encoding(&first, &[word(1), word(2)]);
    assert_encoding(&second, &[[3; 4]; 2]);
    assert_encoding(&Option_ { some: 7 }, &[word(7)]);
    assert_eq!((BOUND, HEX), (5, 16));
    assert_eq!([Status4::Bad as i32, Status4::Worse as i32, Status4::Other as i32], [10020, 10021, 7]);
    assert_eq!(Color::Negative.name(), "COLOR_NEGATIVE");
    assert_eq!((Color::default(), Numbers::default().small), (Color::Red, 0));
}

#[test]
fn views_live_as_long_as_the_message() {
    fn called(message: &[u8]) -> &[u8] {
        decode::<Entry>(message).expect("an entry").called.0
    }
    let message = encode(&Entry { called: Name(b"borrowed"), ..Entry::default() }).expect("within bounds");
    assert_eq!(called(&message), b"borrowed");
}

#[test]
fn bounds_of_typedefs_hold_for_all_uses() {
    let long = [b'x'; 33];
    let fits = |items: &Items<'_>| encode(items).is_ok();
    assert!(fits(&Items { called: Name(&long[..32]), token: Cookie(&long[..5]), ..Items::default() }));
    assert!(!fits(&Items { called: Name(&long), ..Items::default() }));
    assert!(!fits(&Items { part: Name(&long), ..Items::default() }));
    assert!(!fits(&Items { few: &long[..6], ..Items::default() }));
    assert!(!fits(&Items { short_text: &long[..17], ..Items::default() }));
    let names = [Name(&long[..1]); 5];
    assert!(encode(&Arrays { names: names[..4].into(), ..Arrays::default() }).is_ok());
    assert!(encode(&Arrays { names: names[..].into(), ..Arrays::default() }).is_err());
    let optional = |token| encode(&Optional { token, ..Optional::default() });
    assert!(optional(Some(Cookie(&long[..5]))).is_ok());
    assert!(optional(Some(Cookie(&long[..6]))).is_err());

    let message = [0, 0, 1, 6].map(word);
    let bad = BadXdr { what: "optional.token", at: 12 };
    assert_eq!(decode::<Optional<'_>>(message.as_flattened()), Err(bad));
    let bad = BadXdr { what: "path", at: 4 };
    assert_eq!(decode::<MaybeNames<'_>>(message[2..].as_flattened()), Err(bad));
}

#[test]
fn unions_have_the_variants_of_their_cases() {
    assert_encoding(&ByEnum::Worse, &[word(10021)]);
    assert_encoding(&ByEnum::Default(Status4::Other, Name(b"abcd")), &[word(7), word(4), *b"abcd"]);
    assert_encoding(&AllOfEnum::Green([1; 8]), &[word(1), [1; 4], [1; 4]]);
    assert_encoding(&ByInt::Bound(true), &[word(5), word(1)]);
    assert_encoding(&ByInt::CaseMinus2, &[word(2_u32.wrapping_neg())]);
    assert_encoding(&ByInt::Default(-7, 9), &[word(7_u32.wrapping_neg()), word(9)]);
    assert_encoding(&ByBool::False(3), &[word(0), word(3)]);
    assert_encoding::<MaybeHandle>(&Some([2; 8]), &[word(1), [2; 4], [2; 4]]);
    assert_encoding::<MaybeHandle>(&None, &[word(0)]);

    // The discriminant of a default arm must not be one of the cases.
    let refused = Err(EncodeError::switch());
    assert_eq!(encode(&ByEnum::Default(Status4::Bad, Name(b"abcd"))), refused);
    assert_eq!(encode(&ByInt::Default(-2, 9)), refused);

    let error = |at| BadXdr { what: "by_unsigned", at };
    assert_eq!(decode::<ByUnsigned<'_>>(&word(3)), Err(error(0)));
    assert_eq!(decode::<AllOfEnum<'_>>(&word(2)), Err(BadXdr { what: "color", at: 0 }));
    assert!(decode::<ByEnum<'_>>(&[]).is_err());
}

#[test]
fn lists_have_no_pointers() {
    let value = Numbers { large: 8, ..Numbers::default() };
    let entries = [Entry { called: Name(b"a"), value }, Entry { called: Name(b"bcde"), ..Entry::default() }];
    let bytes = encode(&Directory { entries: entries[..].into(), eof: true }).expect("within bounds");
    let directory: Directory<'_> = decode(&bytes).expect("a directory");
    assert!(directory.entries.iter().eq(entries) && directory.eof);
    assert_eq!(bytes.len(), 2 * (4 + 4 + 4 + 36) + 4 + 4);
    assert_encoding(&Chains::default(), &[word(0), word(0)]);
}

#[test]
fn recursive_values_are_decoded_up_to_the_maximum_depth() {
    let nested_trees = |depth: usize| {
        let mut words = Vec::new();
        (0..depth).for_each(|level| words.extend([word(level as u32), word(1)]));
        // The innermost tree, and the right branches of all levels.
        words.extend([[0; 4]; 3]);
        words.extend(vec![[0; 4]; depth]);
        words
    };
    let words = nested_trees(MAX_DEPTH);
    let mut tree: Tree<'_> = decode(words.as_flattened()).expect("the deepest allowed nesting");
    assert_eq!(encode(&tree).expect("within bounds"), words.as_flattened());
    for level in 0..MAX_DEPTH {
        assert_eq!((tree.value as usize, tree.right), (level, None));
        tree = tree.left.expect("a branch").get();
    }
    assert_eq!(tree, Tree::default());

    for depth in [MAX_DEPTH + 1, 1_000_000] {
        let words = nested_trees(depth);
        let error = decode::<Tree<'_>>(words.as_flattened()).expect_err("too deep");
        assert_eq!(error.what, "nesting depth");
    }
}

#[test]
fn recursive_values_are_made_from_the_leaves() {
    let (mut memory, mut last) = (vec![Vec::new(); MAX_DEPTH], Vec::new());
    let mut term = Term::Default(9);
    for memory in &mut memory {
        term = Term::Case1(Some(Recursive::new(&term, memory).expect("within the limit")));
    }
    let bytes = encode(&term).expect("within bounds");
    assert_eq!(decode(&bytes), Ok(term));
    let deeper = Recursive::new(&term, &mut last);
    assert_eq!(deeper.expect_err("too deep"), EncodeError::depth(MAX_DEPTH));

    let mut leaf = Vec::new();
    let leaf = Recursive::new(&Forest { id: 7, ..Forest::default() }, &mut leaf).expect("a tree");
    assert_encoding(&Forest { id: 1, trees: Forests([leaf; 2][..].into()) }, &[1, 2, 7, 0, 7, 0].map(word));
    assert!(encode(&Forest { id: 1, trees: Forests([leaf; 4][..].into()) }).is_err());
    assert_eq!(format!("{leaf:?}"), "Forest { id: 7, trees: Forests([]) }");
}

#[test]
fn typedefs_and_optional_data_may_contain_themselves() {
    let (mut memory, mut inner) = (Vec::new(), Vec::new());
    let last = Followed(Some(None));
    let last = Recursive::new(&last, &mut memory).expect("within the limit");
    assert_encoding(&Followed(Some(Some(last))), &[1, 1, 1, 0].map(word));
    assert_eq!(encode(&Followed::default()).expect("within bounds"), word(0));
    let none = Recursive::new(&Repeated(None), &mut inner).expect("within the limit");
    assert_encoding(&Repeated(Some([none; 3][..].into())), &[1, 3, 0, 0, 0].map(word));
    assert!(encode(&Repeated(Some([none; 4][..].into()))).is_err());

    let words: Vec<_> = [1; 5].into_iter().chain([0]).map(word).collect();
    assert_eq!(
        encode(&decode::<Own<'_>>(words.as_flattened()).expect("five pointers")),
        Ok(words.as_flattened().into())
    );
    let branch = Branch::default();
    assert_eq!(branch, None::<Node<'_>>);
    for depth in [MAX_DEPTH + 1, 1_000_000] {
        let error = decode::<Own<'_>>(vec![word(1); depth].as_flattened()).expect_err("too deep");
        assert_eq!(error.what, "nesting depth");
    }
}

/// One chunk, with an item of this content at this position.
#[derive(Debug)]
struct Chunk(&'static [u8], usize);

impl ReceivedChunks for Chunk {
    fn item(&self, _: usize, used: usize, position: usize, len: usize) -> Option<&[u8]> {
        (used == 0 && position == self.1 && len == self.0.len()).then_some(self.0)
    }

    fn is_complete(&self, used: usize) -> bool {
        used == 1
    }
}

/// Places items that are not inline in chunks, and records their positions.
struct Apart(Vec<usize>);

impl BulkPlacement for Apart {
    fn place(&mut self, _: usize, bulk: &Bulk<'_>, position: usize) -> Result<BulkLocation, EncodeError> {
        if !bulk.is_placed() {
            return Ok(BulkLocation::Inline);
        }
        self.0.push(position);
        Ok(BulkLocation::Apart)
    }
}

#[test]
fn eligible_items_travel_in_the_message_or_in_chunks() {
    let inline = Bulky { before: 1, data: b"data".as_slice().into(), between: 2, target: b"target".as_slice().into() };
    assert_encoding(&inline, &[word(1), word(4), *b"data", word(2), word(6), *b"targ", *b"et\0\0"]);
    assert!(encode(&Bulky { data: (&[0; 4097][..]).into(), ..inline }).is_err());

    let reduced = Bulky { target: Bulk::placed(6), ..inline };
    let (mut message, mut apart) = ([0; 20], Apart(Vec::new()));
    assert_eq!(reduced.encoded_len(), message.len());
    reduced.encode(&mut Encoder::placing(&mut message, &mut apart)).expect("room");
    assert_eq!(apart.0, [20]);

    let chunk = Chunk(b"target", 20);
    let mut from = Decoder::with_chunks(&message, &chunk);
    assert_eq!(Bulky::decode(&mut from), Ok(inline));
    assert_eq!(from.end(), Ok(()));
}
