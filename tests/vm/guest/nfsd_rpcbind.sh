# Debian's rpcbind: a server registers under the netid rdma or rdma6, and removes its registration when it ends. Clients
# find the server by rpcbind.
source "$(dirname "$0")/../lib.sh"
source "$(dirname "$0")/../nfsd.sh"
find_program RPCRDMA rpcrdma "cargo build -p rpcrdma-tools --features verbs"
find_program NFS3C nfs3c "cargo build -p rpcrdma-nfs3d --features verbs"
find_program NFS3D nfs3d "cargo build -p rpcrdma-nfs3d --features verbs"
start_nfsd # also starts rpcbind
mkdir -p /srv/rpcbind
mount -t tmpfs tmpfs /srv/rpcbind
echo found >/srv/rpcbind/file
output=/run/output

# print_registrations: prints rpcbind's entries for RDMA, and for MOUNT at the port of nfs3d.
print_registrations() { rpcinfo 2>/dev/null | grep -E ' rdma6? |\.78\.180 ' | awk '{ print $1, $2, $3, $4 }' || true; }
# The kernel's server does not register its RDMA port.
[[ -z $(print_registrations) ]] || fail "registered before the test: $(print_registrations)"
! "$RPCRDMA" ping --rpcbind -c 1 verbs:10.0.0.1 2>$output || fail "ping found an unregistered program"
grep -q 'has no program 100003 version 3 over rdma' $output || fail "$(cat $output)"

# nfs3d does not replace a registration of another server: mountd has MOUNT.
! "$NFS3D" /srv/rpcbind --listen verbs:10.0.0.1:20099 --mount-port 20148 --key /run/rpcbind.key --clients 1 --rpcbind \
    2>$output || fail "a second server registered the same program"
grep -q 'user superuser registered it at 0.0.0.0.78.80' $output || fail "$(cat $output)"
[[ -z $(print_registrations) ]] || fail "still registered: $(print_registrations)"
rpcinfo -d 100005 3

# serve ADDRESS: starts an nfs3d that registers itself.
serve() {
    : >$output
    "$NFS3D" /srv/rpcbind --squash none --listen "$1" --mount-port 20148 --key /run/rpcbind.key \
        --clients 1 --rpcbind >$output 2>&1 &
    server=$!
    await grep -q '^listening' $output
}
stop_server() { kill -TERM $server && wait $server || fail "the server ended with $?: $(cat $output)"; }

serve verbs:10.0.0.1:20099
rpcinfo
[[ $(print_registrations) == "100003 3 rdma 10.0.0.1.78.131
100005 3 tcp 0.0.0.0.78.180" ]] || fail "unexpected registrations: $(print_registrations)"
# Checks version 2 of rpcbind, which supports only TCP and UDP.
rpcinfo -p | grep -q '100005 .* 20148 ' || fail "$(rpcinfo -p)"
"$RPCRDMA" ping --rpcbind --json -c 3 -i 0 verbs:10.0.0.1 100003 3 >/run/ping || fail "ping: $(cat /run/ping)"
assert_value /run/ping address '"verbs:10.0.0.1:20099"'
assert_value /run/ping rdma_version 2
"$NFS3C" --rpcbind verbs:10.0.0.1 /srv/rpcbind get file /run/file || fail "nfs3c does not find the server"
[[ $(cat /run/file) == found ]] || fail "$(cat /run/file)"
stop_server
[[ -z $(print_registrations) ]] || fail "still registered: $(print_registrations)"

echo "- IPv6; and a server that was killed"
serve 'verbs:[fd00::1]:20099'
kill -KILL $server
wait $server || true
serve 'verbs:[fd00::1]:20099'
[[ $(print_registrations) == "100003 3 rdma6 fd00::1.78.131
100005 3 tcp 0.0.0.0.78.180" ]] || fail "unexpected registrations: $(print_registrations)"
"$RPCRDMA" ping --rpcbind --json -c 1 'verbs:[fd00::1]' >/run/ping || fail "ping: $(cat /run/ping)"
assert_value /run/ping address '"verbs:[fd00::1]:20099"'
stop_server
[[ -z $(print_registrations) ]] || fail "still registered: $(print_registrations)"
