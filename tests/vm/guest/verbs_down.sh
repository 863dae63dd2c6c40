# The interface of a device goes down under load: its clients are told, its server goes on and says why nobody comes to
# it, and when the interface is up and the device made again, a server serves. Then the same for a device that is removed.
#
# A device whose own interface is down is another matter, in Linux 6.1: a message of its connection manager that is sent
# meanwhile, as each disconnect sends one, blocks its queue pair 1 for good, and nobody connects by it any more, rping
# neither. So each such device is made again.
# last
# limit: 240
source "$(dirname "$0")/../lib.sh"
source "$(dirname "$0")/../rpcperf.sh"
at=verbs:10.0.0.1:20049
serve server $at -q 8 -s 64K
trap 'for process in $(jobs -p); do kill "$process" 2>/dev/null || true; done; up' EXIT
theirs() { rdma resource show qp link rxe0 | grep -c "type RC" || true; }

load
ip link set v0 down
lost "the server's interface down"
fails "a client while it is down" 'no port is active' 'ip link set' -- "$rpcperf" lat $at
kill -0 "$server" || fail "the server is gone"
# Nothing can be asked of the device while its interface is down: most times it gives the server's ends back, sometimes
# it keeps one.
gone() { rdma resource show | grep -q " qp 1 "; }
for ((second = 0; second < 60; second++)); do gone && break || sleep 1; done
echo "- of the clients, the device holds $(theirs) queue pairs after $second s"
up
# What it keeps ends with the server.
kill "$server"
await 60 bash -c "! kill -0 $server 2>/dev/null"
wait "$server" || true
await 10 gone
await 30 bash -c '! rdma resource show mr | grep -q rpcperf'
rdma link delete rxe0
rdma link add rxe0 type rxe netdev v0
await 10 grep -qs ffff:0a00:0001 /sys/class/infiniband/rxe0/ports/1/gids/1
serve server $at -q 8 -s 64K
"$rpcperf" bw $at --op write -s 64K -n 50 >/run/again 2>&1 ||
    fail "not served after the interface came back: $(</run/again)"

# The device is taken away under load. Its driver waits until everybody has let go of it: the server ends all
# connections at once and says why; who runs it starts another one when the device is there again.
load
rdma link delete rxe0 &
deletion=$!
lost "the server's device removed"
grep -q 'the device was removed' /run/server || fail "the server does not say that its device was removed: $(</run/server)"
kill "$server"
wait "$server" || true
wait $deletion || fail "the device is not given back"
rdma link add rxe0 type rxe netdev v0
await 10 grep -qs ffff:0a00:0001 /sys/class/infiniband/rxe0/ports/1/gids/1
serve server $at -q 8 -s 64K
"$rpcperf" bw $at --op write -s 64K -n 50 >/run/again 2>&1 || fail "not served by the device that came back: $(</run/again)"
