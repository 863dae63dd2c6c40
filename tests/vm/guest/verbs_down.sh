# The interface of a device goes down under load. Its clients get an error; its server keeps running and logs the
# reason. After the interface is up and the device was recreated, a server serves again. Then the device is removed and
# recreated, under load and with no client connected, and the same server serves again.
#
# In Linux 6.1 a device whose own interface is down has a bug. A message that its connection manager sends meanwhile, as
# for each disconnect, blocks its queue pair 1 permanently. After that no program can connect through the device, not
# even rping. So each such device is recreated.
# last
source "$(dirname "$0")/../lib.sh"
source "$(dirname "$0")/../rpcperf.sh"
at=verbs:10.0.0.1:20049
serve server $at -q 8 -s 64K
trap 'for process in $(jobs -p); do kill "$process" 2>/dev/null || true; done; bring_link_up' EXIT
count_queue_pairs() { rdma resource show qp link rxe0 | grep -c "type RC" || true; }

start_load
ip link set v0 down
assert_clients_lost "the server's interface down"
assert_fails "a client while it is down" 'no port is active' 'ip link set' -- "$rpcperf" lat $at
kill -0 "$server" || fail "the server is gone"
# The device cannot be controlled while its interface is down. Mostly it frees the server's queue pairs; sometimes it
# keeps one indefinitely.
are_queue_pairs_freed() { rdma resource show | grep -q " qp 1 "; }
for ((second = 0; second < 15; second++)); do are_queue_pairs_freed && break || sleep 1; done
echo "- the device has $(count_queue_pairs) queue pairs of clients after $second s"
bring_link_up
# The device frees such a queue pair when the server ends.
kill "$server"
await bash -c "! kill -0 $server 2>/dev/null"
wait "$server" || true
await are_queue_pairs_freed
await bash -c '! rdma resource show mr | grep -q rpcperf'
rdma link delete rxe0
rdma link add rxe0 type rxe netdev v0
await grep -qs ffff:0a00:0001 /sys/class/infiniband/rxe0/ports/1/gids/1
serve server $at -q 8 -s 64K
"$rpcperf" bw $at --op write -s 64K -n 50 >/run/again 2>&1 ||
    fail "not served after the interface came back: $(</run/again)"

kill "$server"
wait "$server" || true

# Removes the device, under load and then with no client connected. Its driver waits until all users have closed it. The
# server ends all connections immediately, logs the reason, and closes the device. When the device returns, each shard
# of the same server serves again.
serve server $at -q 8 -s 64K --shards 2 --stats /run/server.stats
has_device_returned() { (($(grep -c 'MTU.*: the device has returned' /run/server) == 2 * $1)); }
assert_removed() {
    await bash -c "! kill -0 $deletion 2>/dev/null"
    wait $deletion || fail "$1: rdma link delete: exit status $?"
    kill -0 "$server" || fail "$1: the server is gone: $(</run/server)"
    echo "- $1: the server has closed the device"
}
add_device() {
    rdma link add rxe0 type rxe netdev v0
    await grep -qs ffff:0a00:0001 /sys/class/infiniband/rxe0/ports/1/gids/1
    for ((tenth = 0; tenth < 1500; tenth++)); do has_device_returned "$1" && break || sleep 0.1; done
    has_device_returned "$1" || fail "$2: not each shard has the device again: $(</run/server)"
    for ((client = 0; client < 3; client++)); do
        "$rpcperf" bw $at --op write -s 64K -n 50 >/run/again 2>&1 ||
            fail "$2: not served by the device that came back: $(</run/again); the server says $(</run/server)"
    done
    echo "- $2: the same server serves again"
}

start_load
(($(sum_counter device_failures) == 0)) || fail "$(sum_counter device_failures) failures are counted before the first"
rdma link delete rxe0 &
deletion=$!
assert_clients_lost "the server's device removed"
await grep -q 'the device was removed' /run/server
assert_removed "the device removed under load"
# Each shard counts one failure.
(($(sum_counter device_failures) == 2)) ||
    fail "the server has counted $(sum_counter device_failures) failures of its device"
assert_fails "a client while the device is gone" 'no RDMA devices' -- "$rpcperf" lat $at
add_device 1 "the device removed under load"
await bash -c '! rdma resource show cm_id | grep -q "state CONNECT"'
rdma link delete rxe0 &
deletion=$!
assert_removed "the device removed while nobody was connected"
(($(sum_counter device_failures) == 4)) ||
    fail "the server has counted $(sum_counter device_failures) failures of its device"
add_device 2 "the device removed while nobody was connected"
