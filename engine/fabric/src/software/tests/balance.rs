//! Fabrics that share a bound address.

use super::*;

/// Connect requests that a fabric has found.
fn requests(fabric: &mut SoftwareFabric) -> usize {
    let mut events = Vec::new();
    fabric.poll_control(&mut events);
    events.iter().filter(|event| matches!(event, ControlEvent::ConnectRequest { .. })).count()
}

#[test]
fn a_connection_goes_to_the_fabric_with_the_fewest_connections() {
    let mut cluster = Cluster::new("balance");
    let mut other = open();
    other.listen(&cluster.listener).expect("listen");
    let address = cluster.address.clone();
    let mut connect = || cluster.client.connect(&address, &params()).expect("connect");
    connect();
    assert_eq!((requests(&mut cluster.server), requests(&mut other)), (0, 1), "the server already has a connection");
    connect();
    assert_eq!(
        (requests(&mut cluster.server), requests(&mut other)),
        (1, 0),
        "with equal numbers, the fabric that accepted the connection keeps it"
    );
    let last = connect();
    assert_eq!(requests(&mut cluster.server), 0);
    // The last connection was handed to the other fabric, which stops listening before it polls.
    other.unlisten();
    assert_eq!(requests(&mut cluster.server), 1, "the connection is handed back");
    cluster.client.destroy_qp(last);
    cluster.check();
}
