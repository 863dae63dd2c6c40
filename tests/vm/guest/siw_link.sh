# The link of this project's clients, or the interface of the kernel's soft-iWARP device, goes down amid bulk data to
# and from the kernel's server: the clients are told within the fabric's time, and when it is up again others are
# served.
# idle
# limit: 400
source "$(dirname "$0")/../lib.sh"
source "$(dirname "$0")/../siw.sh"

for what in put get; do
    busy $what
    "${enter[@]}" ip link set $far down
    lost "the client's link down amid $what"
    "${enter[@]}" ip link set $far up
    unharmed "the client's link up again"

    # With its interface, the kernel's device ends what goes by it.
    busy $what
    ip link set $near down
    lost "the interface of the kernel's device down amid $what"
    ip link set $near up
    unharmed "the interface of the kernel's device up again"
done
