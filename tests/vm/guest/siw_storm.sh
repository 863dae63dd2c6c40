# Connections to the Linux kernel's server over soft-iWARP and by its client, many one after another; and ends that
# are killed amid bulk data.
#
# The kernel's siw, as responder, sends its reply and then looks at its socket only when more comes: a first message
# that came in between lies there. Each connection makes its first call at once, and may wait for its reply for 30 s:
# without the fabric's precaution about one in ten does so in vain, and so one of 100 all but surely.
source "$(dirname "$0")/../lib.sh"
source "$(dirname "$0")/../siw.sh"

began=$SECONDS
for ((n = 1; n <= 100; n++)); do
    "${enter[@]}" "$RPCRDMA" ping -q --no-chunk -c 1 -W 30 $at >/run/ping 2>&1 || fail "connection $n: $(</run/ping)"
done
echo "- 100 connections to the kernel's server in $((SECONDS - began)) s"
unharmed "100 connections"

# Not amid reads: the kernel's server then may wait for ever (svc_rdma_sendto) for its device to end what it has posted.
# Nothing of this project is in that, and nothing can be run behind it.
busy put
kill -KILL "$client"
wait "$client" 2>/dev/null || true
unharmed "a client killed amid put"

for what in put get; do
    busy $what
    rpc.nfsd 0
    lost "the kernel's server ended amid $what"
    "$vm/nfsd-up" /srv/nfs
    unharmed "the kernel's server again"
done
rm /run/large /srv/nfs/large
rpc.nfsd 0

# The other way round: the kernel connects.
source "$vm/nfs3d.sh"
storage
serve
began=$SECONDS
for ((n = 1; n <= 50; n++)); do
    nfs || fail "mount $n"
    umount /mnt
done
echo "- 50 mounts by the kernel's client in $((SECONDS - began)) s"
await eval '(($(theirs) == 0 && $(connections) == 0))'
quit
