# One server with two devices at the same time. The device's own protection domains and connections show which device
# serves each address: the one that has it, or the device and GID that the address names. Some cases need names: the
# device of a wildcard address, and an address that the routing tables lead to another device. Contradictory names are
# refused.
source "$(dirname "$0")/../lib.sh"
source "$(dirname "$0")/../rpcperf.sh"
find_program NFS3D nfs3d "cargo build -p rpcrdma-nfs3d --features verbs"
find_program RPCRDMA rpcrdma 'cargo build -p rpcrdma-tools --features verbs --bin rpcrdma'
trap 'for process in $(jobs -p); do kill "$process" 2>/dev/null || true; done
    "$(dirname "$0")/../wire-up" down' EXIT
rdma link add rxe1 type rxe netdev v1
await grep -qs 'ffff:0a00:0002' /sys/class/infiniband/rxe1/ports/1/gids/*

# print_shards DEVICE: prints the server's threads that have a protection domain of this device, in order.
print_shards() { rdma resource show pd | sed -n "s/^dev $1 .* comm rpcrdma-shard\([0-9]*\).*/\1/p" | sort -u | xargs; }

# count_calls SHARD: prints the number of calls that a shard has answered.
count_calls() { query_stats "shards[$1]['calls']"; }

# start_on_both_devices ADDRESS ADDRESS: starts a server of both addresses. The first must be on rxe0, the second on
# rxe1.
start_on_both_devices() {
    serve server "$1,$2" --only calls --stats /run/server.stats
    [[ "$(print_shards rxe0) / $(print_shards rxe1)" == "0 / 1" ]] ||
        fail "$1, $2: not a device each: $(rdma resource show pd)"
}

# assert_reached SHARD ADDRESS DEVICE FROM: checks that calls to an address reach this shard, by connections of this
# device and from this IP address.
assert_reached() {
    local before other=$((1 - $1)) client
    before=$(count_calls $other)
    await "$rpcperf" lat "$2" -n 50
    "$rpcperf" lat "$2" -D 600 --idle event >/run/client 2>&1 &
    client=$!
    await bash -c "rdma resource show cm_id link $3 | grep -q 'state CONNECT.* comm rpcperf.*src-addr $4:'"
    kill $client
    wait $client || true
    (($(count_calls "$1") >= 50)) || fail "$2: shard $1 was not called"
    (($(count_calls $other) == before)) || fail "$2: shard $other was called"
    echo "- $2: shard $1, on $3 from $4"
}

# stop_server: ends the server.
stop_server() {
    kill "$server"
    wait "$server" || true
    await bash -c '! rdma resource show cm_id | grep -q "LISTEN.*:200[45]"'
}

# By IP address alone.
start_on_both_devices verbs:10.0.0.1:20049 verbs:10.0.0.2:20050
assert_reached 0 verbs:10.0.0.1:20049 rxe0 10.0.0.1
assert_reached 1 verbs:10.0.0.2:20050 rxe1 10.0.0.2
stop_server

# Wildcard addresses: connections through the other device are rejected.
start_on_both_devices verbs:rxe0@0.0.0.0:20049 verbs:rxe1@0.0.0.0:20050
assert_reached 0 verbs:10.0.0.1:20049 rxe0 10.0.0.1
assert_reached 1 verbs:rxe1@10.0.0.2:20050 rxe1 10.0.0.2
assert_fails "the port of the other device" 'rejected by the peer' -- "$rpcperf" lat verbs:10.0.0.2:20049
stop_server

# By index: the second GID of rxe0 is its IPv6 address.
[[ $(</sys/class/infiniband/rxe0/ports/1/gids/2) == fd00:* ]] || fail "GID 2 of rxe0 is not its IPv6 address"
index=$(grep -ls 'ffff:0a00:0002' /sys/class/infiniband/rxe1/ports/1/gids/* | head -n 1)
index=${index##*/}
start_on_both_devices 'verbs:rxe0/2@[fd00::1]:20049' verbs:rxe1/$index@10.0.0.2:20050
assert_reached 0 'verbs:rxe0/2@[fd00::1]:20049' rxe0 fd00::1
assert_reached 1 verbs:rxe1/$index@10.0.0.2:20050 rxe1 10.0.0.2
"$rpcperf" lat 'verbs:rxe0/2@[fd00::1]:20049' -n 20 | grep -q 'rxe0.*GID 2 fd00::1 RoCE v2 v0' ||
    fail "device and GID are not shown"
stop_server

assert_fails "another device than -d" 'names rxe1, but `device` is rxe0' -- \
    "$rpcperf" serve --listen verbs:rxe1@10.0.0.2:20049 -d rxe0 --only calls
assert_fails "another GID than -x" 'names GID 2 of rxe0, but `gid_index` is 1' -- \
    "$rpcperf" lat 'verbs:rxe0/2@[fd00::1]:20049' -x 1
assert_fails "a device without the address" 'no active port has the address 10.0.0.2' -- \
    "$rpcperf" serve --listen verbs:10.0.0.1:20049,verbs:rxe0@10.0.0.2:20050 --only calls
assert_fails "a GID of another address" 'listen address 10.0.0.1 differs from the address fd00::1 of the GID' -- \
    "$rpcperf" serve --listen verbs:rxe0/2@10.0.0.1:20049 --only calls
assert_fails "a missing device" 'no device named "mlx5_0"' 'rxe1 port 1' -- "$rpcperf" lat verbs:mlx5_0@10.0.0.1
expected_status=2 assert_fails "a device of TCP" 'only verbs: addresses' -- "$rpcperf" lat iwarp:rxe0@10.0.0.1
status=0
"$RPCRDMA" doctor verbs:rxe7@10.0.0.1 >/run/output || status=$?
((status == 2)) && grep -q 'no device rxe7, only rxe0, rxe1' /run/output || fail "doctor: $status: $(</run/output)"

mkdir -p /srv/named
"$NFS3D" /srv/named --listen verbs:rxe0@10.0.0.1:20049,verbs:rxe1/$index@10.0.0.2:20049 --mount-port 20148 \
    --key /run/named.key --clients 1 >/run/nfs3d 2>&1 &
server=$!
await grep -q "^listening on verbs:rxe0@10.0.0.1:20049, verbs:rxe1/$index@10.0.0.2:20049: " /run/nfs3d
[[ "$(print_shards rxe0) / $(print_shards rxe1)" == "0 / 1" ]] ||
    fail "nfs3d: not a device each: $(rdma resource show pd)"
for at in verbs:10.0.0.1 verbs:rxe1/$index@10.0.0.2; do
    "$RPCRDMA" ping -c 3 $at >/run/output 2>&1 || fail "nfs3d: $at: $(</run/output)"
    echo "- nfs3d, $at: $(tail -n 1 /run/output)"
done
kill -TERM "$server"
wait "$server" || fail "nfs3d ended with $?: $(</run/nfs3d)"

# The routing tables lead from each device's address to the other device, as between two hosts. Packets travel over the
# cable.
rdma link delete rxe1
"$(dirname "$0")/../wire-up"
start_on_both_devices verbs:rxe0@10.0.0.1:20049 verbs:rxe1@10.0.0.2:20050
assert_reached 0 verbs:10.0.0.1:20049 rxe1 10.0.0.2
assert_reached 1 verbs:10.0.0.2:20050 rxe0 10.0.0.1
