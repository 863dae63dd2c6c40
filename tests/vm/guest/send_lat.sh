# perftest runs and reports a latency, as the baseline of comparisons.
source "$(dirname "$0")/../lib.sh"

options=(-d rxe0 -x 1 -s 64 -n 1000 -F)
ib_send_lat "${options[@]}" >/dev/null &
server=$!
await is_listening 18515
results=$(ib_send_lat "${options[@]}" 10.0.0.1)
wait "$server"
echo "$results"
awk '$1 == 64 && $2 == 1000 && $5 > 0 { found = 1 } END { exit !found }' <<<"$results" ||
    fail "no latency was reported"
