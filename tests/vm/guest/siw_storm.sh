# Many consecutive connections to the Linux kernel's server over soft-iWARP and from its client. Also ends that are
# killed during bulk data.
#
# The kernel's siw, as responder, sends its reply and then reads its socket only when more data arrives. A first message
# that arrives in between is not read. Each connection makes its first call immediately, and waits up to 30 s for the
# reply. Without the fabric's precaution about one in ten fails, so at least one of 50 almost certainly does.
source "$(dirname "$0")/../lib.sh"
source "$(dirname "$0")/../siw.sh"

began=$SECONDS
for ((n = 1; n <= 50; n++)); do
    "${enter[@]}" "$RPCRDMA" ping -q --no-chunk -c 1 -W 30 $at >/run/ping 2>&1 || fail "connection $n: $(</run/ping)"
done
echo "- 50 connections to the kernel's server in $((SECONDS - began)) s"
assert_server_works "50 connections"

# Excludes reads: after them the kernel's server may wait forever (svc_rdma_sendto) for its device to complete its
# posts. That involves no code of this project, and nothing can run afterwards.
start_transfer put
kill -KILL "$client"
wait "$client" 2>/dev/null || true
assert_server_works "a client killed during put"

for what in put get; do
    start_transfer $what
    rpc.nfsd 0
    assert_client_lost "the kernel's server ended during $what"
    "$vm/nfsd-up" /srv/nfs
    assert_server_works "the kernel's server again"
done
rm /run/large /srv/nfs/large
rpc.nfsd 0

# The reverse direction: the kernel connects.
source "$vm/nfs3d.sh"
mount_storage
serve
began=$SECONDS
for ((n = 1; n <= 20; n++)); do
    mount_nfs || fail "mount $n"
    umount /mnt
done
echo "- 20 mounts by the kernel's client in $((SECONDS - began)) s"
await eval '(($(count_kernel_connections) == 0 && $(count_connections) == 0))'
stop_server
