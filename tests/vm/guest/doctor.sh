# `rpcrdma doctor` for a new user: its printed fixes work as they are, and the next run is clean. It runs first on this
# machine, then with many things broken, as root and as nobody.
# pair
source "$(dirname "$0")/../lib.sh"
find_program RPCRDMA rpcrdma 'cargo build -p rpcrdma-tools --features verbs --bin rpcrdma'
# Other users must be able to run it from any location of the repository.
install -m 755 "$RPCRDMA" /run/rpcrdma
at=verbs:10.0.0.1:20049
as=() # runs doctor as this user
sudo() { "$@"; }

# run_doctor STATUS ARGUMENT…: runs doctor and checks its exit status. The report is in /run/report.
run_doctor() {
    local expected=$1 status=0
    shift
    "${as[@]}" /run/rpcrdma doctor "$@" >/run/report || status=$?
    ((status == expected)) || fail "doctor $*: exit status $status, expected $expected: $(</run/report)"
}

# assert_reported NAME…: checks that these checks of doctor report a warning or an error.
assert_reported() {
    local name
    for name; do grep -Eq "^  (warning|error) +$name: " /run/report || fail "check $name reports nothing: $(</run/report)"; done
}

# apply_fixes: runs the commands that the warnings and errors recommend.
apply_fixes() {
    awk '/^  (warning|error) /{ wanted = 1 } /^  (ok|unknown|note) /{ wanted = fix = 0 }
        !wanted { next }
        sub(/^           fix: /, "") { fix = 1; print; next }
        /^           [a-z]/ { fix = 0 }
        fix && sub(/^                /, "") { print }' /run/report >/run/commands
    echo "--- the recommended commands:"
    cat /run/commands
    # Limits and control groups belong to this shell.
    set +e
    source /run/commands
    set -e
    # GIDs appear shortly after the device.
    await bash -c 'grep -qs ffff:0a00:0001 /sys/class/infiniband/*/ports/1/gids/*'
}

echo "=== as it is"
mount -t cgroup2 none /sys/fs/cgroup
/run/rpcrdma topo $at --cores 1 >/run/topo
grep -q 'rdma rxe0' /run/topo || fail "topo does not know the device: $(</run/topo)"
grep -q '^shards on 1$' /run/topo || fail "topo does not propose core 1: $(</run/topo)"
run_doctor 1 $at --cores 1
assert_reported isolation workqueues huge-pages
apply_fixes
run_doctor 0 $at --cores 1
grep -q 'isolation: isolated: 1$' /run/report || fail "core 1 is not isolated: $(</run/report)"
# Other scripts need both cores and the memory.
echo $$ >/sys/fs/cgroup/cgroup.procs
rmdir /sys/fs/cgroup/rpcrdma
umount /sys/fs/cgroup
echo 3 >/sys/devices/virtual/workqueue/cpumask
for irq in /proc/irq/[0-9]*/smp_affinity_list; do echo 0-1 >"$irq" || true; done 2>/dev/null
for pages in /sys/devices/system/node/node*/hugepages/*/nr_hugepages; do echo 0 >"$pages"; done

echo "=== no device, no connection manager"
# Both ends of the cable are in this network, and the first route determines the interface of the address.
ip route delete 10.0.0.0/24 dev v1
ip route append 10.0.0.0/24 dev v1 proto kernel scope link src 10.0.0.2
rdma link delete rxe0
modprobe -r rdma_ucm
run_doctor 2 $at
assert_reported rdma-device rdma-cm
apply_fixes
run_doctor 0 $at

echo "=== no link, and settings"
ip link set dev v0 down
sysctl -qw vm.overcommit_memory=2 vm.overcommit_ratio=99
echo always >/sys/kernel/mm/transparent_hugepage/enabled
run_doctor 2 $at
assert_reported rdma-link overcommit transparent-huge-pages
apply_fixes
ip address replace fd00::1/64 dev v0 nodad # lost while the interface was down
await grep -qs fd00:0000 /sys/class/infiniband/rxe0/ports/1/gids/2
run_doctor 0 $at

echo "=== nobody, with a low limit of locked memory"
as=(setpriv --reuid 65534 --regid 65534 --clear-groups --bounding-set=-all)
chmod 600 /dev/infiniband/*
ulimit -l 64
run_doctor 2 $at
assert_reported memlock device-files
grep -q 'sudo prlimit' /run/report || fail "the report lacks the command that raises the limits: $(</run/report)"
apply_fixes
run_doctor 0 $at

echo "=== sockets"
as=()
sysctl -qw net.core.somaxconn=64 net.ipv4.tcp_rmem='4096 65536 65536'
ulimit -Sn 256
run_doctor 1 iwarp:10.0.0.1
assert_reported backlog tcp-buffers descriptors
apply_fixes
run_doctor 0 iwarp:10.0.0.1
