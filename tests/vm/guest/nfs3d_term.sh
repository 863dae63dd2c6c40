# nfs3d is stopped by SIGTERM and restarted repeatedly (ROUNDS) during fio of the Linux kernel's client on a hard mount.
# It completes running calls, the client retransmits the others, and no application gets an error.
source "$(dirname "$0")/../lib.sh"
source "$(dirname "$0")/../nfs3d.sh"
command -v fio >/dev/null || { echo "no fio"; exit 77; }
rounds=${ROUNDS:-4}
mount_storage
serve
mount_nfs

# Each pass writes new data and reads all of it back.
(
    passes=0
    until [[ -e /run/enough ]]; do
        fio --name=verified --directory=/mnt --numjobs=4 --size=4M --bs=64k --rw=randwrite --direct=1 --ioengine=psync \
            --verify=crc32c --verify_fatal=1 --output-format=terse --minimal >/run/fio 2>&1 || exit
        passes=$((passes + 1))
    done
    echo "$passes" >/run/passes
) &
load=$!

count_requests() { print_xprt_figure /mnt 6; }
has_progressed() { (($(count_requests) > before + 20)); }
retransmitted=0
for ((round = 1; round <= rounds; round++)); do
    before=$(count_requests)
    await has_progressed
    kill -TERM "$server"
    wait "$server" || fail "round $round: the server ended with $?: $(cat /run/nfs3d)"
    grep -q '^drained; ' /run/nfs3d || fail "round $round: $(cat /run/nfs3d)"
    left=$(sed -n 's/^drained; .* \([0-9]*\) left for retransmission$/\1/p' /run/nfs3d)
    retransmitted=$((retransmitted + left))
    serve
    kill -0 $load || fail "round $round: fio: $(cat /run/fio)"
done
touch /run/enough
wait $load || fail "fio: $(cat /run/fio)"
echo "- $rounds restarts, $retransmitted calls retransmitted, $(</run/passes) passes of fio"
umount /mnt
stop_server
