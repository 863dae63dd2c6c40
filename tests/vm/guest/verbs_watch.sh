# Monitoring of a busy server on the device: `rpcrdma top` as JSON and on a screen, the exporter's device counters,
# `rpcrdma doctor`. Each shows a value that only this fabric and this device can have counted.
source "$(dirname "$0")/../lib.sh"
source "$(dirname "$0")/../rpcperf.sh"
find_program RPCRDMA rpcrdma 'cargo build -p rpcrdma-tools --features verbs --bin rpcrdma'
command -v tmux >/dev/null || { echo "tmux is missing: apt-get install tmux"; exit 77; }
trap 'for process in $(jobs -p); do kill "$process" 2>/dev/null || true; done
    run_tmux kill-server 2>/dev/null || true' EXIT
run_tmux() { tmux -u -f /dev/null -S /run/screen "$@"; }
at=verbs:10.0.0.1:20049
serve server $at --only calls --stats /run/server.stats
"$rpcperf" rate $at -t 8 -q 2 -D 1000 --idle event >/run/load 2>&1 &
load=$!
await bash -c 'rdma resource show cm_id | grep -q "state CONNECT.* comm rpcperf.*dst-addr 10.0.0.1:20049"'

# take_view: writes the JSON view to /run/view.
take_view() { "$RPCRDMA" top --once --json --interval 2 --stats /run/server.stats >/run/view; }
# assert_view WHAT EXPRESSION SHOWN: checks that EXPRESSION is true in the last view, or in one of the next intervals.
assert_view() {
    local end=$((SECONDS + 150))
    until jq -e "$2" /run/view >/dev/null; do
        ((SECONDS <= end)) || fail "top: $1: not true within the time-out: $2: $(</run/view)"
        take_view || true
    done
    echo "- top, $1: $(jq -c "$3" /run/view)"
}
take_view || true
shard='.shards[0] | .address == "'$at'" and .answered'
assert_view "calls and messages a second" \
    "$shard and .calls.now > 0 and .messages_received.now >= .calls.now / 2 and .messages_sent.now > 0" \
    '.shards[0] | [.calls.now, .messages_received.now, .messages_sent.now]'
assert_view "Receives" "$shard and .receives_posted > 0 and .receives_reserved > 0 and .receives_lowest > 0" \
    '.shards[0] | [.receives_posted, .receives_reserved, .receives_lowest]'
assert_view "doorbells and work requests of one" "$shard and .doorbells.now > 0 and .post_work_requests.now >= 1" \
    '.shards[0] | [.doorbells.now, .post_work_requests.now]'
assert_view "time of a call" "$shard and .p50.now > 0 and .p99.now >= .p50.now" '.shards[0] | [.p50.now, .p99.now]'
assert_view "two connections" \
    '[.connections[] | select(.stage == "open" and (.peer | startswith("10.0.0.1")))] | length == 2' \
    '[.connections[].peer]'

run_tmux new-session -d -s t -x 130 -y 30 "exec $RPCRDMA top --interval 1 --stats /run/server.stats"
# On the screen: calls per second, the third word of the shard's row.
is_screen_drawn() {
    run_tmux capture-pane -p -t t >/run/drawn
    awk '/^shard +busy/ { getline; found = $3 ~ /^[1-9]/ } END { exit !found }' /run/drawn && grep -q posted /run/drawn
}
await is_screen_drawn
echo "- top, on a screen: $(grep -A 1 '^shard *busy' /run/drawn | tail -n 1)"
run_tmux send-keys -t t c
await bash -c "tmux -u -S /run/screen capture-pane -p -t t | grep -q '^10\.0\.0\.1.* open'"
run_tmux send-keys -t t q
await bash -c '! tmux -S /run/screen list-sessions'

"$RPCRDMA" exporter --stats /run/server.stats --listen 127.0.0.1:9420 >/run/exporter 2>&1 &
# count_packets: prints the number of packets that the device has received, according to the exporter.
count_packets() {
    python3 -c 'import re, urllib.request
text = urllib.request.urlopen("http://127.0.0.1:9420/metrics").read().decode()
print(re.search(r"device_hw_counter_total\{device=\"rxe0\",port=\"1\",counter=\"rcvd_pkts\"\} (\d+)", text)[1])'
}
await count_packets
before=$(count_packets)
(($(sum_counter doorbells) > 0)) || fail "no doorbells of the device"
has_more_packets() { (($(count_packets) > before)); }
await has_more_packets
echo "- exporter: rcvd_pkts of rxe0 from $before to $(count_packets)"

status=0
"$RPCRDMA" doctor $at --json >/run/report || status=$?
((status <= 1)) || fail "doctor: exit status $status: $(</run/report)"
for check in rdma-device rdma-cm rdma-link gid; do
    [[ $(jq -r ".checks[] | select(.name == \"$check\").status" /run/report) == ok ]] ||
        fail "doctor: $check: $(jq -c ".checks[] | select(.name == \"$check\")" /run/report)"
done
jq -e '.checks[] | select(.name == "rdma-counters").status | . != "unknown" and . != "error"' /run/report >/dev/null ||
    fail "doctor: rdma-counters: $(jq -c '.checks[] | select(.name == "rdma-counters")' /run/report)"
echo "- doctor: $(jq -c '[.checks[] | select(.name | startswith("rdma-")) | {(.name): .observed}] | add' /run/report)"
kill -0 $load || fail "the load has ended: $(</run/load)"
