# Functions for tests with rpcperf over the verbs fabric. Scripts source this file in bash in the guest, after lib.sh.
# $rpcperf is the program.
find_program RPCPERF rpcperf "cargo build -p rpcrdma-bench --features verbs"
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

# print_resources: prints the device's resources in use by all processes, and this server's pinned memory and open
# files.
print_resources() {
    rdma resource show | sed 's/^[0-9]*: //'
    rdma resource show cm_id | grep -c 'state CONNECT' || true
    grep VmPin "/proc/$server/status"
    ls "/proc/$server/fd" | wc -l
}

# query_stats EXPRESSION: evaluates Python on `shards`, the statistics of a server with --stats /run/server.stats. Waits
# until all shards have answered. A shard in a long system call, for example while a link goes down, answers late.
query_stats() {
    python3 -c 'import json, socket, sys, time
for _ in range(100):
    connection = socket.socket(socket.AF_UNIX)
    connection.connect("/run/server.stats")
    shards = [shard["stats"] for shard in json.load(connection.makefile())["shards"]]
    if all(shards):
        print(eval(sys.argv[1]))
        sys.exit()
    time.sleep(0.2)
sys.exit("a shard does not answer")' "$1"
}

# sum_counter COUNTER: prints the sum of a counter over all shards of that server.
sum_counter() { query_stats "sum(shard['$1'] for shard in shards)"; }

# has_initial_resources: succeeds if the resources in use equal those in /run/before.
has_initial_resources() { [[ $(print_resources) == "$(</run/before)" ]]; }

# assert_server_works WHAT: checks that the server serves, and that it uses no more resources than before.
assert_server_works() {
    kill -0 "$server" || fail "$1: the server is gone"
    local end=$((SECONDS + 150))
    until "$rpcperf" lat verbs:10.0.0.1:20049 -n 50 >/run/lat 2>&1; do
        ((SECONDS <= end)) || fail "$1: the server does not serve: $(</run/lat)"
    done
    until has_initial_resources; do
        ((SECONDS <= end)) || fail "$1: the server uses $(print_resources), and before that $(</run/before)"
        sleep 0.2
    done
    echo "- $1: ok"
}

# assert_fails WHAT PATTERN… -- COMMAND…: checks that the command soon fails by itself and prints all patterns.
# $expected_status is the exit status (1).
assert_fails() {
    local what=$1 status=0 patterns=() pattern
    shift
    while [[ $1 != -- ]]; do patterns+=("$1") && shift; done
    shift
    timeout 150 "$@" >/run/output 2>&1 </dev/null || status=$?
    ((status == ${expected_status:-1})) || fail "$what: exit status $status: $(</run/output)"
    for pattern in "${patterns[@]}"; do
        grep -qF -- "$pattern" /run/output || fail "$what: the output lacks '$pattern': $(</run/output)"
    done
    echo "- $what: $(tail -n 1 /run/output)"
}

# bring_link_up: brings the link up, and restores the address that it lost.
bring_link_up() {
    ip link set v0 up
    ip address add fd00::1/64 dev v0 nodad 2>/dev/null || true
    await grep -q ACTIVE /sys/class/infiniband/rxe0/ports/1/state
    await grep -qs fd00:0000 /sys/class/infiniband/rxe0/ports/1/gids/2
}

# start_load ARGUMENT…: starts clients that write and read at full speed, with their output in files.
start_load() {
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

# assert_clients_lost WHAT: checks that each client of start_load ends, with an error for a lost call or the next call.
assert_clients_lost() {
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
        echo "- $1, during --op $op: $(grep rpcperf: "/run/busy-$op")"
    done
}
