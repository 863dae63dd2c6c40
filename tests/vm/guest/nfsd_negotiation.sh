# rpcrdma ping and the Linux kernel's NFS server: fallback from version 2 to 1 on one connection, credits, use of Send
# With Invalidate.
source "$(dirname "$0")/../lib.sh"
source "$(dirname "$0")/../nfsd.sh"
program RPCRDMA rpcrdma "cargo build -p rpcrdma-tools --features verbs"
up
said=/run/ping

# ping OPTION…: runs ping, which must succeed. Its output is in $said.
ping() { "${enter[@]}" "$RPCRDMA" ping --json -c 20 -i 0 "$@" >$said || fail "ping $*: $(cat $said)"; }

echo "- begins in version 2, is answered with ERR_VERS, and continues in version 1 on the same connection"
ping $at
is $said rdma_version 1
is $said connections 1
is $said answered 20
is $said inline_send 4096
is $said inline_receive 4096
# The limit is 1 until the first reply, and then the grant of the latest.
is $said credits_at_start 1
is $said credits 64
# The reply to a call with a Reply chunk uses it, and invalidates its one handle.
is $said reply_chunk '"used"'
is $said invalidated_by_server 1
is $said invalidated_here 0

echo "- private data without the flag: nothing is invalidated by the server"
ping --no-invalidate $at:20049
is $said reply_chunk '"used"'
is $said invalidated_by_server 0
is $said invalidated_here 1

echo "- version 1 from the start"
ping --rdma-version 1 $at
is $said rdma_version 1
is $said credits 64

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
! "${enter[@]}" "$RPCRDMA" ping --json -c 1 $at 100003 9 >$said || fail "ping of an unsupported version succeeded"
grep -q 'server has 3 to 4' $said || fail "$(cat $said)"
! "${enter[@]}" "$RPCRDMA" ping -c 1 $at:20050 2>$said || fail "ping of a port without a listener succeeded"
grep -q 'no listener at' $said || fail "$(cat $said)"
