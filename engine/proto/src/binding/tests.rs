//! The rules of RFC 8166 §6 and §8.2.2.

use super::*;

const RPCSEC_GSS: u32 = 6;
const ONE_EACH: Binding = Binding::inline(100, 200).arguments(1, 4096).results(1, 8192);

#[test]
fn rfc_8166_6_1_only_eligible_items_may_be_reduced() {
    assert_eq!(ONE_EACH.check_call(100, &[4096], &[8192], true), Ok(()));
    let error = ONE_EACH.check_call(100, &[1, 1], &[], true).expect_err("two arguments");
    assert_eq!(error, BindingError::TooManyArguments { found: 2, max: 1 });
    assert_eq!(error.answer(), Some(ErrorBody::ReadChunks { max: 1 }));
    let error = ONE_EACH.check_call(100, &[], &[1, 1], true).expect_err("two results");
    assert!(matches!(error, BindingError::TooManyResults { found: 2, max: 1, .. }));
    assert_eq!(error.answer(), Some(ErrorBody::WriteChunks { max: 1 }));
    let error = ONE_EACH.check_call(100, &[4097], &[], true).expect_err("too long");
    assert_eq!(error, BindingError::ArgumentTooLong { index: 0, len: 4097, max: 4096 });
    assert_eq!(error.answer(), Some(ErrorBody::BadXdr), "ERR_CHUNK in version 1");
    assert_eq!(ONE_EACH.check_call(100, &[], &[1 << 20], true), Ok(()), "a Write chunk may be longer than the result");
    assert_eq!(ONE_EACH.check_call(100, &[], &[0], true), Ok(()), "an empty chunk requests the result inline");
}

#[test]
fn v2_6_4_3_ineligible_chunks_are_answered_with_zero_read_chunks_or_the_length_of_the_reply() {
    let inline = Binding::inline(100, 200);
    let error = inline.check_call(0, &[1], &[], true).expect_err("none is eligible");
    assert_eq!(error.answer(), Some(ErrorBody::ReadChunks { max: 0 }));
    let error = inline.check_call(0, &[], &[1], true).expect_err("none is eligible");
    assert_eq!(error.answer(), Some(ErrorBody::ReplyResource { length_needed: 24 + 200 }));
}

#[test]
fn rfc_8166_6_2_sizes_follow_from_the_reduction() {
    let odd = Binding::inline(100, 200).arguments(2, 5).results(1, 1001);
    assert_eq!([0, 1, 2, 3].map(|reduced| odd.call_len(reduced)), [116, 108, 100, 100]);
    assert_eq!([0, 1].map(|reduced| odd.reply_len(reduced)), [1204, 200]);
    assert_eq!(ONE_EACH.check_call(100 + 4096, &[], &[], true), Ok(()), "all inline");
    let error = ONE_EACH.check_call(101, &[4096], &[], true).expect_err("longer than the inline arguments");
    assert_eq!((error, error.answer()), (BindingError::CallTooLong { len: 101, max: 100 }, None));
    let unbounded = Binding::inline(usize::MAX, 0).arguments(3, usize::MAX - 3);
    assert_eq!(unbounded.check_call(usize::MAX, &[], &[], true), Ok(()), "no overflow");
}

#[test]
fn rfc_8166_8_2_2_nothing_is_reduced_when_the_credential_forbids_it() {
    assert_eq!(ONE_EACH.check_call(4196, &[], &[], false), Ok(()));
    for (reads, writes) in [(&[4096][..], &[][..]), (&[], &[8192])] {
        let error = ONE_EACH.check_call(100, reads, writes, false).expect_err("reduced");
        assert_eq!((error, error.answer()), (BindingError::ReductionOff, Some(ErrorBody::BadXdr)));
    }
}

