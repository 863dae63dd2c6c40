# Host limits that the verbs fabric runs into. Each error names the request, the limit and a remedy. Connected clients
# are not affected.
source "$(dirname "$0")/../lib.sh"
source "$(dirname "$0")/../rpcperf.sh"
at=verbs:10.0.0.1:20049
# Other users must be able to run it from any location of the repository.
install -m 755 "$rpcperf" /run/rpcperf
rpcperf=/run/rpcperf
serve server $at --only calls
print_resources >/run/before

assert_fails "port in use" '10.0.0.1:20049' 'in use' 'rdma resource show cm_id' -- \
    $rpcperf serve --listen $at --only calls
assert_fails "port in use, of raw tests" 'in use' -- $rpcperf serve --listen verbs:10.0.0.1:20048 --only raw
assert_fails "an address of no device" '127.0.0.1' 'rxe0 port 1' 'GID 1 10.0.0.1 RoCE v2 v0' -- \
    $rpcperf serve --listen verbs:127.0.0.1
assert_fails "an address without a listener" 'no listener at' '10.0.0.1:999' -- $rpcperf lat verbs:10.0.0.1:999
assert_fails "a missing device" 'no device named "mlx5_0"' 'rxe0 port 1' -- $rpcperf lat $at -d mlx5_0
assert_fails "a missing GID" 'the port has no GID' 'GID 1 10.0.0.1 RoCE v2 v0' -- $rpcperf lat $at -d rxe0 -x 9
assert_fails "a link-local GID" 'link-local' 'GID 1 10.0.0.1 RoCE v2 v0' -- $rpcperf lat $at -x 0
assert_fails "a GID of another family" 'the address family differs from that of the chosen GID fd00::1' -- \
    $rpcperf raw-lat $at -d rxe0 -x 2
assert_fails "a GID of another address" 'listen address 10.0.0.1 differs from the address fd00::1 of the GID' -- \
    $rpcperf serve --listen verbs:10.0.0.1:20059 -d rxe0 -x 2 --only raw
$rpcperf lat $at -n 20 -d rxe0 -x 1 | grep -q 'GID 1 10.0.0.1 RoCE v2 v0, MTU 1024' ||
    fail "device and GID are not shown"
assert_server_works "refused addresses, devices and GIDs"

nobody=(setpriv --reuid 65534 --regid 65534 --clear-groups --bounding-set=-all)
chmod 600 /dev/infiniband/*
assert_fails "no permission" /dev/infiniband/ 'may not read and write' 'chmod 666' -- "${nobody[@]}" $rpcperf lat $at
chmod 666 /dev/infiniband/*
assert_fails "a privileged port" 'CAP_NET_BIND_SERVICE' -- "${nobody[@]}" $rpcperf serve --listen verbs:10.0.0.1:7
assert_fails "little memory may be locked" ibv_reg_mr bytes 'RLIMIT_MEMLOCK is' 'ulimit -l unlimited' -- \
    prlimit --memlock=1000000 "${nobody[@]}" $rpcperf lat $at
assert_fails "no memory may be locked, at a server" 'RLIMIT_MEMLOCK is' 'ulimit -l unlimited' -- \
    prlimit --memlock=65536 "${nobody[@]}" $rpcperf serve --listen verbs:10.0.0.1:20059
assert_fails "few files" 'ulimit -n' -- prlimit --nofile=8 $rpcperf raw-lat $at
"${nobody[@]}" $rpcperf lat $at -n 20 >/dev/null || fail "a user with all permissions is not served"
mv /dev/infiniband/rdma_cm /dev/infiniband/hidden
assert_fails "no connection manager" /dev/infiniband/rdma_cm 'modprobe rdma_ucm' -- $rpcperf lat $at
mv /dev/infiniband/hidden /dev/infiniband/rdma_cm
assert_server_works "permissions and limits"

ip link set v0 down
assert_fails "no link" 'no port is active' 'ip link set' -- $rpcperf serve --listen verbs:10.0.0.1:20059
bring_link_up
kill "$server"
wait "$server" || true
await bash -c '! rdma resource show cm_id | grep -q rpcperf'
rdma link delete rxe0
assert_fails "no device" 'no RDMA devices' 'rdma link' 'modprobe' 'rdma link add' -- $rpcperf lat $at
assert_fails "no device, at a server" 'modprobe' 'rdma link add' -- $rpcperf serve --listen $at
rdma link add rxe0 type rxe netdev v0
await grep -qs ffff:0a00:0001 /sys/class/infiniband/rxe0/ports/1/gids/1
serve server $at --only calls
$rpcperf lat $at -n 20 >/dev/null || fail "not served after these failures"
