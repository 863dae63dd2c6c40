# Functions for tests of failing connections between the Linux kernel's NFS server over soft-iWARP and this project's
# clients. Scripts source this file in bash in the guest, after lib.sh. It starts the server; see nfsd.sh.
export DEVICE=siw0
source "$(dirname "${BASH_SOURCE[0]}")/nfsd.sh"
find_program RPCRDMA rpcrdma "cargo build -p rpcrdma-tools --features verbs"
find_program NFS3C nfs3c "cargo build -p rpcrdma-nfs3d --features verbs"
start_nfsd
truncate -s 1G /run/large
cp /run/large /srv/nfs/large

# count_kernel_connections: prints the kernel's connections, of both roles.
count_kernel_connections() { rdma resource show cm_id link siw0 | grep -c 'state CONNECT' || true; }

# is_kernel_reachable: succeeds if packets reach the peer, which a refused connection also proves.
is_kernel_reachable() {
    [[ $("${enter[@]}" bash -c "exec 3<>/dev/tcp/$kernel/9" 2>&1) != *'No route to host'* ]]
}

# assert_server_works WHAT: checks that the kernel's server keeps running and has freed the closed connections.
assert_server_works() {
    await eval '(($(count_kernel_connections) == 0))'
    # When a link has just come up, the other end's address is briefly unresolved.
    await is_kernel_reachable
    "${enter[@]}" "$RPCRDMA" ping -q -c 3 -i 0 $at >/run/ping 2>&1 || fail "$1: not served: $(</run/ping)"
    echo "- $1: ok"
}

# start_transfer put|get: starts a client that transfers bulk data. $client: its process.
start_transfer() {
    local what=(get large /run/copy)
    [[ $1 == get ]] || what=(put /run/large copy)
    rm -f /run/copy /srv/nfs/copy
    "${enter[@]}" "$NFS3C" --depth 8 $at /srv/nfs "${what[@]}" >/run/busy 2>&1 &
    client=$!
    await bash -c "(( \$(cat /run/copy /srv/nfs/copy 2>/dev/null | head -c 4000000 | wc -c) == 4000000 ))"
}

# assert_client_lost WHAT: checks that the client ends by itself and prints the reason.
assert_client_lost() {
    local status=0
    await bash -c "! kill -0 $client 2>/dev/null"
    wait "$client" || status=$?
    ((status == 1)) || fail "$1: exit status $status of a client: $(</run/busy)"
    grep -q '^nfs3c: ' /run/busy || fail "$1: the client does not print the cause: $(</run/busy)"
    echo "- $1: $(tail -n 1 /run/busy)"
}
