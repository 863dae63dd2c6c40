# One server with two devices at the same time, each with its own shard. A shard's device is the one on the route to its
# address. Data written through one device is read through the other, and both are freed.
source "$(dirname "$0")/../lib.sh"
find_program BLOCKSTORE blockstore "cargo build -p rpcrdma-blockstore --features verbs"
trap 'for process in $(jobs -p); do kill "$process" 2>/dev/null || true; done; rdma link delete rxe1' EXIT
rdma link add rxe1 type rxe netdev v1
await grep -qs 'ffff:0a00:0002' /sys/class/infiniband/rxe1/ports/1/gids/*
first=verbs:10.0.0.1:20050 second=verbs:10.0.0.2:20050

# print_shards DEVICE: prints the server's threads that have a protection domain of this device, in order.
print_shards() { rdma resource show pd | sed -n "s/^dev $1 .* comm rpcrdma-shard\([0-9]*\).*/\1/p" | sort | xargs; }

head -c 300001 /dev/urandom >/run/source
"$BLOCKSTORE" serve --file /run/disk.img --size 4M --listen $first,$second >/run/store 2>&1 &
server=$!
await grep -q "^listening on $first, $second" /run/store
[[ "$(print_shards rxe0) / $(print_shards rxe1)" == "0 / 1" ]] || fail "not a device each: $(rdma resource show pd)"
for way in "copy $first" "verify $second" "copy $second" "verify $first"; do
    "$BLOCKSTORE" ${way% *} /run/source ${way#* } --depth 4 >/run/output 2>&1 || fail "$way: $(</run/output)"
    echo "- $(head -n 1 /run/output)"
done
kill -TERM "$server"
wait "$server" || fail "the server ended with $?: $(</run/store)"
[[ -z "$(print_shards rxe0)$(print_shards rxe1)" ]] || fail "a device is still in use: $(rdma resource show pd)"
