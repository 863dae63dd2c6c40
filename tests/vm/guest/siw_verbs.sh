# The verbs fabric beside an iWARP device, which it does not support. Clients and servers ignore that device if there is
# another one. If it is the only one, or is named, they refuse it with an error that names the fabric to use instead.
source "$(dirname "$0")/../lib.sh"
source "$(dirname "$0")/../rpcperf.sh"
find_program RPCRDMA rpcrdma "cargo build -p rpcrdma-tools --features verbs"
"$(dirname "$0")/../siw-up"
at=verbs:10.0.0.1:20049
refusal=('siw0 is an iWARP device' 'no memory windows' 'iwarp:HOST:PORT')

serve server $at --only calls
"$rpcperf" lat $at -n 20 >/dev/null || fail "not served by rxe0 beside siw0"
"$RPCRDMA" ping -c 3 -i 0 $at 0x20525046 5 >/dev/null || fail "no answer by rxe0 beside siw0"
assert_fails "siw0 by name" "${refusal[@]}" -- "$rpcperf" lat $at -d siw0
assert_fails "the address of siw0's interface, beside rxe0" 'no active port has the address 10.1.0.1' \
    'siw0 port 1 (iWARP, not supported by `verbs:`' -- "$rpcperf" lat verbs:10.1.0.1:20049
kill "$server"
wait "$server" || true

trap 'for process in $(jobs -p); do kill "$process" 2>/dev/null || true; done
    rdma link add rxe0 type rxe netdev v0
    await grep -qs ffff:0a00:0001 /sys/class/infiniband/rxe0/ports/1/gids/1' EXIT
await bash -c '! rdma resource show cm_id | grep -q rpcperf'
rdma link delete rxe0
for address in verbs:10.1.0.1:20049 verbs:10.1.0.2:20049 'verbs:[fd01::1]:20049'; do
    assert_fails "siw0 alone, to $address" "${refusal[@]}" -- "$rpcperf" lat "$address"
done
assert_fails "siw0 alone, ping" "${refusal[@]}" -- "$RPCRDMA" ping -c 1 verbs:10.1.0.1
assert_fails "siw0 alone, at a server" "${refusal[@]}" -- "$rpcperf" serve --listen verbs:10.1.0.1:20049
