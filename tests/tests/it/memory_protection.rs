//! Protection of memory that a server exposes to a client (version 2 §10.1).
//! Only that client can reach the memory, only during the call, and only within the bounds of the memory.

use rpcrdma_tests::prelude::*;

const LEN: usize = 500;

/// A call of a server to its client, with a Read chunk and a Write chunk.
struct ExposingCall {
    client: RawPeer,
    xid: u32,
    read: Segment,
    write: Segment,
    pending: Pending,
    reverse: Client,
}

/// The address `skip` bytes after the start of a segment.
fn address_in(segment: Segment, skip: i64) -> RemoteMemory {
    RemoteMemory { rkey: segment.handle, address: segment.offset.wrapping_add_signed(skip) }
}

impl ExposingCall {
    fn new(world: &World, address: &Address, callers: &Receiver<Caller>) -> Self {
        let mut client = RawPeer::connect_offering(address, |offers| offers.reverse_support = ReverseSupport::General);
        client.call_and_receive(HELLO, Chunks::NONE, b"");
        let mut reverse = reverse_client(world, callers);
        let data = reverse.pattern_buf(1, LEN);
        let call = ClientCall::new(MIRROR).args([0; 4]).read_chunk(4, data).write_chunk(LEN as u32);
        let pending = reverse.start(call).expect("a slot");
        let call = client.answer();
        let (read, write) = (call.reads().next().expect("a Read chunk").target, call.write_chunks()[0][0]);
        let mut exposing = Self { xid: call.xid(), client, read, write, pending, reverse };
        exposing.check_data();
        exposing
    }

    /// Checks that the client can still read the memory, so only protection can deny it to other clients.
    fn check_data(&mut self) {
        let seen = self.client.read(address_in(self.read, 0), LEN).expect("the call exposes the memory");
        assert!(has_pattern(1, &seen));
    }

    /// Answers the call with `written` in the Write chunk. Returns the bytes that the server's caller receives.
    fn end(mut self, written: &[u8]) -> (RawPeer, Client, Vec<u8>) {
        if !written.is_empty() {
            self.client.write(written, address_in(self.write, 0));
        }
        let used = Lists::new().write([self.write.part(0, written.len() as u32)]);
        self.client.reply_with(self.xid, &used, &reply_bytes(self.xid, b""), None);
        let reply = self.pending.join().expect("a reply");
        let seen = reply.chunk(0).expect("the chunk").to_vec();
        (self.client, self.reverse, seen)
    }
}

/// Checks that a peer cannot write to this memory if `write` is true, or cannot read it otherwise.
fn assert_unreachable(peer: &mut RawPeer, target: RemoteMemory, len: usize, write: bool) {
    if write {
        peer.write(&vec![9; len], target);
        peer.wait_until_over_or_failed();
    } else {
        assert_eq!(peer.read(target, len), None);
    }
}

#[test]
fn memory_exposed_to_one_client_is_inaccessible_to_others() {
    let (services, callers) = services_with_hello();
    let (world, address) = World::serving("shown", small_server(), services);
    let mut exposing = ExposingCall::new(&world, &address, &callers);
    // Other clients try the accesses of the first one. The server exposes memory to some of them, too.
    for (segment, write) in [(exposing.read, false), (exposing.write, true), (exposing.write, false)] {
        assert_unreachable(&mut RawPeer::connect(&address), address_in(segment, 0), LEN, write);
        exposing.check_data();
        let mut other = ExposingCall::new(&world, &address, &callers);
        // Two connections may have equal handles, each for its own memory.
        if ![other.read.handle, other.write.handle].contains(&segment.handle) {
            assert_unreachable(&mut other.client, address_in(segment, 0), LEN, write);
        }
        drop(other);
        exposing.check_data();
    }
    let (_client, _reverse, seen) = exposing.end(&[3; LEN]);
    assert_eq!(seen, [3; LEN], "only the first client has written");
}

#[test]
fn access_to_exposed_memory_is_limited_by_rights_length_and_time() {
    let (services, callers) = services_with_hello();
    let (world, address) = World::serving("shown-bounds", small_server(), services);
    let len = LEN as i64;
    // Each case: whether the target is the Read chunk, whether the access is a write, its distance from the start of
    // the chunk, and whether the device must check bounds. The first two accesses lack the right. The others cross a
    // bound of the chunk.
    let cases = [
        (true, true, 0, false),
        (false, false, 0, false),
        (true, false, len - 1, true),
        (true, false, -1, true),
        (false, true, len - 1, true),
        (false, true, -1, true),
    ];
    for_each(cases, |(of_read, write, skip, needs_bounds)| {
        let mut exposing = ExposingCall::new(&world, &address, &callers);
        if needs_bounds && !exposing.client.checks_window_bounds() {
            exposing.end(b"");
            return;
        }
        assert_unreachable(
            &mut exposing.client,
            address_in(if of_read { exposing.read } else { exposing.write }, skip),
            2,
            write,
        );
        // The call ends because its connection closes.
        assert_eq!(outcome_of(exposing.pending.join()), Err(CallError::ConnectionLost { sent: true }));
    });
    // Memory exposed for a call is unreachable after its end.
    for write in [false, true] {
        let exposing = ExposingCall::new(&world, &address, &callers);
        let segment = if write { exposing.write } else { exposing.read };
        let (mut client, _reverse, _) = exposing.end(&[3; LEN]);
        assert_unreachable(&mut client, address_in(segment, 0), LEN, write);
    }
}
