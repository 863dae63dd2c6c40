# Debian's rpcbind: a server registers there under the netid rdma or rdma6, and withdraws when it ends. Clients find it
# there.
source "$(dirname "$0")/../lib.sh"
source "$(dirname "$0")/../nfsd.sh"
program RPCRDMA rpcrdma "cargo build -p rpcrdma-tools --features verbs"
program NFS3C nfs3c "cargo build -p rpcrdma-nfs3d --features verbs"
program NFS3D nfs3d "cargo build -p rpcrdma-nfs3d --features verbs"
up # also starts rpcbind
mkdir -p /srv/rpcbind
mount -t tmpfs tmpfs /srv/rpcbind
echo found >/srv/rpcbind/file
said=/run/said

# registered: prints rpcbind's entries for RDMA, and for MOUNT at the port of nfs3d.
registered() { rpcinfo 2>/dev/null | grep -E ' rdma6? |\.78\.180 ' | awk '{ print $1, $2, $3, $4 }' || true; }
# The kernel's server does not register its RDMA port.
[[ -z $(registered) ]] || fail "registered before the test: $(registered)"
! "$RPCRDMA" ping --rpcbind -c 1 verbs:10.0.0.1 2>$said || fail "ping found an unregistered program"
grep -q 'has no program 100003 version 3 over rdma' $said || fail "$(cat $said)"

# nfs3d does not replace a registration of another server: mountd has MOUNT.
! "$NFS3D" /srv/rpcbind --listen verbs:10.0.0.1:20099 --mount-port 20148 --key /run/rpcbind.key --clients 1 --rpcbind \
    2>$said || fail "a second server registered the same program"
grep -q 'user superuser registered it at 0.0.0.0.78.80' $said || fail "$(cat $said)"
[[ -z $(registered) ]] || fail "still registered: $(registered)"
rpcinfo -d 100005 3

# serve ADDRESS: starts an nfs3d that registers itself.
serve() {
    : >$said
    "$NFS3D" /srv/rpcbind --squash none --listen "$1" --mount-port 20148 --key /run/rpcbind.key \
        --clients 1 --rpcbind >$said 2>&1 &
    server=$!
    await grep -q '^listening' $said
}
quit() { kill -TERM $server && wait $server || fail "the server ended with $?: $(cat $said)"; }

serve verbs:10.0.0.1:20099
rpcinfo
[[ $(registered) == "100003 3 rdma 10.0.0.1.78.131
100005 3 tcp 0.0.0.0.78.180" ]] || fail "registered is: $(registered)"
# Checks version 2 of rpcbind, which supports only TCP and UDP.
rpcinfo -p | grep -q '100005 .* 20148 ' || fail "$(rpcinfo -p)"
"$RPCRDMA" ping --rpcbind --json -c 3 -i 0 verbs:10.0.0.1 100003 3 >/run/ping || fail "ping: $(cat /run/ping)"
is /run/ping address '"verbs:10.0.0.1:20099"'
is /run/ping rdma_version 2
"$NFS3C" --rpcbind verbs:10.0.0.1 /srv/rpcbind get file /run/file || fail "nfs3c does not find it"
[[ $(cat /run/file) == found ]] || fail "$(cat /run/file)"
quit
[[ -z $(registered) ]] || fail "still registered: $(registered)"

echo "- IPv6; and a server that was killed"
serve 'verbs:[fd00::1]:20099'
kill -KILL $server
wait $server || true
serve 'verbs:[fd00::1]:20099'
[[ $(registered) == "100003 3 rdma6 fd00::1.78.131
100005 3 tcp 0.0.0.0.78.180" ]] || fail "registered is: $(registered)"
"$RPCRDMA" ping --rpcbind --json -c 1 'verbs:[fd00::1]' >/run/ping || fail "ping: $(cat /run/ping)"
is /run/ping address '"verbs:[fd00::1]:20099"'
quit
[[ -z $(registered) ]] || fail "still registered: $(registered)"
