# Handles that nfs3d invalidates for the Linux kernel's client, captured on the cable. A READ whose length is not
# a multiple of 4 offers a segment for the data and one for the padding. The client keeps the padding's handle until the
# connection ends, so nfs3d must never invalidate it.
source "$(dirname "$0")/../lib.sh"
for tool in dumpcap tshark; do
    command -v $tool >/dev/null || { echo "$tool is missing: apt-get install tshark"; exit 77; }
done
source "$(dirname "$0")/../nfs3d.sh"
find_program RPCRDMA rpcrdma "cargo build -p rpcrdma-tools --features verbs"
mount_storage
serve
run_wire_up
trap 'umount -l /mnt /srv/nfs3d 2>/dev/null || true
    for process in $(jobs -p); do kill "$process" 2>/dev/null || true; done
    run_wire_up down' EXIT

capture=$RPCRDMA_VM_RESULTS/invalidate-$DEVICE.pcapng
filter='udp port 4791'
[[ $fabric == verbs ]] || filter='tcp port 20049'
dumpcap -q -i $near -f "$filter or udp port 9" -w "$capture" 2>/run/dumpcap &
capturing=$!
await grep -q '^File: ' /run/dumpcap

head -c 100000 /dev/urandom >$export/file
mount_nfs
odd=(4097 5001 8190 9999 4097 12345 20003 30001) even=(4096 8192 12000 16384)
for len in "${odd[@]}" "${even[@]}"; do
    cmp <(dd if=/mnt/file iflag=count_bytes,direct count="$len" bs="$len" status=none) <(head -c "$len" $export/file) ||
        fail "$len bytes: the read data differs"
done
umount /mnt
wait_for_capture "$capture" $across
kill -INT $capturing
wait $capturing
chmod a+r "$capture"
stop_server

# The next two functions list the handles of calls, and the handles that Sends With Invalidate (opcode 23 of InfiniBand)
# name. tshark prints a line per packet with all values of a field, but sees only the first of several Sends in one TCP
# segment. rpcrdma decode prints a line per message.
# list_by_rpcrdma: lists the handles by rpcrdma decode.
list_by_rpcrdma() {
    "$RPCRDMA" decode --json "$capture" >/run/decoded || fail "rpcrdma decode"
    python3 -c 'import json, sys
def handles(value):
    if isinstance(value, dict):
        if "handle" in value: yield value["handle"]
        value = list(value.values())
    if isinstance(value, list):
        for item in value: yield from handles(item)
for line in sys.stdin:
    message = json.loads(line)
    shown = ["0x%08x" % handle for key in ("reads", "writes", "reply") for handle in handles(message[key])]
    invalidated = message["invalidate"]
    opcode, key = ("", "") if invalidated is None else ("23", "%08x" % invalidated)
    print(opcode, "", "", ",".join(shown), key, message["destination"], sep="\t")' </run/decoded >/run/all
}
# list_by_tshark: lists the handles by tshark.
list_by_tshark() {
    tshark -r "$capture" -T fields -E occurrence=a -E separator=/t -E aggregator=, \
        -e infiniband.bth.opcode -e infiniband.bth.destqp -e infiniband.bth.psn \
        -e rpcordma.rdma_handle -e infiniband.ieth -e ip.dst >/run/all 2>/run/tshark || fail "$(cat /run/tshark)"
}
if [[ $fabric == verbs ]]; then list_by_tshark; else list_by_rpcrdma; fi
# Counts retransmitted packets once.
awk -F '\t' '$3 == "" || !seen[$1, $2, $3]++' /run/all >/run/packets
awk -F '\t' -v server=$ours '
    # A call: its own handles, each counted once.
    $6 == server && $4 != "" {
        split("", mine); n = split($4, handles, ","); own = 0
        for (i = 1; i <= n; i++) if (!((h = tolower(handles[i])) in mine)) { mine[h]; own++ }
        for (h in mine) calls[h]++
        if (own > 1) odd++
    }
    $1 == "23" { sub(/,.*/, "", $5); gsub(/:/, "", $5); invalidated["0x" tolower($5)]++; total++ }
    END {
        for (h in calls) if (calls[h] > 1) { kept++; if (h in invalidated) bad = bad " " h }
        for (h in invalidated) if (!(h in calls)) unknown++
        print odd + 0, kept + 0, total + 0, unknown + 0, bad
    }' /run/packets >/run/found
read -r multiple kept total unknown bad </run/found
echo "$multiple calls name several handles, $kept handles are in several calls," \
    "$total are invalidated, and $unknown of them belong to no call"
((multiple >= ${#odd[@]})) || fail "only $multiple calls name several handles, expected one for each odd READ"
((kept >= 1)) || fail "no handle is in several calls, so the client uses no segment for padding"
((total >= ${#even[@]} && unknown == 0)) ||
    fail "$total handles are invalidated, and $unknown of them belong to no call"
[[ -z $bad ]] || fail "handles that the client keeps are invalidated: $bad"
