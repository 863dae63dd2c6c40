# Functions for tests with rpcperf over the verbs fabric. Scripts source this file in bash in the guest, after lib.sh.
# $rpcperf is the program.
program RPCPERF rpcperf "cargo build -p rpcrdma-bench --features verbs"
rpcperf=$RPCPERF

# serve NAME ADDRESS [OPTION…]: starts a server and waits until it listens. Its output is in /run/NAME. $server: its
# process.
serve() {
    local name=$1 address=$2
    shift 2
    : >"/run/$name"
    "$rpcperf" serve --listen "$address" "$@" >"/run/$name" 2>&1 &
    server=$!
    await grep -q '^listening' "/run/$name"
}

# holds: prints the device's resources in use by all processes, and this server's pinned memory and open files.
holds() {
    rdma resource show | sed 's/^[0-9]*: //'
    rdma resource show cm_id | grep -c 'state CONNECT' || true
    grep VmPin "/proc/$server/status"
    ls "/proc/$server/fd" | wc -l
}

# told EXPRESSION: evaluates Python on `shards`, the statistics of a server with --stats /run/server.stats. Waits until
# all shards have answered. A shard in a long system call, as when a link goes down, answers late.
told() {
    python3 -c 'import json, socket, sys, time
for _ in range(100):
    said = socket.socket(socket.AF_UNIX)
    said.connect("/run/server.stats")
    shards = [shard["stats"] for shard in json.load(said.makefile())["shards"]]
    if all(shards):
        print(eval(sys.argv[1]))
        sys.exit()
    time.sleep(0.2)
sys.exit("a shard does not answer")' "$1"
}

# counted COUNTER: prints the sum of a counter over all shards of such a server.
counted() { told "sum(shard['$1'] for shard in shards)"; }

# settled: succeeds if the resources in use equal those in /run/before.
settled() { [[ $(holds) == "$(</run/before)" ]]; }

# unharmed WHAT: checks that the server serves, and that it uses no more resources than before.
unharmed() {
    kill -0 "$server" || fail "$1: the server is gone"
    local end=$((SECONDS + 150))
    until "$rpcperf" lat verbs:10.0.0.1:20049 -n 50 >/run/lat 2>&1; do
        ((SECONDS <= end)) || fail "$1: the server does not serve: $(</run/lat)"
    done
    until settled; do
        ((SECONDS <= end)) || fail "$1: the server holds $(holds), before it was $(</run/before)"
        sleep 0.2
    done
    echo "- $1: ok"
}

# fails WHAT PATTERN… -- COMMAND…: checks that the command soon fails by itself and prints all patterns. $ended is the
# expected exit status if that is not 1.
fails() {
    local what=$1 status=0 patterns=() pattern
    shift
    while [[ $1 != -- ]]; do patterns+=("$1") && shift; done
    shift
    timeout 150 "$@" >/run/said 2>&1 </dev/null || status=$?
    ((status == ${ended:-1})) || fail "$what: exit status $status: $(</run/said)"
    for pattern in "${patterns[@]}"; do
        grep -qF -- "$pattern" /run/said || fail "$what: the output lacks '$pattern': $(</run/said)"
    done
    echo "- $what: $(tail -n 1 /run/said)"
}

# up: brings the link up, and restores the address that it lost.
up() {
    ip link set v0 up
    ip address add fd00::1/64 dev v0 nodad 2>/dev/null || true
    await grep -q ACTIVE /sys/class/infiniband/rxe0/ports/1/state
    await grep -qs fd00:0000 /sys/class/infiniband/rxe0/ports/1/gids/2
}

# load ARGUMENT…: starts clients that write and read at full speed, with their output in files.
load() {
    local op
    clients=()
    for op in write read; do
        : >"/run/busy-$op"
        "$rpcperf" bw $at --op $op -s 64K -t 4 -D 600 --idle event "$@" >"/run/busy-$op" 2>&1 &
        clients+=($!)
    done
    await grep -q '#bytes' /run/busy-write
    await grep -q '#bytes' /run/busy-read
    sleep 1
}

# lost WHAT: checks that each of these clients ends, with an error for a lost call or for the next call.
lost() {
    local client op status
    for client in "${clients[@]}"; do
        # The device retransmits a lost packet for some seconds before it gives up.
        await bash -c "! kill -0 $client 2>/dev/null"
        status=0
        wait "$client" || status=$?
        ((status == 1)) || fail "$1: exit status $status of a client: $(cat /run/busy-*)"
    done
    for op in write read; do
        grep -qE 'rpcperf: .*(connection lost|not connected)' "/run/busy-$op" ||
            fail "$1: the client does not report the loss: $(<"/run/busy-$op")"
        echo "- $1, amid --op $op: $(grep rpcperf: "/run/busy-$op")"
    done
}
