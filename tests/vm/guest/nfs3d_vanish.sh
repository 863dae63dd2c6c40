# A client machine of nfs3d vanishes during its writes: from then on the cable delivers nothing. The server's device
# detects it, and the server frees all resources of the client, while another client is served. When the machine
# returns, its mount resumes, and no acknowledged data is lost. If a client has no outstanding calls, the server's
# keep-alive detects that it vanished. Most of the run waits for retries of the device and of TCP, which a loaded host
# prolongs.
# idle
source "$(dirname "$0")/../lib.sh"
source "$(dirname "$0")/../nfs3d.sh"
find_program RPCRDMA rpcrdma "cargo build -p rpcrdma-tools --features verbs"
modprobe -a sch_ingress cls_matchall act_gact || { echo "no traffic control in this kernel"; exit 77; }
mount_storage
serve --keep-alive 2
# The other client connects before the cable has routes, so its packets stay within the device or the server's host.
"${enter[@]}" "$RPCRDMA" ping -c 100000 -i 0.1 $fabric:$ours >/run/other 2>&1 &
other=$!
count_answers() { wc -l </run/other; }
await bash -c '(( $(wc -l </run/other) > 5 ))'
run_wire_up

# Restores the network for the following tests in this machine.
trap 'mend_cable 2>/dev/null || true; umount -l /mnt /srv/nfs3d 2>/dev/null || true
    for process in $(jobs -p); do kill "$process" 2>/dev/null || true; done; run_wire_up down' EXIT
print_resources() {
    count_connections
    rdma resource show cm_id | grep -c "state CONNECT.*comm nfs3d" || true
    rdma resource show mr | grep -c "comm rpcrdma-shard" || true
}
print_resources >/run/before
mount_nfs
head -c 4000000 /dev/urandom >/run/file
copies=()
for i in 1 2 3 4; do
    # Each writer waits for its reply. After five copies it rewrites them until it is stopped, so that a write is in
    # progress when the client vanishes.
    (for ((round = 0; ; round++)); do
        if ((round >= 5)) && [[ -e /run/enough ]]; then exit; fi
        dd if=/run/file of=/mnt/copy-$i bs=200000 oflag=direct conv=notrunc seek=$((round % 5 * 20)) status=none || exit
    done) &
    copies+=($!)
done
await test -s $export/copy-4
[[ $(count_connections) -gt $(head -n 1 /run/before) ]] || fail "no connection of the client"

cut_cable
cut=$SECONDS
sleep 1
print_copy_states() { stat -c '%s %y' $export/copy-*; }
print_copy_states >/run/written
await eval '[[ $(print_resources) == "$(</run/before)" ]]'
echo "- detected after $((SECONDS - cut)) s; all resources are freed"
print_copy_states | cmp - /run/written || fail "a disconnected client has written"
for copy in "${copies[@]}"; do kill -0 "$copy" || fail "a copy ended while the cable was cut"; done
before=$(count_answers)
is_other_client_served() { (($(count_answers) > before)); }
await is_other_client_served

touch /run/enough
mend_cable
for copy in "${copies[@]}"; do wait "$copy" || fail "a copy failed"; done
for round in {1..5}; do cat /run/file; done | sha256sum >/run/sum
for i in 1 2 3 4; do
    sha256sum <$export/copy-$i | cmp - /run/sum ||
        fail "copy $i has $(stat -c %s $export/copy-$i) bytes, which are not 5 times the file"
done
echo "- the mount continues after $((SECONDS - cut)) s"

# A client with no outstanding calls is detected, too.
[[ $(count_connections) -gt $(head -n 1 /run/before) ]] || fail "no connection of the client"
cut_cable
cut=$SECONDS
await eval '[[ $(print_resources) == "$(</run/before)" ]]'
echo "- detected after $((SECONDS - cut)) s without calls"
mend_cable
rm /mnt/copy-1 || fail "the idle mount does not continue"
umount /mnt
kill -INT $other
wait $other || fail "calls of the other client failed: $(tail /run/other)"
# Either the device or the server's time-out detects the lost client first. Both are logged.
stop_server 'WARN: [0-9.]+: connection ended: .*$'
