# Two hosts without an RDMA device, here two network namespaces: the commands of the README's section on them.
source "$(dirname "$0")/../lib.sh"
find_program RPCPERF rpcperf "cargo build -p rpcrdma-bench --features verbs"
find_program BLOCKSTORE blockstore "cargo build -p rpcrdma-blockstore --features verbs"
ip netns add near
ip netns add far
trap 'for process in $(jobs -p); do kill "$process" 2>/dev/null || true; done; ip netns delete near; ip netns delete far' EXIT
ip link add n0 netns near type veth peer name f0 netns far
ip -netns near address add 192.0.2.1/24 dev n0
ip -netns far address add 192.0.2.2/24 dev f0
ip -netns near link set n0 up
ip -netns far link set f0 up
run_near() { ip netns exec near "$@"; }
run_far() { ip netns exec far "$@" >/run/output 2>&1 || fail "$*: $(</run/output)"; }

run_near "$RPCPERF" serve --listen iwarp:192.0.2.1:20049 --only calls >/run/serve 2>&1 &
await grep -q '^listening' /run/serve
run_far "$RPCPERF" lat iwarp:192.0.2.1:20049 -s 64 -n 1000
tail -n 1 /run/output
run_far "$RPCPERF" bw iwarp:192.0.2.1:20049 --op read -s 1M -n 50
tail -n 1 /run/output

# The fabric alone, on a port of its own.
run_near "$RPCPERF" serve --listen iwarp:192.0.2.1:20059 --only raw >/run/serve-raw 2>&1 &
await grep -q '^listening' /run/serve-raw
for op in send read write; do
    run_far "$RPCPERF" raw-lat iwarp:192.0.2.1:20059 --op $op -s 64 -n 1000
    tail -n 2 /run/output
    run_far "$RPCPERF" raw-bw iwarp:192.0.2.1:20059 --op $op -s 64K -n 500
    tail -n 2 /run/output
done

head -c 3000001 /dev/urandom >/run/movie
(umask 077 && head -c 32 /dev/urandom >/run/host.key)
run_near "$BLOCKSTORE" serve --file /run/disk.img --size 16M --listen iwarp:192.0.2.1:20050 --host-key /run/host.key \
    >/run/store 2>&1 &
await grep -q '^listening' /run/store
run_far "$BLOCKSTORE" copy /run/movie iwarp:192.0.2.1:20050 --host-key /run/host.key
run_far "$BLOCKSTORE" verify /run/movie iwarp:192.0.2.1:20050 --host-key /run/host.key
grep 'equal to the source' /run/output
cmp -n 3000001 /run/movie /run/disk.img || fail "the stored data differs"
# A client without a key is not served.
! ip netns exec far "$BLOCKSTORE" verify /run/movie iwarp:192.0.2.1:20050 >/run/output 2>&1 ||
    fail "served without a key"
grep -q '^error' /run/output || fail "$(</run/output)"
