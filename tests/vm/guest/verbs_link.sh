# The link goes down and comes up.
#
# With no outstanding calls the server is unaffected. Under load the clients behind the link get an error, none hangs,
# and their resources are freed, while other clients are served. When the link is up again, the same server serves the
# lost clients again. For a device whose own interface goes down see verbs_down.sh.
source "$(dirname "$0")/../lib.sh"
source "$(dirname "$0")/../rpcperf.sh"
find_program RPCRDMA rpcrdma "cargo build -p rpcrdma-tools --features verbs"
at=verbs:10.0.0.1:20049
serve server $at -q 8 -s 64K --stats /run/server.stats
"$rpcperf" lat $at -n 50 >/dev/null
await bash -c '! rdma resource show cm_id | grep -q "state CONNECT"'
print_resources >/run/before
# Restores the network for the following scripts.
trap 'for process in $(jobs -p); do kill "$process" 2>/dev/null || true; done
    "$(dirname "$0")/../wire-up" down; bring_v1_up; bring_link_up' EXIT

bring_v1_up() {
    ip link set v1 up
    ip address add fd00::2/64 dev v1 nodad 2>/dev/null || true
}

ip link set v0 down
await grep -q 'port 1 is down' /run/server
bring_link_up
assert_server_works "the link down and up, without outstanding calls"

# The cable is the veth pair v0 and v1. The other client connects before addresses are routed over the cable, so its
# packets stay within the device. Its time-out is 20 s, because soft-RoCE blocks the shard, possibly several times
# during one call: for a second or more when it destroys a queue pair whose packets a dead link still holds.
"$RPCRDMA" ping -c 100000 -i 0.1 -W 20 $at 0x20525046 5 >/run/other 2>&1 &
other=$!
count_answers() { wc -l </run/other; }
await bash -c '(( $(wc -l </run/other) > 5 ))'
count_queue_pairs() { rdma resource show qp link rxe0 | grep -c "type RC" || true; }
idle_queue_pairs=$(count_queue_pairs)
# The first request over a new cable is lost, and is retransmitted only after the client's time-out.
route_over_cable() { "$(dirname "$0")/../wire-up" && await "$rpcperf" lat $at -n 50; }
undo_routes() { "$(dirname "$0")/../wire-up" down; }
route_over_cable
start_load
# A busy client may fail to send before the device reports the cause. This one sends one call per 5 s.
"$rpcperf" lat $at -s 64 -n 100 --rate 0.2 --idle event >/run/idle 2>&1 &
clients+=($!)
await grep -q '#bytes' /run/idle
(($(count_queue_pairs) > idle_queue_pairs)) || fail "no queue pair for the clients: $(rdma resource show qp)"
before=$(count_answers)
ip link set v1 down
await grep -q DOWN /sys/class/infiniband/rxe0/ports/1/state
assert_clients_lost "the link down"
grep -q 'port 1 is down' /run/idle || fail "a lost client does not report that its port is down: $(</run/idle)"
# The server's device has reported it too. The server counts it twice: once here, once with no outstanding calls.
grep -q 'port 1 is down' /run/server || fail "the server does not report that the port is down: $(</run/server)"
(($(sum_counter port_downs) >= 2)) ||
    fail "the server has counted $(sum_counter port_downs) times that the port went down"
# No message informs the server. Its device or its keep-alive detects it.
await bash -c "(( \$(rdma resource show qp link rxe0 | grep -c 'type RC') == $idle_queue_pairs ))"
# The other client is served while the link is still down.
is_other_client_served() { (($(count_answers) > before + 5)); }
await is_other_client_served
echo "- the resources of the lost clients are freed; another client was served meanwhile"
undo_routes
bring_v1_up
await grep -q ACTIVE /sys/class/infiniband/rxe0/ports/1/state
await grep -q 'port 1 is up' /run/server
route_over_cable
"$rpcperf" bw $at --op write -s 64K -n 50 >/run/again 2>&1 || fail "not served after the link came back: $(</run/again)"
rdma resource show qp link rxe1 | grep -q 'type RC' &&
    fail "a client left queue pairs: $(rdma resource show qp link rxe1)"
undo_routes
kill -INT $other
wait $other || fail "calls of the other client failed: $(tail /run/other)"
assert_server_works "the link down and up during calls: the same server serves on"
