# Handles that nfs3d invalidates for the Linux kernel's client, captured on the cable. A READ whose length is no
# multiple of 4 offers a segment for the data and one for the padding. The client keeps the padding's handle until the
# connection ends, so nfs3d must never invalidate it.
source "$(dirname "$0")/../lib.sh"
for tool in dumpcap tshark; do
    command -v $tool >/dev/null || { echo "$tool is missing: apt-get install tshark"; exit 77; }
done
source "$(dirname "$0")/../nfs3d.sh"
program RPCRDMA rpcrdma "cargo build -p rpcrdma-tools --features verbs"
storage
serve
wire
trap 'umount -l /mnt /srv/nfs3d 2>/dev/null || true
    for process in $(jobs -p); do kill "$process" 2>/dev/null || true; done
    wire down' EXIT

capture=$RPCRDMA_VM_RESULTS/invalidate-$DEVICE.pcapng
filter='udp port 4791'
[[ $fabric == verbs ]] || filter='tcp port 20049'
dumpcap -q -i $near -f "$filter or udp port 9" -w "$capture" 2>/run/dumpcap &
capturing=$!
await grep -q '^File: ' /run/dumpcap

head -c 100000 /dev/urandom >$export/file
nfs
odd=(4097 5001 8190 9999 4097 12345 20003 30001) even=(4096 8192 12000 16384)
for len in "${odd[@]}" "${even[@]}"; do
    cmp <(dd if=/mnt/file iflag=count_bytes,direct count="$len" bs="$len" status=none) <(head -c "$len" $export/file) ||
        fail "$len bytes: the read data differs"
done
umount /mnt
captured "$capture" $across
kill -INT $capturing
wait $capturing
chmod a+r "$capture"
quit

# Lists the handles of calls, and those named by Sends With Invalidate (opcode 23 of InfiniBand). tshark prints a line
# per packet with all values of a field. Of several Sends in one TCP segment it sees only the first. There rpcrdma
# decode replaces it, with a line per message.
# messages: lists them by rpcrdma decode.
messages() {
    "$RPCRDMA" decode --json "$capture" >/run/decoded || fail "rpcrdma decode"
    python3 -c 'import json, sys
def handles(of):
    if isinstance(of, dict):
        if "handle" in of: yield of["handle"]
        of = list(of.values())
    if isinstance(of, list):
        for one in of: yield from handles(one)
for line in sys.stdin:
    message = json.loads(line)
    shown = ["0x%08x" % handle for key in ("reads", "writes", "reply") for handle in handles(message[key])]
    invalidated = message["invalidate"]
    by = ("", "") if invalidated is None else ("23", "%08x" % invalidated)
    print(by[0], "", "", ",".join(shown), by[1], message["destination"], sep="\t")' </run/decoded >/run/all
}
# packets: lists them by tshark.
packets() {
    tshark -r "$capture" -T fields -E occurrence=a -E separator=/t -E aggregator=, \
        -e infiniband.bth.opcode -e infiniband.bth.destqp -e infiniband.bth.psn \
        -e rpcordma.rdma_handle -e infiniband.ieth -e ip.dst >/run/all 2>/run/tshark || fail "$(cat /run/tshark)"
}
if [[ $fabric == verbs ]]; then packets; else messages; fi
# Counts retransmitted packets once.
awk -F '\t' '$3 == "" || !seen[$1, $2, $3]++' /run/all >/run/packets
awk -F '\t' -v server=$ours '
    # A call: its own handles, each counted once.
    $6 == server && $4 != "" {
        split("", mine); n = split($4, handles, ","); several = 0
        for (i = 1; i <= n; i++) if (!((h = tolower(handles[i])) in mine)) { mine[h]; several++ }
        for (h in mine) calls[h]++
        if (several > 1) odd++
    }
    $1 == "23" { sub(/,.*/, "", $5); gsub(/:/, "", $5); invalidated["0x" tolower($5)]++; total++ }
    END {
        for (h in calls) if (calls[h] > 1) { kept++; if (h in invalidated) bad = bad " " h }
        for (h in invalidated) if (!(h in calls)) unknown++
        print odd + 0, kept + 0, total + 0, unknown + 0, bad
    }' /run/packets >/run/found
read -r several kept total unknown bad </run/found
echo "$several calls name several handles, $kept handles are in several calls," \
    "$total are invalidated, of which $unknown are of no call"
((several >= ${#odd[@]})) || fail "only $several calls name several handles: there are no odd READs here"
((kept >= 1)) || fail "no handle is in several calls, so the client uses no segment for padding"
((total >= ${#even[@]} && unknown == 0)) || fail "$total handles are invalidated, and $unknown of them are of no call"
[[ -z $bad ]] || fail "handles that the client keeps are invalidated: $bad"
