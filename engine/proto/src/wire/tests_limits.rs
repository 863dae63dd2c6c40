//! Limits of decoding and encoding, and the errors beyond them.

use super::private_data::{self, PrivateData};
use super::properties::{Properties, PropertySet};
use super::tests::bytes;
use super::tests_golden::{SEGMENTS, header};
use super::*;

/// Version 2 §6.4.3.
#[test]
fn too_many_chunks_or_segments_are_errors_that_name_the_limit() {
    let reads: Vec<_> = [8, 8, 12, 12, 12, 8].map(|position| ReadSegment { position, target: SEGMENTS[0] }).into();
    let writes = WriteList { counts: &[1, 2], segments: &SEGMENTS };
    let value = header(Body::Msg(Chunks { inv_handle: 0, reads: &reads, writes, reply: Some(&SEGMENTS) }));
    let mut out = [0; 512];
    let len = value.emit(&mut out, Version::V2, Revision::Ietf00).expect("space");
    let view = View::check(&out[..len], Revision::Ietf00).expect("valid");
    // The segments of a Read chunk need not be adjacent.
    let enough = ChunkLimits { read_chunks: 2, write_chunks: 2, segments: 3 };
    assert_eq!(view.check_limits(&enough), Ok(()));
    for (limits, error) in [
        (ChunkLimits { read_chunks: 1, ..enough }, ErrorBody::ReadChunks { max: 1 }),
        (ChunkLimits { write_chunks: 1, ..enough }, ErrorBody::WriteChunks { max: 1 }),
        (ChunkLimits { segments: 2, ..enough }, ErrorBody::Segments { max: 2 }),
    ] {
        assert_eq!(view.check_limits(&limits), Err(error));
    }
    // A Position Zero Read chunk does not count.
    let reads = [0, 8, 0].map(|position| ReadSegment { position, target: SEGMENTS[0] });
    let long = header(Body::Nomsg(Chunks { reads: &reads, ..Chunks::NONE }));
    let len = long.emit(&mut out, Version::V2, Revision::Ietf00).expect("space");
    let view = View::check(&out[..len], Revision::Ietf00).expect("valid");
    assert_eq!(view.check_limits(&ChunkLimits { read_chunks: 1, write_chunks: 0, segments: 2 }), Ok(()));
    for (limits, error) in [
        (ChunkLimits { read_chunks: 0, ..enough }, ErrorBody::ReadChunks { max: 0 }),
        (ChunkLimits { segments: 1, ..enough }, ErrorBody::Segments { max: 1 }),
    ] {
        assert_eq!(view.check_limits(&limits), Err(error));
    }
    let reply_only = header(Body::Msg(Chunks { reply: Some(&SEGMENTS), ..Chunks::NONE }));
    let len = reply_only.emit(&mut out, Version::V1, Revision::Ietf00).expect("space");
    let view = View::check(&out[..len], Revision::Ietf00).expect("valid");
    let limits = ChunkLimits { segments: 2, ..enough };
    assert_eq!(view.check_limits(&limits), Err(ErrorBody::Segments { max: 2 }));
}

/// RFC 8797 §4: format word, version 1, flag R, and sizes in kilobytes minus one. §5.2: the message may be anywhere.
#[test]
fn private_data_message() {
    let value = PrivateData { remote_invalidation: true, send_size: 4096, receive_size: 262_144 };
    let mut out = [0; private_data::LEN];
    assert_eq!(value.emit(&mut out), Ok(8));
    assert_eq!(out[..], bytes("f6ab0e18 010103ff"));
    assert_eq!(PrivateData::parse(&out), Some(value));
    assert_eq!(PrivateData::parse(&bytes("00f6ab0e 18010103 ff000000")), Some(value), "at an unaligned offset");
    assert_eq!(PrivateData::parse(&bytes("f6ab0e18 01ff0000")).map(|data| data.send_size), Some(1024));
    for none in ["", "00000000 00000000 00000000", "f6ab0e18 0201 0303", "f6ab0e18 010103"] {
        assert_eq!(PrivateData::parse(&bytes(none)), None, "{none:?}");
    }
    let odd = PrivateData { remote_invalidation: false, send_size: 0, receive_size: u32::MAX };
    assert_eq!(odd.emit(&mut out), Ok(8));
    assert_eq!(out[..], bytes("f6ab0e18 010000ff"));
    assert!(odd.emit(&mut [0; 7]).is_err());
}

#[test]
fn a_header_is_displayed_as_one_line() {
    let line = |hex: &str| View::check(&bytes(hex), Revision::Ietf00).expect("valid").to_string();
    assert_eq!(
        line(
            "d5dc15ba 00000001 00000080 00000000
             00000001 00000070 00000826 00020000 00000000 00001000 00000000
             00000001 00000001 0000071e 00010000 00000000 00002000 00000000
             00000001 00000001 0000072e 00000004 00000000 00003000  d5dc15ba 00000000"
        ),
        "v1 MSG xid=0xd5dc15ba credit=0x80 reads=[112/0x826:131072@0x1000] writes=[[0x71e:65536@0x2000]] \
         reply=[0x72e:4@0x3000] payload=8@96"
    );
    assert_eq!(line("00000001 00000001 00000040 00000004 00000002"), "v1 ERROR xid=0x00000001 credit=0x40 ERR_CHUNK");
    assert_eq!(
        line("00000001 00000002 00000040 00000004 00000005 00000007 00000008 00000002 00002000"),
        "v2 ERROR xid=0x00000001 credit=0x40 flags=RESPONSE|RECEIVED received=7 ERR_WRITE_RESOURCE(Write chunk 1 needs \
         8192 bytes)"
    );
    assert_eq!(
        line(
            "00000000 00000002 00200020 00000005 00000000 00000003
             00000002 00000004 00002000  00000004 00000000  00000009 00000003 01020300"
        ),
        "v2 CONNPROP xid=0x00000000 credit=0x200020 props=[RBSIZ:8192,RCSIZ:default,0x9:010203]"
    );
    assert_eq!(
        line("00000003 00000002 00000020 ffffff05 00000000 00000004 00000010 00000002 00000004 00002000 00000001"),
        "v2 OPTIONAL xid=0x00000003 credit=0x20 op=UPDXCH now=RBSIZ:8192 clears_pending=true"
    );
    assert_eq!(Flags(0x11).to_string(), "RESPONSE|0x10");
}

/// Nothing is written into a buffer that is too small. The error reports both sizes.
#[test]
fn a_header_beyond_its_buffer_is_an_error_with_both_sizes() {
    let value = header(Body::Msg(Chunks::NONE));
    let mut out = [0xEE; 35];
    let error = EncodeError::new(36, 35);
    assert_eq!(value.emit(&mut out, Version::V2, Revision::Ietf00), Err(error));
    assert_eq!(out, [0xEE; 35]);
    assert_eq!(error.to_string(), "needs 36 bytes of space, found 35");
    assert!(Properties::default().emit(&mut out, Revision::Ietf00).is_err());
    assert!(PropertySet::default().is_empty());
}
