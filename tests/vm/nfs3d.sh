# Functions for tests of nfs3d with the Linux kernel's client. Scripts source this file in bash in the guest, after
# lib.sh.
#
# The server exports /srv/nfs3d, a file system in memory, at $ours (see peers.sh), RDMA port 20049. MOUNT is at TCP port
# 20148. The server's output is in /run/nfs3d.
source "$(dirname "${BASH_SOURCE[0]}")/peers.sh"
find_program NFS3D nfs3d "cargo build -p rpcrdma-nfs3d --features verbs"
nfs3d=$NFS3D

modprobe -a rpcrdma nfsv3
mkdir -p /srv/nfs3d /mnt /mnt2
export=/srv/nfs3d
trap 'umount -l /mnt /mnt2 /srv/nfs3d 2>/dev/null || true
    for process in $(jobs -p); do kill "$process" 2>/dev/null || true; done' EXIT

# mount_storage [SIZE]: mounts the exported file system.
mount_storage() { mount -t tmpfs -o "mode=1777,size=${1:-75%}" tmpfs $export; }

# serve [OPTION…]: starts the server and waits until it listens. Sets $server to its process ID. Optional variables:
# $port (RDMA port, default 20049) and $address (FABRIC:HOST, default the fabric of the test at $ours).
serve() {
    : >/run/nfs3d
    "${enter[@]}" "$nfs3d" $export --listen "${address:-$fabric:$ours}:${port:-20049}" --mount-port 20148 --key /run/nfs3d.key --squash none \
        --clients 2 "$@" >/run/nfs3d 2>&1 &
    server=$!
    await grep -q '^listening' /run/nfs3d
}

# stop_server [PATTERN]: ends the server. Fails if the server logged other lines than those of start and stop, "shard
# was blocked" (on a busy host), and lines that match PATTERN.
stop_server() {
    kill -TERM "$server"
    wait "$server" || fail "the server ended with $?: $(cat /run/nfs3d)"
    ! grep -v -E "^(listening|drained|stopped|memory: [0-9]|WARN: shard was blocked${1:+|$1})" /run/nfs3d || fail "the server logged unexpected lines"
}

# mount_nfs [DIRECTORY [OPTIONS]]: mounts the export.
mount_nfs() {
    mount -t nfs -o "vers=3,proto=rdma,port=20049,mountproto=tcp,mountport=20148,nolock,${2:-rw}" \
        $ours:$export "${1:-/mnt}"
}

# count_connections: prints the number of the server's connections, as the kernel counts them.
count_connections() {
    if [[ $fabric == verbs ]]; then
        rdma resource show qp link $DEVICE | grep -c 'type RC.*state RTS.*comm rpcrdma-shard' || true
    else
        "${enter[@]}" ss -Htn state established 'sport = :20049' | wc -l
    fi
}

# print_xprt_figure DIRECTORY N: prints the Nth figure after the word rdma in a mount's mountstats.
print_xprt_figure() {
    awk -v dir="$1" -v n="$2" '$1 == "device" { on = $5 == dir }
        on && $1 == "xprt:" && $2 == "rdma" { print $(n + 2) }' \
        /proc/self/mountstats
}

# print_checksums DIRECTORY: prints the checksums of all files and the targets of all links in a directory.
print_checksums() {
    (cd "$1" && find . -type f -print0 | sort -z | xargs -0 -r sha256sum && find . -type l -printf '%p %l\n' | sort)
}
