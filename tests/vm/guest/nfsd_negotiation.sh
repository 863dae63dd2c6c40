# rpcrdma ping and the Linux kernel's NFS server: fallback from version 2 to 1 on one connection, credits, use of Send
# With Invalidate.
source "$(dirname "$0")/../lib.sh"
source "$(dirname "$0")/../nfsd.sh"
find_program RPCRDMA rpcrdma "cargo build -p rpcrdma-tools --features verbs"
start_nfsd
output=/run/ping

# ping OPTION…: runs ping, which must succeed. Its output is in $output.
ping() { "${enter[@]}" "$RPCRDMA" ping --json -c 20 -i 0 "$@" >$output || fail "ping $*: $(cat $output)"; }

echo "- a client begins in version 2, gets ERR_VERS, and continues in version 1 on the same connection"
ping $at
assert_value $output rdma_version 1
assert_value $output connections 1
assert_value $output answered 20
assert_value $output inline_send 4096
assert_value $output inline_receive 4096
# The limit is 1 until the first reply, and then the grant of the latest.
assert_value $output credits_at_start 1
assert_value $output credits 64
# The reply to a call with a Reply chunk uses it, and invalidates its one handle.
assert_value $output reply_chunk '"used"'
assert_value $output invalidated_by_server 1
assert_value $output invalidated_here 0

echo "- private data without the flag: nothing is invalidated by the server"
ping --no-invalidate $at:20049
assert_value $output reply_chunk '"used"'
assert_value $output invalidated_by_server 0
assert_value $output invalidated_here 1

echo "- version 1 from the start"
ping --rdma-version 1 $at
assert_value $output rdma_version 1
assert_value $output credits 64

echo "- a server that ends and restarts"
"${enter[@]}" "$RPCRDMA" ping -i 0.1 -W 2 $at >/run/pings 2>&1 &
pinging=$!
await grep -q '^reply 3 ' /run/pings
rpc.nfsd 0
await grep -q '^call ' /run/pings
"$(dirname "$0")/../nfsd-up"
lost=$(wc -l </run/pings)
await bash -c "tail -n +$lost /run/pings | grep -q ^reply"
kill -INT $pinging
wait $pinging && fail "no call was reported as failed: $(cat /run/pings)"
grep -q 'connections begun: \([2-9]\|1[0-9]\)' /run/pings || fail "$(cat /run/pings)"

echo "- IPv6, and other programs and versions"
ping "$fabric:[$kernel6]:20049" 100227 3
! "${enter[@]}" "$RPCRDMA" ping --json -c 1 $at 100003 9 >$output || fail "ping of an unsupported version succeeded"
grep -q 'server has 3 to 4' $output || fail "$(cat $output)"
! "${enter[@]}" "$RPCRDMA" ping -c 1 $at:20050 2>$output || fail "ping of a port without a listener succeeded"
grep -q 'no listener at' $output || fail "$(cat $output)"
