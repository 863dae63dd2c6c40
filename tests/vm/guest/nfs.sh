# The Linux kernel's NFS client and server, connected over RDMA, as a baseline for tests with this engine. A file
# written through a mount reaches the server, reads back equal, and its bytes travel by RDMA.
source "$(dirname "$0")/../lib.sh"
source "$(dirname "$0")/../peers.sh"

"$(dirname "$0")/../nfsd-up" /srv/nfs
# Other scripts need the port.
trap 'umount -l /mnt 2>/dev/null || true; rpc.nfsd 0' EXIT
head -c 3000001 /dev/urandom >/run/file
sum=$(sha256sum </run/file)

# check_mount OPTIONS PATH: mounts the path, writes the file, and reads it back in a new mount with an empty cache.
check_mount() {
    local mount=(mount -t nfs -o "proto=rdma,port=20049,$1" "$kernel:$2" /mnt)
    "${mount[@]}"
    rdma resource show cm_id link "$DEVICE" | grep "state CONNECT.*dst-addr $kernel:20049" ||
        fail "$1: not over $DEVICE: $(rdma resource show cm_id)"
    cp /run/file /mnt/file
    umount /mnt
    [[ $(sha256sum </srv/nfs/file) == "$sum" ]] || fail "$1: the server's file differs from the written one"
    "${mount[@]}"
    [[ $(sha256sum </mnt/file) == "$sum" ]] || fail "$1: the read file differs from the server's"
    # The 15th figure after the word rdma: bytes that replies returned in chunks.
    grep '^[[:space:]]*xprt:' /proc/self/mountstats
    awk '$1 == "xprt:" && $2 == "rdma" { rdma = $17 } END { exit !(rdma >= 3000001) }' /proc/self/mountstats ||
        fail "$1: the file did not come by RDMA"
    umount /mnt
    rm /srv/nfs/file
    echo "$1: ok"
}

check_mount vers=3,mountproto=tcp,mountport=20048,nolock /srv/nfs
check_mount vers=4.1 /
