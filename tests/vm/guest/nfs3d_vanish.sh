# A client machine of nfs3d is gone from one moment to the next, amid its writes, and says no goodbye: from
# then on nothing that is sent over the cable arrives. The server notices by its device, and has all back that was the
# client's; another client is served all the while. When the machine is there again, its mount goes on, and nothing that
# was acknowledged is lost. One that had nothing under way is found out by the server's keep-alive. Nearly all of it is
# waiting: for retries of the device, and of TCP. Whatever runs beside it makes it longer.
# idle
source "$(dirname "$0")/../lib.sh"
source "$(dirname "$0")/../nfs3d.sh"
program RPCRDMA rpcrdma "cargo build -p rpcrdma-tools --features verbs"
modprobe -a sch_ingress cls_matchall act_gact || { echo "no traffic control in this kernel"; exit 77; }
storage
serve --keep-alive 2
# The other one is connected before there is a way over the cable, and so within the device, or where the server is.
"${enter[@]}" "$RPCRDMA" ping -c 100000 -i 0.1 $fabric:$ours >/run/other 2>&1 &
other=$!
answers() { wc -l </run/other; }
await bash -c '(( $(wc -l </run/other) > 5 ))'
wire

# Other tests follow in this machine, whatever becomes of this one.
trap 'mend 2>/dev/null || true; umount -l /mnt /srv/nfs3d 2>/dev/null || true
    for process in $(jobs -p); do kill "$process" 2>/dev/null || true; done; wire down' EXIT
holds() {
    connections
    rdma resource show cm_id | grep -c "state CONNECT.*comm nfs3d" || true
    rdma resource show mr | grep -c "comm rpcrdma-shard" || true
}
holds >/run/before
nfs
head -c 4000000 /dev/urandom >/run/file
copies=()
for i in 1 2 3 4; do
    # Each of them waits for its reply before it goes on. When it has five copies it writes the same again, until it is
    # told to stop, so that it is amid that when the client is gone.
    (for ((round = 0; ; round++)); do
        if ((round >= 5)) && [[ -e /run/enough ]]; then exit; fi
        dd if=/run/file of=/mnt/copy-$i bs=200000 oflag=direct conv=notrunc seek=$((round % 5 * 20)) status=none || exit
    done) &
    copies+=($!)
done
await test -s $export/copy-4
[[ $(connections) -gt $(head -n 1 /run/before) ]] || fail "no connection of the client"

cut_off
cut=$SECONDS
sleep 1
written() { stat -c '%s %y' $export/copy-*; }
written >/run/written
await eval '[[ $(holds) == "$(</run/before)" ]]'
echo "- noticed after $((SECONDS - cut)) s, and all given back"
written | cmp - /run/written || fail "written to by a client that is gone"
for copy in "${copies[@]}"; do kill -0 "$copy" || fail "a copy has ended"; done
before=$(answers)
served() { (($(answers) > before)); }
await served

touch /run/enough
mend
for copy in "${copies[@]}"; do wait "$copy" || fail "a copy failed"; done
for round in {1..5}; do cat /run/file; done | sha256sum >/run/sum
for i in 1 2 3 4; do
    sha256sum <$export/copy-$i | cmp - /run/sum ||
        fail "copy $i is $(stat -c %s $export/copy-$i) bytes, and not 5 times the file"
done
echo "- the mount goes on after $((SECONDS - cut)) s"

# With nothing under way it is found out, too.
[[ $(connections) -gt $(head -n 1 /run/before) ]] || fail "no connection of the client"
cut_off
cut=$SECONDS
await eval '[[ $(holds) == "$(</run/before)" ]]'
echo "- missed after $((SECONDS - cut)) s of quiet"
mend
rm /mnt/copy-1 || fail "the quiet mount does not go on"
umount /mnt
kill -INT $other
wait $other || fail "calls of the other client failed: $(tail /run/other)"
# Whichever comes first finds it out: the device, or the deadline of the server. Either is told.
quit 'WARN: [0-9.]+: connection ended: .*$'
