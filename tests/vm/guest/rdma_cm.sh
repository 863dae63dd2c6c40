# The connection manager connects by IPv4 and IPv6 address. Sends, RDMA Reads and Writes transfer data unchanged.
source "$(dirname "$0")/../lib.sh"
source "$(dirname "$0")/../peers.sh"

# The time limit ends programs that hang in user space. If the kernel hangs, the log shows where it waits.
limit=120
for address in $kernel $kernel6; do
    timeout -k 5 $limit rping -s -a "$address" -C 10 -V & # -V: checks received data
    server=$!
    await is_listening_rdma 7174
    timeout -k 5 $limit rping -c -a "$address" -C 10 -V &
    client=$!
    for ((s = 0; s < limit - 20; s++)); do
        jobs -r | grep -q rping || break
        sleep 1
    done
    for task in $(pgrep rping); do
        for thread in /proc/"$task"/task/*; do
            echo "rping still runs: $thread $(tr '\0' ' ' <"/proc/$task/cmdline")"
            cat "$thread/wchan" "$thread/stack" || true
        done
    done >&2
    wait "$client"
    wait "$server"
done
