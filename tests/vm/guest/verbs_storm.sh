# Clients and servers of the verbs fabric that start all at the same time, or are killed with SIGKILL during RDMA Reads
# and Writes. The others keep running, each call ends with a cause, and the killed ones' device resources, pinned memory
# and files are freed.
source "$(dirname "$0")/../lib.sh"
source "$(dirname "$0")/../rpcperf.sh"
at=verbs:10.0.0.1:20049
serve server $at -q 256 -s 64K
rdma resource show | sed 's/^[0-9]*: //' >/run/alone
"$rpcperf" lat $at -n 50 >/dev/null
await bash -c '! rdma resource show cm_id | grep -q "state CONNECT"'
print_resources >/run/before

echo "- 200 concurrent connects, without calls"
"$rpcperf" raw-lat $at -q 200 -n 200 >/run/raw || fail "200 concurrent connections"
assert_server_works "200 concurrent connects"

echo "- 100 concurrent connects of four clients, for calls"
clients=()
for n in 1 2 3 4; do
    "$rpcperf" rate $at -q 25 -t 1 -n 200 --idle event >"/run/client-$n" 2>&1 &
    clients+=($!)
done
for client in "${clients[@]}"; do wait "$client" || fail "a client of the storm: $(cat /run/client-*)"; done
assert_server_works "a storm of clients"

# start_transfer OP: starts a client that reads or writes. $client: its process. The engine checks the received data.
start_transfer() {
    : >"/run/busy-$1"
    "$rpcperf" bw $at --op "$1" -s 64K -t 8 -D 600 >"/run/busy-$1" 2>&1 &
    client=$!
    await grep -q '#bytes' "/run/busy-$1"
    sleep 0.5
}
for op in write read; do
    start_transfer $op
    kill -KILL "$client"
    wait "$client" 2>/dev/null || true
    assert_server_works "a client killed during --op $op"
done

# The server is killed last. Nothing of it may be left, and its clients must end by themselves.
for op in write read; do
    start_transfer $op
    kill -KILL "$server"
    wait "$server" 2>/dev/null || true
    await bash -c "! kill -0 $client 2>/dev/null"
    status=0
    wait "$client" || status=$?
    ((status == 1)) || fail "exit status $status of a client without a server: $(<"/run/busy-$op")"
    grep -q 'rpcperf: .*' "/run/busy-$op" || fail "a client without a server does not print why it ends"
    echo "- a server killed during --op $op: $(grep 'rpcperf: ' "/run/busy-$op" | tail -n 1)"
    await bash -c "rdma resource show | grep -q ' qp 1 .* ctx 0 srq 0'"
    serve server $at -q 4 -s 64K
    "$rpcperf" lat $at -n 20 >/dev/null || fail "a server that replaces a killed one does not serve"
done
