# The link goes down and comes up: with nothing under way the server goes on as if nothing had been. Under load the clients are told, nobody hangs, and what was
# theirs comes back.
#
# Then the device has to be made again, in Linux 6.1: a message of the connection manager that was sent while the link was down, as each disconnect sends one,
# blocks the device's queue pair 1 for good, and nobody can connect any more, rping neither.
# limit: 200
source "$(dirname "$0")/../lib.sh"
source "$(dirname "$0")/../rpcperf.sh"
at=verbs:10.0.0.1:20049
serve server $at -q 8 -s 64K
"$rpcperf" lat $at -n 50 >/dev/null
await 30 bash -c '! rdma resource show cm_id | grep -q "state CONNECT"'
holds >/run/before
trap 'up; for process in $(jobs -p); do kill "$process" 2>/dev/null || true; done' EXIT

ip link set v0 down
sleep 0.5
up
unharmed "the link down and up, with nothing under way"

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
kill -0 "$server" || fail "the server is gone"
await 60 bash -c 'rdma resource show | grep -q " qp 1 "'
echo "- the clients' queue pairs are gone"
up
kill "$server"
wait "$server" || true
await 30 bash -c '! rdma resource show mr | grep -q rpcperf'
rdma link delete rxe0
rdma link add rxe0 type rxe netdev v0
await 10 grep -qs ffff:0a00:0001 /sys/class/infiniband/rxe0/ports/1/gids/1
serve server $at -q 8 -s 64K
"$rpcperf" bw $at --op write -s 64K -n 50 >/run/again 2>&1 || fail "not served after the link came back: $(</run/again)"
