# The connection manager connects by IPv4 and IPv6 address. Sends, RDMA Reads and Writes transfer data unchanged.
source "$(dirname "$0")/../lib.sh"
source "$(dirname "$0")/../peers.sh"

for address in $kernel $kernel6; do
    rping -s -a "$address" -C 10 -V & # -V: checks received data
    server=$!
    await listening_rdma 7174
    rping -c -a "$address" -C 10 -V
    wait "$server"
done