#[test]
fn rfc_8166_3_4_5_2_round_up_is_known_by_the_count_in_front_of_the_chunk() {
    let argument_len = |chunk, word| ONE_EACH.argument_len(chunk, word);
    assert_eq!([5, 6, 7, 8].map(|count| argument_len(8, Some(count))), [5, 6, 7, 8].map(Some));
    // The chunk has no round-up.
    assert_eq!([argument_len(5, Some(5)), argument_len(0, Some(0))], [Some(5), Some(0)]);
    // The word is not the count of these bytes, or is missing.
    let unknown_lengths = [
        argument_len(7, Some(5)),
        argument_len(8, Some(4)),
        argument_len(8, Some(9)),
        argument_len(8, None),
        argument_len(8, Some(0)),
        argument_len(8, Some(u32::MAX)),
    ];
    assert_eq!(unknown_lengths, [None; 6]);
    let odd = Binding::inline(0, 0).arguments(1, 4094);
    assert_eq!(
        [4093, 4094, 4095, 4096].map(|count| odd.argument_len(4096, Some(count))),
        [Some(4093), Some(4094), None, None]
    );
    // The argument is an array of one word, and the word in front is its number of elements.
    assert_eq!(argument_len(4, Some(1)), Some(1));
    assert_eq!(ONE_EACH.uncounted().argument_len(4, Some(1)), Some(4));
    assert_eq!(odd.uncounted().argument_len(4096, None), Some(4094));
}

/// An RPCSEC_GSS credential (RFC 2203 §5.3.1).
fn credential(version: u32, gss_proc: u32, service: u32, handle: &[u8]) -> Vec<u8> {
    let mut body = Vec::new();
    for word in [version, gss_proc, 7, service, handle.len() as u32] {
        body.extend_from_slice(&word.to_be_bytes());
    }
    body.extend_from_slice(handle);
    body.resize(body.len().next_multiple_of(4), 0);
    body
}

#[test]
fn rfc_8166_8_2_2_2_authentication_alone_allows_reduction() {
    assert!(reduction_allowed(0, &[]), "AUTH_NONE");
    assert!(reduction_allowed(1, &[0xFF; 20]), "AUTH_SYS, with any body");
    for version in 1..=3 {
        assert!(reduction_allowed(RPCSEC_GSS, &credential(version, 0, 1, b"context")));
    }
    assert!(reduction_allowed(RPCSEC_GSS, &credential(1, 0, 1, b"")));
}

#[test]
fn rfc_8166_8_2_2_3_integrity_and_privacy_switch_reduction_off() {
    for service in [0, 2, 3, 4, u32::MAX] {
        assert!(!reduction_allowed(RPCSEC_GSS, &credential(1, 0, service, b"context")), "{service}");
    }
}

#[test]
fn rfc_8166_8_2_2_control_messages_are_never_reduced() {
    for gss_proc in [1, 2, 3, 4, 5] {
        assert!(!reduction_allowed(RPCSEC_GSS, &credential(1, gss_proc, 1, b"")), "{gss_proc}");
    }
}

#[test]
fn an_unreadable_credential_allows_no_reduction() {
    let whole = credential(1, 0, 1, b"context");
    for len in 0..whole.len() {
        assert!(!reduction_allowed(RPCSEC_GSS, &whole[..len]), "{len}");
    }
    let mut longer = whole.clone();
    longer.extend_from_slice(&[0; 4]);
    assert!(!reduction_allowed(RPCSEC_GSS, &longer));
    let mut endless = credential(1, 0, 1, b"");
    endless[16..20].fill(0xFF);
    assert!(!reduction_allowed(RPCSEC_GSS, &endless));
    assert!(!reduction_allowed(RPCSEC_GSS, &credential(4, 0, 1, b"")), "an unknown version");
    assert!(!reduction_allowed(RPCSEC_GSS, &credential(0, 0, 1, b"")));
}

#[test]
fn procedures_without_a_binding_are_not_found() {
    let mut bindings = Bindings::new();
    bindings.add(9, 1, 5, ONE_EACH).add(9, 1, 2, Binding::inline(0, 0)).add(8, 4, 5, ONE_EACH);
    assert_eq!(bindings.get(9, 1, 5), Some(&ONE_EACH));
    assert_eq!([bindings.get(9, 1, 4), bindings.get(9, 2, 5), bindings.get(7, 1, 5)], [None; 3]);
    bindings.add(9, 1, 5, Binding::inline(1, 1));
    assert_eq!(bindings.get(9, 1, 5), Some(&Binding::inline(1, 1)), "replaced");
}
