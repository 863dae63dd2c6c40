# The link goes down under load, and comes up again: clients are told, nobody hangs, and the server that was there before serves whoever comes then.
# limit: 200
source "$(dirname "$0")/../lib.sh"
source "$(dirname "$0")/../rpcperf.sh"
at=verbs:10.0.0.1:20049
serve server $at -q 8 -s 64K
"$rpcperf" lat $at -n 50 >/dev/null
await 30 bash -c '! rdma resource show cm_id | grep -q "state CONNECT"'
holds >/run/before
trap 'up; for process in $(jobs -p); do kill "$process" 2>/dev/null || true; done' EXIT

clients=()
for op in write read; do
    "$rpcperf" bw $at --op $op -s 64K -t 4 -D 60 --idle event >"/run/busy-$op" 2>&1 &
    clients+=($!)
done
await 30 grep -q '#bytes' /run/busy-write
await 30 grep -q '#bytes' /run/busy-read
sleep 1
ip link set v0 down
for client in "${clients[@]}"; do
    # A lost packet is sent again for some seconds before the device gives up.
    await 60 bash -c "! kill -0 $client 2>/dev/null"
    status=0
    wait "$client" || status=$?
    ((status == 1)) || fail "exit status $status of a client without a link: $(cat /run/busy-*)"
done
for op in write read; do
    grep -q 'rpcperf: .*connection lost' "/run/busy-$op" || fail "nothing is said of the loss: $(<"/run/busy-$op")"
    echo "- the link down amid --op $op: $(grep rpcperf: "/run/busy-$op")"
done
fails "a client while the link is down" 'no port is active' 'ip link set' -- "$rpcperf" lat $at
up
unharmed "the link up again"
"$rpcperf" bw $at --op write -s 64K -n 50 >/dev/null || fail "RDMA Reads after the link was down"
"$rpcperf" raw-bw $at --op write -s 64K -n 50 >/dev/null || fail "raw tests after the link was down"
"$rpcperf" lat 'verbs:[fd00::1]:20049' -n 20 >/run/lat6 2>&1 && fail "a server at an IPv4 address answers at an IPv6 address"
unharmed "bulk data after that"
