//! Protection of memory that a server exposes to a client (version 2 §10.1).
//! Only that client reaches it, during the call, within its bounds.

use rpcrdma::client::Pending;
use rpcrdma::wire::properties::ReverseSupport;
use rpcrdma_tests::prelude::*;

use super::reverse::{HELLO, telling_services};

const LEN: usize = 500;

/// A server that calls its client with a Read chunk and a Write chunk.
struct Showing {
    client: RawPeer,
    xid: u32,
    read: Segment,
    write: Segment,
    pending: Pending,
    reverse: Client,
}

fn at(segment: Segment, skip: i64) -> RemoteMemory {
    RemoteMemory { rkey: segment.handle, address: segment.offset.wrapping_add_signed(skip) }
}

impl Showing {
    fn new(world: &World, address: &Address, told: &Receiver<rpcrdma::service::Caller>) -> Self {
        let mut client = RawPeer::connect_offering(address, |offers| offers.reverse_support = ReverseSupport::General);
        client.ask(HELLO, Chunks::NONE, b"");
        let caller = told.recv().expect("it was called");
        let mut reverse = world.server().call_back(caller, small_client(small())).expect("of this server");
        let mut data = reverse.alloc(LEN).expect("memory");
        pattern(1, &mut data);
        let call = ClientCall::new(MIRROR).args([0; 4]).read_chunk(4, data).write_chunk(LEN as u32);
        let pending = reverse.start(call).expect("a slot");
        let view = client.answer();
        let read = view.reads().next().expect("a Read chunk").target;
        let write = view.writes().flat_map(|chunk| chunk.segments()).next().expect("a Write chunk");
        let mut showing = Self { xid: view.xid(), client, read, write, pending, reverse };
        showing.is_as_it_was();
        showing
    }

    /// Checks that the client can still read its data, so others could without protection.
    fn is_as_it_was(&mut self) {
        let seen = self.client.read(at(self.read, 0), LEN).expect("it was offered");
        assert!(patterned(1, &seen));
    }

    /// Answers the call with `written` in the Write chunk. Returns the bytes that the server's caller receives.
    fn end(mut self, written: &[u8]) -> (RawPeer, Client, Vec<u8>) {
        if !written.is_empty() {
            self.client.write(written, at(self.write, 0));
        }
        let used = Lists::new().write([Segment { length: written.len() as u32, ..self.write }]);
        self.client.reply_with(self.xid, &used, &reply_bytes(self.xid, b""), None);
        let reply = self.pending.join().expect("a reply");
        let seen = reply.chunk(0).expect("the chunk").to_vec();
        (self.client, self.reverse, seen)
    }
}

#[test]
fn memory_registered_for_one_client_is_out_of_reach_of_others() {
    let (services, told) = telling_services();
    let (world, address) = World::serving("shown", small_server(), services);
    let mut showing = Showing::new(&world, &address, &told);
    // Other clients, with and without exposed memory of their own, try the accesses of the first.
    for shown in [false, true] {
        for (segment, write) in [(showing.read, false), (showing.write, true), (showing.write, false)] {
            let mut other = match shown {
                true => Ok(Showing::new(&world, &address, &told)),
                false => Err(RawPeer::connect(&address)),
            };
            // Two connections may have equal handles, each for its own memory.
            let own = other.as_ref().is_ok_and(|s| [s.read.handle, s.write.handle].contains(&segment.handle));
            let peer = match &mut other {
                Ok(showing) => &mut showing.client,
                Err(peer) => peer,
            };
            if own {
                continue;
            }
            if write {
                peer.write(&[9; LEN], at(segment, 0));
                peer.wait_until_over_or_failed();
            } else {
                assert_eq!(peer.read(at(segment, 0), LEN), None, "a handle of another connection");
            }
            drop(other);
            showing.is_as_it_was();
        }
    }
    let (_client, _reverse, seen) = showing.end(&[3; LEN]);
    assert_eq!(seen, [3; LEN], "what its own client wrote, and nobody else");
}

#[test]
fn registered_memory_is_bounded_by_rights_length_and_time() {
    let (services, told) = telling_services();
    let (world, address) = World::serving("shown-bounds", small_server(), services);
    let len = LEN as i64;
    // Writes to the read-only window, reads of the other one, and accesses beyond the ends of both.
    for (of_read, write, skip, needs_bounds) in [
        (true, true, 0, false),
        (false, false, 0, false),
        (true, false, len - 1, true),
        (true, false, -1, true),
        (false, true, len - 1, true),
        (false, true, -1, true),
    ] {
        let mut showing = Showing::new(&world, &address, &told);
        if needs_bounds && !showing.client.checks_window_bounds() {
            showing.end(b"");
            continue;
        }
        let target = at(if of_read { showing.read } else { showing.write }, skip);
        let peer = &mut showing.client;
        if write {
            peer.write(&[9; 2], target);
            peer.wait_until_over_or_failed();
        } else {
            assert_eq!(peer.read(target, 2), None, "{of_read} {skip}");
        }
        // The connection closes, and the call ends with it.
        let error = showing.pending.join().map(drop);
        assert!(matches!(error, Err(FailedCall { error: CallError::ConnectionLost { sent: true }, .. })), "{error:?}");
    }
    // Memory exposed for a call is unreachable after its end.
    for write in [false, true] {
        let showing = Showing::new(&world, &address, &told);
        let (read, room) = (showing.read, showing.write);
        let (mut client, _reverse, _) = showing.end(&[3; LEN]);
        match write {
            true => {
                client.write(&[9; LEN], at(room, 0));
                client.wait_until_over_or_failed();
            }
            false => assert_eq!(client.read(at(read, 0), LEN), None),
        }
    }
}
