# A link goes down during bulk data to and from the kernel's server: that of this project's clients, or the interface of
# the kernel's soft-iWARP device. The clients get an error within the fabric's time limit. When the link is up again,
# new clients are served.
# idle
source "$(dirname "$0")/../lib.sh"
source "$(dirname "$0")/../siw.sh"

# forgotten: ends the kernel server's TCP connections, as an administrator can. A client with a dead link cannot signal
# its end. The server detects the end only when it sends. It never does so while it waits for the rest of a Read or for
# the next call, because siw enables no keep-alive.
forgotten() { ss -HKtn state established 'sport = :20049'; }

for what in put get; do
    busy $what
    "${enter[@]}" ip link set $far down
    lost "the client's link down amid $what"
    "${enter[@]}" ip link set $far up
    forgotten
    unharmed "the client's link up again"

    # When its interface goes down, the kernel's device ends its connections. In one of many runs it kept one that
    # waited for the rest of a Read.
    busy $what
    ip link set $near down
    lost "the interface of the kernel's device down amid $what"
    ip link set $near up
    forgotten
    unharmed "the interface of the kernel's device up again"
done
