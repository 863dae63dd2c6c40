# The link of this project's clients, or the interface of the kernel's soft-iWARP device, goes down amid bulk data to
# and from the kernel's server: the clients are told within the fabric's time, and when it is up again others are
# served.
# idle
source "$(dirname "$0")/../lib.sh"
source "$(dirname "$0")/../siw.sh"

# forgotten: ends the TCP connections that the kernel's server has, as an administrator can. A client whose link is down
# cannot say that it ends. The server learns of it when it sends something; if it has nothing to send, as while it waits
# for the rest of a Read, or for the next call, it never does: siw asks for no keepalives.
forgotten() { ss -HKtn state established 'sport = :20049'; }

for what in put get; do
    busy $what
    "${enter[@]}" ip link set $far down
    lost "the client's link down amid $what"
    "${enter[@]}" ip link set $far up
    forgotten
    unharmed "the client's link up again"

    # With its interface, the kernel's device ends what goes by it; but in one run of many it has left a connection on
    # which it waited for the rest of a Read.
    busy $what
    ip link set $near down
    lost "the interface of the kernel's device down amid $what"
    ip link set $near up
    forgotten
    unharmed "the interface of the kernel's device up again"
done
