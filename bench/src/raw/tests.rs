//! Tests of the raw server: both sides in one thread, and misbehaving clients.

use rpcrdma::fabric::software::{SoftwareConfig, SoftwareFabric};
use rpcrdma::fabric::{ConnectParams, ControlEvent, Fabric, FabricAddress};

use super::hello::{Hello, Welcome};
use super::server::RawServer;
use crate::cli::Idle;
use crate::idle::Idler;

const GOOD: Hello = Hello { message: 64, echo: true, depth: 4, exposed: 4096, batch: true };

struct TestPair {
    server: RawServer<SoftwareFabric>,
    client: SoftwareFabric,
    address: FabricAddress,
}

fn pair(name: &str) -> TestPair {
    let address = FabricAddress(format!("rpcperf-raw-{name}-{}", std::process::id()));
    let mut fabric = SoftwareFabric::new(SoftwareConfig::default()).unwrap();
    let listener = SoftwareFabric::bind(&address).unwrap();
    fabric.listen(&listener).unwrap();
    let welcome = Welcome::default();
    let server = RawServer::new(fabric, welcome, Idler::new(Idle::Poll, false));
    TestPair { server, client: SoftwareFabric::new(SoftwareConfig::default()).unwrap(), address }
}

impl TestPair {
    fn connect(&mut self, private_data: Vec<u8>) -> ControlEvent {
        let params = ConnectParams { private_data, own_receive_queue: Some(8), ..ConnectParams::default() };
        self.client.connect(&self.address, &params).unwrap();
        self.next_event()
    }

    /// Polls the server for enough turns to include connection management.
    fn serve(&mut self) {
        (0..5000).for_each(|_| self.server.turn());
    }

    fn next_event(&mut self) -> ControlEvent {
        let mut events = Vec::new();
        for _ in 0..100 {
            self.serve();
            self.client.poll_control(&mut events);
            if let Some(event) = events.pop() {
                return event;
            }
        }
        panic!("no event");
    }
}

#[test]
fn unsupported_tests_are_refused_with_a_reason() {
    let mut pair = pair("refused");
    for (private_data, reason) in [
        (b"hello".to_vec(), "an rpcperf raw test"),
        (vec![0; 56], "an rpcperf raw test"),
        (Hello { message: u32::MAX, ..GOOD }.encode(), "the limit of the device"),
        (Hello { depth: u32::MAX, ..GOOD }.encode(), "memory"),
        (Hello { exposed: u64::MAX, ..GOOD }.encode(), "memory"),
    ] {
        let ControlEvent::Rejected { qp, private_data: text } = pair.connect(private_data) else {
            panic!("accepted instead of refused: {reason:?}");
        };
        pair.client.destroy_qp(qp);
        let text = String::from_utf8_lossy(&text);
        assert!(text.contains(reason), "{text}");
    }
    assert_eq!(pair.server.connections(), 0);
}

#[test]
fn memory_of_a_disconnected_client_is_freed() {
    let mut pair = pair("leaves");
    let ControlEvent::Established { qp: first, .. } = pair.connect(GOOD.encode()) else { panic!("refused") };
    let ControlEvent::Established { qp: second, .. } = pair.connect(GOOD.encode()) else { panic!("refused") };
    assert_eq!(pair.server.connections(), 2);
    // The client has posted no receive, not even for the server's first message.
    pair.client.destroy_qp(first);
    pair.serve();
    assert_eq!(pair.server.connections(), 1, "the other connection stays");
    pair.client.destroy_qp(second);
    pair.serve();
    assert_eq!(pair.server.connections(), 0);
}
