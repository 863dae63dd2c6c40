# The link goes down and comes up.
#
# With nothing under way the server goes on as if nothing had been. Under load the clients behind the link are told, nobody hangs, and what was theirs comes
# back; others are served all the while, and when the link is up again, those that were lost are served again, by the same server.
#
# A device whose own interface is down is another matter, in Linux 6.1: a message of its connection manager that is sent meanwhile, as each disconnect sends
# one, blocks its queue pair 1 for good, and nobody connects by it any more, rping neither. So each such device is made again.
# limit: 300
source "$(dirname "$0")/../lib.sh"
source "$(dirname "$0")/../rpcperf.sh"
program RPCRDMA rpcrdma "cargo build -p rpcrdma-tools --features verbs"
at=verbs:10.0.0.1:20049
serve server $at -q 8 -s 64K
"$rpcperf" lat $at -n 50 >/dev/null
await 30 bash -c '! rdma resource show cm_id | grep -q "state CONNECT"'
holds >/run/before
wired=''
trap '[[ -z $wired ]] || "$(dirname "$0")/../wire-up" down; up
    for process in $(jobs -p); do kill "$process" 2>/dev/null || true; done' EXIT

# load ARGUMENT…: clients that write and read as fast as they can, and what they have to say.
load() {
    local op
    clients=()
    for op in write read; do
        "$rpcperf" bw $at --op $op -s 64K -t 4 -D 60 --idle event "$@" >"/run/busy-$op" 2>&1 &
        clients+=($!)
    done
    await 30 grep -q '#bytes' /run/busy-write
    await 30 grep -q '#bytes' /run/busy-read
    sleep 1
}

# lost WHAT: each of them ends, with an error that says so.
lost() {
    local client op status
    for client in "${clients[@]}"; do
        # A lost packet is sent again for some seconds before the device gives up.
        await 60 bash -c "! kill -0 $client 2>/dev/null"
        status=0
        wait "$client" || status=$?
        ((status == 1)) || fail "$1: exit status $status of a client: $(cat /run/busy-*)"
    done
    for op in write read; do
        grep -q 'rpcperf: .*connection lost' "/run/busy-$op" || fail "$1: nothing is said of the loss: $(<"/run/busy-$op")"
        echo "- $1, amid --op $op: $(grep rpcperf: "/run/busy-$op")"
    done
}

ip link set v0 down
sleep 0.5
up
unharmed "the link down and up, with nothing under way"

# The other one is connected before there is a way over the cable, and so within the device.
"$RPCRDMA" ping -c 100000 -i 0.1 $at 0x20525046 2 >/run/other 2>&1 &
other=$!
answers() { wc -l </run/other; }
await 30 bash -c '(( $(wc -l </run/other) > 5 ))'
theirs() { rdma resource show qp link rxe0 | grep -c "type RC" || true; }
quiet=$(theirs)
# The first request over a new cable is lost, and not sent again before somebody has lost patience.
wire() { "$(dirname "$0")/../wire-up" && wired=1 && await 30 "$rpcperf" lat $at -n 50; }
unwire() { "$(dirname "$0")/../wire-up" down && wired=''; }
wire
load
(($(theirs) > quiet)) || fail "no queue pair for the clients: $(rdma resource show qp)"
ip link set v1 down
await 10 grep -q DOWN /sys/class/infiniband/rxe0/ports/1/state
lost "the link down"
before=$(answers)
# The server is not told: it finds out by its device, or by its keep-alive.
await 60 bash -c "(( \$(rdma resource show qp link rxe0 | grep -c 'type RC') == $quiet ))"
(($(answers) > before)) || fail "the other client is not served while the link is down: $(tail -n 3 /run/other)"
echo "- what the lost clients had has come back; another was served all the while"
unwire
ip link set v1 up
ip address add fd00::2/64 dev v1 nodad 2>/dev/null || true
await 10 grep -q ACTIVE /sys/class/infiniband/rxe0/ports/1/state
wire
"$rpcperf" bw $at --op write -s 64K -n 50 >/run/again 2>&1 || fail "not served after the link came back: $(</run/again)"
rdma resource show qp link rxe1 | grep -q 'type RC' && fail "a client left something: $(rdma resource show qp link rxe1)"
unwire
kill -INT $other
wait $other || fail "calls of the other client failed: $(tail /run/other)"
unharmed "the link down and up amid calls: the same server serves on"

load
ip link set v0 down
lost "the server's interface down"
fails "a client while it is down" 'no port is active' 'ip link set' -- "$rpcperf" lat $at
kill -0 "$server" || fail "the server is gone"
# Nothing can be asked of the device while its interface is down: most times it gives the server's ends back, sometimes it keeps one.
gone() { rdma resource show | grep -q " qp 1 "; }
for ((second = 0; second < 60; second++)); do gone && break || sleep 1; done
echo "- of the clients, the device holds $(theirs) queue pairs after $second s"
up
# What it keeps ends with the server.
kill "$server"
await 60 bash -c "! kill -0 $server 2>/dev/null"
wait "$server" || true
await 10 gone
await 30 bash -c '! rdma resource show mr | grep -q rpcperf'
rdma link delete rxe0
rdma link add rxe0 type rxe netdev v0
await 10 grep -qs ffff:0a00:0001 /sys/class/infiniband/rxe0/ports/1/gids/1
serve server $at -q 8 -s 64K
"$rpcperf" bw $at --op write -s 64K -n 50 >/run/again 2>&1 || fail "not served after the interface came back: $(</run/again)"
