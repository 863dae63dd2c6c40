# The Linux kernel's NFS 4.1 server calls its client, nfs41c, on the client's connection (RFC 8167). It recalls a
# delegation because a local process at the server writes the file.
source "$(dirname "$0")/../lib.sh"
source "$(dirname "$0")/../nfsd.sh"
find_program NFS41C nfs41c "cargo build -p rpcrdma-tests --features verbs --bin nfs41c"
start_nfsd
mkdir -p /srv/nfs/callback
output=/run/output

for version in 2 1; do
    echo before >/srv/nfs/callback/file
    # In its grace period after a start, the server grants no delegations.
    for attempt in {1..60}; do
        : >$output
        "${enter[@]}" "$NFS41C" --rdma-version $version $at callback/file >$output 2>&1 &
        client=$!
        await grep -q '^delegated\|^nfs41c:' $output
        grep -q 'opened without a delegation' $output || break
        sleep 0.5
    done
    # The server blocks this write until the delegation is returned.
    timeout 40 bash -c 'echo after >>/srv/nfs/callback/file' || fail "the delegation was not returned: $(cat $output)"
    wait $client || fail "the client ended with $?: $(cat $output)"
    cat $output
    # The ends negotiate version 1, whichever version the client starts with.
    for words in 'session of RPC-over-RDMA version 1, with a back channel' 'CB_SEQUENCE 1 of slot 0' CB_RECALL \
        'returned the delegation' ', 0 messages rejected'; do
        grep -q "$words" $output || fail "the output of the client lacks: $words"
    done
    [[ $(cat /srv/nfs/callback/file) == $'before\nafter' ]] || fail "$(cat /srv/nfs/callback/file)"
    rm /srv/nfs/callback/file
done
