//! Fabrics that share a bound address.

use super::*;

/// Connect requests that a fabric has found.
fn requests(fabric: &mut SoftwareFabric) -> usize {
    let mut events = Vec::new();
    fabric.poll_control(&mut events);
    events.iter().filter(|event| matches!(event, ControlEvent::ConnectRequest { .. })).count()
}

#[test]
fn a_connection_goes_to_the_fabric_with_the_fewest() {
    let mut town = Cluster::new("balance");
    let mut other = open();
    other.listen(&town._listener).expect("listen");
    let address = town.address.clone();
    let mut connect = || town.client.connect(&address, &params()).expect("connect");
    connect();
    assert_eq!((requests(&mut town.server), requests(&mut other)), (0, 1), "the server has one");
    connect();
    assert_eq!((requests(&mut town.server), requests(&mut other)), (1, 0), "of two with one, who has seen it");
    let last = connect();
    assert_eq!(requests(&mut town.server), 0);
    // It was handed to the other fabric, which ends without a poll.
    other.unlisten();
    assert_eq!(requests(&mut town.server), 1, "nobody is forgotten");
    town.client.destroy_qp(last);
    town.check();
}
