# A link goes down during bulk data to and from the kernel's server: that of this project's clients, or the interface of
# the kernel's soft-iWARP device. The clients get an error within the fabric's time limit. When the link is up again,
# new clients are served.
# idle
source "$(dirname "$0")/../lib.sh"
source "$(dirname "$0")/../siw.sh"

# end_server_connections: ends the kernel server's TCP connections, as an administrator can. A client with a dead link
# cannot signal its end, and the server detects it only when it sends. The server never sends while it waits for the
# rest of a Read or for the next call, because siw enables no keep-alive.
end_server_connections() { ss -HKtn state established 'sport = :20049'; }

for what in put get; do
    start_transfer $what
    "${enter[@]}" ip link set $far down
    assert_client_lost "the client's link down during $what"
    "${enter[@]}" ip link set $far up
    end_server_connections
    assert_server_works "the client's link up again"

    # When its interface goes down, the kernel's device ends its connections. In one of many runs it kept one that
    # waited for the rest of a Read.
    start_transfer $what
    ip link set $near down
    assert_client_lost "the interface of the kernel's device down during $what"
    ip link set $near up
    end_server_connections
    assert_server_works "the interface of the kernel's device up again"
done
